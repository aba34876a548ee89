"""Which tests `make test` runs, and which only `make test-all`, and what tests take: docs/tests.md.

`long` marks what repeats a property in further combinations, or takes long for what it adds. What runs on each database
is long on PostgreSQL, unless it is marked `each_database`: then databases differ in it (locks, JSON, upserts, order,
time zones, bulk).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Literal

import psutil
import pytest

Tier = Literal["short", "long"]
SELECTIONS = {"short": "what `make test` runs", "long": "what only `make test-all` runs", "all": "everything"}


def long_reason(item: pytest.Item) -> str | None:
    """Why `make test` leaves a test out; None for one that it runs."""
    if mark := item.get_closest_marker("long"):
        return str(mark.args[0])
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    if parameters.get("database_url") == "postgresql" and not item.get_closest_marker("each_database"):
        return "repeated on PostgreSQL"
    return None


def tier(item: pytest.Item) -> Tier:
    return "long" if long_reason(item) else "short"


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
