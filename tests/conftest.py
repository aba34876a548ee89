"""How tests are shared out when several processes run them (`make test`)."""

from __future__ import annotations

import pytest

ONE_AFTER_THE_OTHER = ("browser", "chaos")
"""Tests that start many processes and wait for them; two at once would wait for each other."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file's tests stay in one process, where they share what is dear to start: Ray, engines, databases."""
    for item in items:
        alone = any(word in item.path.as_posix() for word in ONE_AFTER_THE_OTHER)
        item.add_marker(pytest.mark.xdist_group("alone" if alone else item.path.stem))
