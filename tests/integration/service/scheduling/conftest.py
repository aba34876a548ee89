"""What tests of the scheduler share: a fixed clock, and a scripted launcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support import queued_runs as runs
from support.scheduling import Clock, Make
from support.scripted_launcher import ScriptedLauncher

from gxpo_services.db.database import Database
from gxpo_services.scheduling.scheduler import Scheduler
from gxpo_services.settings import ServiceSettings


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def launcher() -> ScriptedLauncher:
    return ScriptedLauncher()


@pytest.fixture
def settings(settings: ServiceSettings) -> ServiceSettings:
    return settings.model_copy(update={"max_concurrent_runs": 100})


@pytest.fixture
def scheduler_of(database: Database, settings: ServiceSettings, launcher: ScriptedLauncher, clock: Clock) -> Make:
    def make(owner: str = "first", **changes: Any) -> Scheduler:
        answers = changes.pop("api_answers", lambda: True)
        with_changes = settings.model_copy(update=changes)
        return Scheduler(database, with_changes, launcher, owner=owner, api_answers=answers, clock=clock)

    return make


@pytest.fixture
def running(database: Database, launcher: ScriptedLauncher, clock: Clock) -> Callable[[Scheduler], str]:
    """A run whose trainer has reported once."""

    def make(scheduler: Scheduler, **values: Any) -> str:
        run_id = runs.add_run(database, **values)
        scheduler.tick()
        runs.report(database, run_id, at=clock.now)
        return run_id

    return make
