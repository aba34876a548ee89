"""`/health/live`, `/health/ready` and Prometheus `/metrics`."""

from __future__ import annotations

import time

from alembic.runtime.migration import MigrationContext
from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, generate_latest
from sqlalchemy import func, or_, select

from gxpo_services.api.dependencies import DatabaseDep, ProbeTurn, ReadSession, Scraper
from gxpo_services.api.errors import Unavailable, responses
from gxpo_services.db.migrate import is_usable, newest_revision
from gxpo_services.db.tables import Run, SchedulerRow
from gxpo_services.run_states import EXECUTING, RunState

_SCHEDULER_COUNTERS = {
    "launches": "Jobs submitted.",
    "recoveries": "Runs relaunched.",
    "lost_leases": "Runs that another scheduler took over.",
    "claims": "Runs taken from the queue.",
    "queue_wait_seconds": "Sum of the waits of claimed runs.",
}
"""Metric without its prefix → description; each is a column of SchedulerRow."""
router = APIRouter(tags=["health"])


@router.head("/health/live", include_in_schema=False)
@router.get("/health/live", summary="Liveness")
async def live() -> dict[str, str]:
    """Succeeds as long as the process responds."""
    return {"status": "alive"}


@router.head("/health/ready", include_in_schema=False)
@router.get("/health/ready", summary="Readiness", responses=responses(503))
def ready(database: DatabaseDep, _: ProbeTurn) -> dict[str, str]:
    """Whether the database is reachable and has this version's schema, or a later one."""
    with database.autocommit_connection() as connection:
        present = MigrationContext.configure(connection).get_current_revision()
    if not is_usable(present):
        raise Unavailable(f"the database is at revision {present}, not {newest_revision()}; run `gxpo migrate`")
    return {"status": "ready", "revision": newest_revision()}


@router.get(
    "/metrics",
    summary="Prometheus metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **responses(401, 503)},
)
def prometheus(request: Request, _: Scraper, session: ReadSession) -> Response:
    """Requests, latencies, runs by state and the schedulers' work in Prometheus' text format; requires a token."""
    registry = CollectorRegistry()
    by_state = Gauge("gxpo_runs", "Runs by state.", ("state",), registry=registry)
    counts: dict[str, int] = dict(session.execute(select(Run.state, func.count()).group_by(Run.state)).all())
    for state in RunState:
        by_state.labels(state.value).set(counts.get(state, 0))
    now = time.time()
    queued_since = session.scalar(select(func.min(Run.queued_at)).where(Run.state == RunState.QUEUED))
    free = or_(Run.lease_owner.is_(None), Run.lease_expires_at.is_(None), Run.lease_expires_at < now)
    unheld = session.scalar(select(func.count()).where(Run.state.in_(sorted(EXECUTING)), free))
    recoveries = session.scalar(select(func.sum(Run.recoveries)))
    for name, description, value in (
        ("gxpo_queue_wait_seconds", "Longest wait of a queued run.", now - (queued_since or now)),
        ("gxpo_runs_without_scheduler", "Executing runs that no scheduler holds.", unheld),
        ("gxpo_run_recoveries", "Recoveries of all runs that are not deleted.", recoveries),
    ):
        Gauge(name, description, registry=registry).set(value or 0)
    seconds = Gauge("gxpo_scheduler_tick_age_seconds", "Time since the last round.", ("scheduler",), registry=registry)
    counters = {
        name: Counter(f"gxpo_scheduler_{name}", words, ("scheduler",), registry=registry)
        for name, words in _SCHEDULER_COUNTERS.items()
    }
    for row in session.scalars(select(SchedulerRow).order_by(SchedulerRow.owner)):
        seconds.labels(row.owner).set(max(0.0, now - row.ticked_at))
        for name, counter in counters.items():
            counter.labels(row.owner).inc(getattr(row, name.replace("_seconds", "_s")))
    body = generate_latest(request.app.state.http_metrics.registry) + generate_latest(registry)
    return Response(body, media_type=CONTENT_TYPE_LATEST)
