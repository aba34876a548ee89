"""A scheduler's own metrics, from its work to what Prometheus reads."""

from __future__ import annotations

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import select
from sqlalchemy.exc import OperationalError
from support import queued_runs as runs
from support.scheduling import Clock, Make
from support.scripted_launcher import ScriptedLauncher

from gxpo_services.db.database import Database
from gxpo_services.db.tables import SchedulerRow
from gxpo_services.scheduling.leases import KEPT_S


def scraped(client: TestClient) -> dict[tuple[str, str], float]:
    """(metric, scheduler) → value."""
    return {
        (sample.name.removeprefix("gxpo_scheduler_"), sample.labels["scheduler"]): sample.value
        for family in text_string_to_metric_families(client.get("/metrics").text)
        for sample in family.samples
        if sample.name.startswith("gxpo_scheduler_") and not sample.name.endswith("_created")
    }


def test_launches_recoveries_waits_and_lost_leases_are_counted(
    client: TestClient, database: Database, launcher: ScriptedLauncher, scheduler_of: Make, clock: Clock
) -> None:
    first = scheduler_of("first")
    run_ids = [runs.add_run(database, queued_at=clock.now - wait) for wait in (10.0, 30.0)]
    first.tick()
    launcher.ends(f"{run_ids[0]}-1", "failed")
    first.tick()
    first.tick()
    clock.passes(5)
    first.tick()
    found = scraped(client)
    assert found["claims_total", "first"] == 2
    assert found["queue_wait_seconds_total", "first"] == 40
    assert (found["launches_total", "first"], found["recoveries_total", "first"]) == (3, 1)
    assert found["lost_leases_total", "first"] == 0

    clock.passes(60)  # the leases have run out
    scheduler_of("second").tick()
    first.tick()
    found = scraped(client)
    assert found["lost_leases_total", "first"] == 2
    assert {name for _, name in found} == {"first", "second"}
    clock.passes(KEPT_S + 1)
    first.tick()
    assert {name for _, name in scraped(client)} == {"first"}


def test_a_round_that_raises_does_not_count(
    database: Database, launcher: ScriptedLauncher, scheduler_of: Make, clock: Clock
) -> None:
    scheduler = scheduler_of("first")
    runs.add_run(database)
    scheduler.tick()
    ended_at = clock.now

    def gone(verb: str, job_id: str) -> None:
        raise OperationalError("", {}, Exception("the database is gone"))

    launcher.before = gone
    clock.passes(60)
    with pytest.raises(OperationalError):
        scheduler.tick()
    assert ticked_at(database) == ended_at
    launcher.before = lambda verb, job_id: None
    scheduler.tick()
    assert ticked_at(database) == clock.now


def ticked_at(database: Database) -> float:
    with database.reading() as session:
        return session.scalars(select(SchedulerRow.ticked_at)).one()
