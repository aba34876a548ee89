"""SQL of runs: find, add, delete, compare-and-set of the state; and what a token may queue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import delete, func, select, update
from sqlalchemy.orm import Session, lazyload

from gxpo_services.api.errors import Forbidden, LimitReached
from gxpo_services.api.principals import Principal, Role
from gxpo_services.db.tables import Run
from gxpo_services.run_states import TERMINAL, RunState
from gxpo_services.settings import ServiceSettings


def find(session: Session, run_id: str, *, lock: bool = False) -> Run | None:
    """A run by its public id. lock: SELECT … FOR UPDATE."""
    query = select(Run).where(Run.id == run_id)
    if lock:
        query = query.with_for_update(of=Run).execution_options(populate_existing=True)
    return session.scalar(query)


def lock(session: Session, run_id: str) -> Run | None:
    """The run, locked until the transaction ends, without its related rows."""
    query = (
        select(Run)
        .where(Run.id == run_id)
        .options(lazyload(Run.tags), lazyload(Run.group), lazyload(Run.document))
        .with_for_update(of=Run)
    )
    return session.scalar(query)


def add(session: Session, runs: Sequence[Run]) -> None:
    """Insert runs and assign their numbers."""
    for run in runs:
        run.search_text = search_text(run)
    session.add_all(runs)
    session.flush()


def search_text(run: Run) -> str:
    """Searchable text of a run (name, notes, id, model and tags) in Unicode folded case, the same on both databases."""
    return "\n".join([run.name, run.notes or "", run.id, run.model, *(tag.tag for tag in run.tags)]).casefold()


def remove_ended(session: Session, run: Run) -> bool:
    """Delete a run and its dependent rows if it has ended; returns whether it had."""
    query = delete(Run).where(Run.number == run.number, Run.state.in_(sorted(TERMINAL)))
    done: bool = session.execute(query.execution_options(synchronize_session=False)).rowcount == 1  # type: ignore[attr-defined]
    if done:
        session.expunge(run)
    else:
        session.refresh(run)
    return done


def set_where(
    session: Session, run: Run, values: dict[str, Any], *, state: RunState, lease_token: int | None = None
) -> bool:
    """Write `values` if the run is still in `state` (and, for a scheduler, under its lease); returns whether it was.

    Refreshes the caller's object in both cases.
    """
    query = update(Run).where(Run.number == run.number, Run.state == state)
    if lease_token is not None:
        query = query.where(Run.lease_token == lease_token)
    done: bool = session.execute(query.values(**values).execution_options(synchronize_session=False)).rowcount == 1  # type: ignore[attr-defined]
    session.refresh(run)
    return done


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
