"""What a token may queue: a number of runs, and priority above normal for admins alone."""

from __future__ import annotations

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from gxpo_services.access.principals import Principal, Role
from gxpo_services.api.errors import Forbidden, LimitReached
from gxpo_services.db.tables.runs import Run
from gxpo_services.run_states import RunState
from gxpo_services.settings import ServiceSettings

_LOCK = 0x67787562  # "gxub"
NORMAL_PRIORITY = 0


def check_priority(principal: Principal, priority: int) -> None:
    """Raise Forbidden for a priority above normal, unless the principal is an admin."""
    if priority > NORMAL_PRIORITY and principal.role < Role.ADMIN:
        raise Forbidden(f"priority {priority} is above {NORMAL_PRIORITY}, which only an admin may set")


def allowed_priority(principal: Principal, priority: int) -> int:
    """The priority of a copied run, at most normal unless the principal is an admin."""
    return priority if principal.role >= Role.ADMIN else min(priority, NORMAL_PRIORITY)


def check_queue(session: Session, server: ServiceSettings, principal: Principal, more: int = 1) -> None:
    """Raise LimitReached unless the token may have `more` further queued runs.

    On PostgreSQL, submissions of one token are serialized until their transactions end; SQLite has one writer anyway.
    """
    if session.get_bind().dialect.name == "postgresql":
        session.execute(select(func.pg_advisory_xact_lock(_LOCK, func.hashtext(principal.token_id))))
    mine = (Run.state == RunState.QUEUED, Run.created_by_id == principal.token_id)
    queued = session.scalar(select(func.count()).where(*mine)) or 0
    most = server.max_queued_per_user
    if queued + more > most:
        raise LimitReached(
            f"token {principal.name!r} has {queued} queued runs; with {more} more it would exceed "
            f"GXPO_MAX_QUEUED_PER_USER = {most}; wait until some have started, or cancel them"
        )
