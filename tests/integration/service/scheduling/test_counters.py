"""A scheduler's own metrics, from its work to what Prometheus reads."""

from __future__ import annotations

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import select
from sqlalchemy.exc import OperationalError
from support.scheduling import Cluster

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


def test_launches_recoveries_waits_and_lost_leases_are_counted(cluster: Cluster, client: TestClient) -> None:
    first = cluster.scheduler("first")
    run_ids = [cluster.add_run(queued_at=cluster.clock.now - wait) for wait in (10.0, 30.0)]
    first.tick()
    cluster.launcher.ends(f"{run_ids[0]}-1", "failed")
    first.tick()
    first.tick()
    cluster.clock.passes(5)
    first.tick()
    metrics = scraped(client)
    assert metrics["claims_total", "first"] == 2
    assert metrics["queue_wait_seconds_total", "first"] == 40
    assert (metrics["launches_total", "first"], metrics["recoveries_total", "first"]) == (3, 1)
    assert metrics["lost_leases_total", "first"] == 0

    cluster.clock.passes(60)  # the leases have run out
    cluster.scheduler("second").tick()
    first.tick()
    metrics = scraped(client)
    assert metrics["lost_leases_total", "first"] == 2
    assert {name for _, name in metrics} == {"first", "second"}
    cluster.clock.passes(KEPT_S + 1)
    first.tick()
    assert {name for _, name in scraped(client)} == {"first"}


def test_a_round_that_raises_does_not_count(cluster: Cluster) -> None:
    scheduler = cluster.scheduler("first")
    cluster.add_run()
    scheduler.tick()
    ended_at = cluster.clock.now

    def gone(verb: str, job_id: str) -> None:
        raise OperationalError("", {}, Exception("the database is gone"))

    cluster.launcher.before = gone
    cluster.clock.passes(60)
    with pytest.raises(OperationalError):
        scheduler.tick()
    assert ticked_at(cluster.database) == ended_at
    cluster.launcher.before = lambda verb, job_id: None
    scheduler.tick()
    assert ticked_at(cluster.database) == cluster.clock.now


def ticked_at(database: Database) -> float:
    with database.reading() as session:
        return session.scalars(select(SchedulerRow.ticked_at)).one()
