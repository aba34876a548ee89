"""Liveness, readiness and Prometheus metrics.

SQL of the service's own metrics.

`/health/live`, `/health/ready` and Prometheus `/metrics`.
"""

from __future__ import annotations

import time

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, generate_latest
from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session

from gxpo_services.api.dependencies import DatabaseDep, ProbeGate, ReadSession, Scraper
from gxpo_services.api.errors import Unavailable, responses
from gxpo_services.db.database import Database
from gxpo_services.db.migrate import is_usable, newest_revision, present_revision
from gxpo_services.db.tables import Run, SchedulerRow
from gxpo_services.run_states import EXECUTING, RunState


def count_by_state(session: Session) -> dict[RunState, int]:
    rows = session.execute(select(Run.state, func.count()).group_by(Run.state))
    return {RunState(state): count for state, count in rows}


def queued_since(session: Session) -> float | None:
    """When the run that has waited longest was queued."""
    return session.scalar(select(func.min(Run.queued_at)).where(Run.state == RunState.QUEUED))


def count_without_lease(session: Session, now: float) -> int:
    """Executing runs that no scheduler holds."""
    free = or_(Run.lease_owner.is_(None), Run.lease_expires_at.is_(None), Run.lease_expires_at < now)
    return session.scalar(select(func.count()).where(Run.state.in_(sorted(EXECUTING)), free)) or 0


def sum_recoveries(session: Session) -> int:
    """Recoveries of all runs."""
    return session.scalar(select(func.coalesce(func.sum(Run.recoveries), 0))) or 0


def schedulers(session: Session) -> list[SchedulerRow]:
    return list(session.scalars(select(SchedulerRow).order_by(SchedulerRow.owner)))


_SCHEDULER_COUNTERS = {
    "launches": "Jobs submitted.",
    "recoveries": "Runs relaunched.",
    "lost_leases": "Runs that another scheduler took over.",
    "claims": "Runs taken from the queue.",
    "queue_wait_seconds": "Sum of the waits of claimed runs.",
}
"""Metric without its prefix → description; each is a column of SchedulerRow."""
router = APIRouter(tags=["health"])


@router.get("/health/live", summary="Liveness")
async def live() -> dict[str, str]:
    """Succeeds as long as the process responds."""
    return {"status": "alive"}


@router.get("/health/ready", summary="Readiness", responses=responses(503))
async def ready(database: DatabaseDep, _: ProbeGate) -> dict[str, str]:
    """Whether the database is reachable and has this version's schema, or a later one."""
    present = await run_in_threadpool(_revision, database)
    if not is_usable(present):
        raise Unavailable(
            f"the database is at revision {present}, this version needs {newest_revision()}; run `gxpo migrate`"
        )
    return {"status": "ready", "revision": newest_revision()}


def _revision(database: Database) -> str | None:
    with database.autocommit_connection() as connection:
        return present_revision(connection)


@router.get(
    "/metrics",
    summary="Prometheus metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **responses(401, 503)},
)
def prometheus(request: Request, _: Scraper, session: ReadSession) -> Response:
    """Requests, latencies, runs by state and the schedulers' work in Prometheus' text format; requires a token."""
    registry = CollectorRegistry()
    gauge = Gauge("gxpo_runs", "Runs by state.", ("state",), registry=registry)
    counts = count_by_state(session)
    for state in RunState:
        gauge.labels(state.value).set(counts.get(state, 0))
    now = time.time()
    gauges = {
        "gxpo_queue_wait_seconds": ("Longest wait of a queued run.", now - (queued_since(session) or now)),
        "gxpo_runs_without_scheduler": (
            "Executing runs that no scheduler holds.",
            count_without_lease(session, now),
        ),
        "gxpo_run_recoveries": ("Recoveries of all runs that are not deleted.", sum_recoveries(session)),
    }
    for name, (description, value) in gauges.items():
        Gauge(name, description, registry=registry).set(value)
    seconds = Gauge("gxpo_scheduler_tick_age_seconds", "Time since the last round.", ("scheduler",), registry=registry)
    counters = {
        name: Counter(f"gxpo_scheduler_{name}", words, ("scheduler",), registry=registry)
        for name, words in _SCHEDULER_COUNTERS.items()
    }
    for row in schedulers(session):
        seconds.labels(row.owner).set(max(0.0, now - row.ticked_at))
        for name, counter in counters.items():
            counter.labels(row.owner).inc(getattr(row, name.replace("_seconds", "_s")))
    body = generate_latest(request.app.state.http_metrics.registry) + generate_latest(registry)
    return Response(body, media_type=CONTENT_TYPE_LATEST)
