"""The package `workbench` with custom components, installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.walkthrough import install

from gxpo_trainer import plugins
from gxpo_trainer.config.components import CHOICES

PROJECT = Path(__file__).parents[1] / "support" / "workbench"


@pytest.fixture(autouse=True)
def _no_components_of_other_tests() -> Iterator[None]:
    """A class that one test names is unknown to the next."""
    yield
    for choice in CHOICES.values():
        choice._by_path.clear()
        choice._broken.clear()


@pytest.fixture(scope="session")
def workbench_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package and its entry points."""
    site = tmp_path_factory.mktemp("installed") / "site"
    install(PROJECT, site)
    return site


@pytest.fixture
def workbench(workbench_site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """This process and those that it starts find the package."""
    monkeypatch.setenv("PYTHONPATH", str(workbench_site))
    monkeypatch.syspath_prepend(str(workbench_site))
    plugins._registered.cache_clear()
    yield workbench_site
    for name in [name for name in sys.modules if name.partition(".")[0] == "workbench"]:
        del sys.modules[name]
    plugins._registered.cache_clear()
