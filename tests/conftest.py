"""The order in which several processes take the tests."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What starts engines first: a file of minutes that one process takes last is waited for by all others."""
    items.sort(key=lambda item: item.get_closest_marker("engine") is None)
