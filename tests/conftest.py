"""Tiers of tests, the order in which several processes take them, and what every test shares."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from support.tiers import SELECTIONS, Durations, tier

from gxpo_trainer import plugins

# A busy machine is no failure: no test depends on the clock.
hypothesis.settings.register_profile("default", hypothesis.settings.default, deadline=None)
hypothesis.settings.load_profile("default")


def pytest_addoption(parser: pytest.Parser) -> None:
    choices = "; ".join(f"{name}: {what}" for name, what in SELECTIONS.items())
    parser.addoption("--tier", choices=SELECTIONS, default="short", help=choices)


def pytest_configure(config: pytest.Config) -> None:
    if file := os.environ.get("GXPO_TEST_TIMES"):
        config.pluginmanager.register(Durations(Path(file).resolve()))


def pytest_report_header(config: pytest.Config) -> str:
    selection = config.getoption("tier")
    return f"tier: {selection}, {SELECTIONS[selection]} (--tier {'|'.join(SELECTIONS)}; a named id always runs)"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tier, and what was named by id; put what starts engines first.

    A file of minutes that one process takes last is waited for by all others.
    """
    selection = config.getoption("tier")
    named = tuple(argument.split("::", 1)[1] for argument in config.args if "::" in argument)
    kept = [
        item
        for item in items
        if selection in ("all", tier(item)) or (named and item.nodeid.split("::", 1)[1].startswith(named))
    ]
    config.hook.pytest_deselected(items=[item for item in items if item not in {*kept}])
    items[:] = sorted(kept, key=lambda item: item.get_closest_marker("engine") is None)


@pytest.fixture(autouse=True)
def _no_list_of_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service limits what its own process imports; one that an earlier test started here must not limit this test."""
    for name in (plugins.ALLOWLIST, *plugins.ALLOWLIST_OF_KIND.values()):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _main_module() -> Iterator[None]:
    """A page of the dashboard leaves itself as the main module, which the next process that compares would import."""
    main = sys.modules["__main__"]
    yield
    sys.modules["__main__"] = main
