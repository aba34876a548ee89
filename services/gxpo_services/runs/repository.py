"""SQL of runs: finding them, making and removing them, and changing their state by compare-and-set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import delete, func, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from gxpo_services.runs.models import IdempotencyKey, Run
from gxpo_services.runs.states import TERMINAL, RunState


def find(session: Session, run_id: str, *, lock: bool = False) -> Run | None:
    """A run by its public id. lock: others that want to change it wait for this transaction."""
    query = select(Run).where(Run.id == run_id)
    if lock:
        query = query.with_for_update(of=Run).execution_options(populate_existing=True)
    return session.scalar(query)


def add(session: Session, runs: Sequence[Run]) -> None:
    """New runs, which have their numbers afterwards."""
    for run in runs:
        run.search_text = search_text(run)
    session.add_all(runs)
    session.flush()


def search_text(run: Run) -> str:
    """What a search for a part of a run's name, notes, id, model or tags looks through, in folded_case."""
    return folded_case("\n".join([run.name, run.notes or "", run.id, run.model, *(tag.tag for tag in run.tags)]))


def folded_case(text: str) -> str:
    """Text in which upper and lower case are alike, by Unicode's rules on either database."""
    return text.casefold()


def remove_ended(session: Session, run: Run) -> bool:
    """Delete a run with all that hangs on it, if it has ended; whether it had."""
    query = delete(Run).where(Run.number == run.number, Run.state.in_(sorted(TERMINAL)))
    done: bool = session.execute(query.execution_options(synchronize_session=False)).rowcount == 1  # type: ignore[attr-defined]
    if done:
        session.expunge(run)
    else:
        session.refresh(run)
    return done


def equal_runs(session: Session, config_sha256: str, limit: int) -> list[int]:
    """Numbers of the runs of an equal config, newest first."""
    query = select(Run.number).where(Run.config_sha256 == config_sha256).order_by(Run.number.desc()).limit(limit)
    return list(session.scalars(query))


def count_by_state(session: Session) -> dict[RunState, int]:
    rows = session.execute(select(Run.state, func.count()).group_by(Run.state))
    return {RunState(state): count for state, count in rows}


def claim_key(session: Session, key: IdempotencyKey) -> IdempotencyKey:
    """The owner of an idempotency key: `key` itself when it is the first, else the one that was.

    Of two transactions with one key the later waits here until the earlier has ended, and then sees what it made.
    """
    insert = sqlite.insert if session.get_bind().dialect.name == "sqlite" else postgresql.insert
    columns = IdempotencyKey.__table__.columns
    values = {column.key: getattr(key, column.key) for column in columns}
    made = session.execute(insert(IdempotencyKey).values(**values).on_conflict_do_nothing())
    if made.rowcount == 1:  # type: ignore[attr-defined]
        return key
    return session.get_one(IdempotencyKey, (key.token_id, key.key))


def set_where(
    session: Session, run: Run, values: dict[str, Any], *, state: RunState, lease_token: int | None = None
) -> bool:
    """Write `values` if the run still is in `state` (and, for a scheduler, still under its lease); whether it was.

    The object that the caller holds is refreshed either way.
    """
    query = update(Run).where(Run.number == run.number, Run.state == state)
    if lease_token is not None:
        query = query.where(Run.lease_token == lease_token)
    done: bool = session.execute(query.values(**values).execution_options(synchronize_session=False)).rowcount == 1  # type: ignore[attr-defined]
    session.refresh(run)
    return done
