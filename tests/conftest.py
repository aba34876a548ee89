"""The order in which several processes take the tests, what Hypothesis may judge, and the main module."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import hypothesis
import pytest

# A busy machine is no failure: no test depends on the clock.
hypothesis.settings.register_profile("default", hypothesis.settings.default, deadline=None)
hypothesis.settings.load_profile("default")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What starts engines first: a file of minutes that one process takes last is waited for by all others."""
    items.sort(key=lambda item: item.get_closest_marker("engine") is None)


@pytest.fixture(autouse=True)
def _main_module() -> Iterator[None]:
    """A page of the dashboard leaves itself as the main module, which the next process that compares would import."""
    main = sys.modules["__main__"]
    yield
    sys.modules["__main__"] = main
