"""Tiers of tests, the order in which several processes take them, what each takes (docs/tests.md), and what all share.

`long` marks what repeats a property in further combinations, or takes long for what it adds. What runs on each database
is long on PostgreSQL, unless it is marked `each_database`: then databases differ in it (locks, JSON, upserts, order,
time zones, bulk).
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Literal

import hypothesis
import psutil
import pytest

from gxpo_trainer import plugins

Tier = Literal["short", "long"]
SELECTIONS = {"short": "what `make test` runs", "long": "what only `make test-all` runs", "all": "everything"}


def tier(item: pytest.Item) -> Tier:
    """`long` for what `make test` leaves out."""
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    repeated = parameters.get("database_url") == "postgresql" and not item.get_closest_marker("each_database")
    return "long" if repeated or item.get_closest_marker("long") else "short"


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
    kept, left = [], []
    for item in items:
        is_named = named and item.nodeid.split("::", 1)[1].startswith(named)
        (kept if selection in ("all", tier(item)) or is_named else left).append(item)
    config.hook.pytest_deselected(items=left)
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


# What tests take.

SAMPLE_S = 0.5


class CpuClock:
    """CPU seconds of this process and its descendants since it was made, so that figures of a busy machine compare with
    those of a quiet one. Processes are sampled, for Ray does not pass on the times of workers that end: the last half
    second of a process is missing, and so are processes that live no longer."""

    def __init__(self) -> None:
        self._seconds: dict[psutil.Process, float] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._sample_forever, daemon=True).start()

    def _sample_forever(self) -> None:
        while True:
            self.read()
            time.sleep(SAMPLE_S)

    def read(self) -> float:
        with self._lock:
            current = psutil.Process()
            for process in (current, *current.children(recursive=True)):
                try:
                    times = process.cpu_times()
                except psutil.Error:
                    continue
                self._seconds[process] = times.user + times.system
            return sum(self._seconds.values())


class Durations:
    """Appends a line of JSON for each test to the file that `GXPO_TEST_TIMES` names."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._clock = CpuClock()
        self._wall: dict[str, float] = {}
        self._outcomes: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._wall, self._outcomes = {}, set()
        before = self._clock.read()
        result = yield
        record = {
            "test": item.nodeid,
            "tier": tier(item),
            "outcome": min(self._outcomes, key=("failed", "skipped", "passed").index, default="failed"),
            "cpu_s": round(self._clock.read() - before, 2),
            "wall_s": self._wall,
        }
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._wall[str(report.when)] = round(report.duration, 3)
        self._outcomes.add(report.outcome)


@pytest.fixture
def server() -> Iterator[object]:
    from support.ingest_server import IngestServer  # of the service, which a machine for GPU tests may lack

    with IngestServer() as server:
        yield server
