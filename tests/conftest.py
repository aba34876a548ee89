"""The order in which several processes take the tests, and what Hypothesis may judge."""

from __future__ import annotations

import hypothesis
import pytest

# A busy machine is no failure: no test depends on the clock.
hypothesis.settings.register_profile("default", hypothesis.settings.default, deadline=None)
hypothesis.settings.load_profile("default")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What starts engines first: a file of minutes that one process takes last is waited for by all others."""
    items.sort(key=lambda item: item.get_closest_marker("engine") is None)
