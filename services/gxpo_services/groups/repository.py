"""SQL of groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import delete, func, select, update
from sqlalchemy.orm import Session

from gxpo_services.db.tables.runs import Group, Run, RunDocument
from gxpo_services.run_states import TERMINAL, RunState


def add(session: Session, group: Group) -> None:
    session.add(group)
    session.flush()


def newest(session: Session, before: int | None, limit: int) -> list[Group]:
    """Groups, newest first; before: only those with a smaller number."""
    query = select(Group).order_by(Group.number.desc()).limit(limit)
    return list(session.scalars(query if before is None else query.where(Group.number < before)))


def numbers_of(session: Session, group: Group, limit: int) -> list[int]:
    """Numbers of a group's runs in order of creation."""
    query = select(Run.number).where(Run.group_number == group.number).order_by(Run.number).limit(limit)
    return list(session.scalars(query))


def configs_of(session: Session, run_numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Configs of runs, by their numbers ascending."""
    query = select(RunDocument.config).where(RunDocument.run_number.in_(run_numbers)).order_by(RunDocument.run_number)
    return list(session.scalars(query))


def count_by_state(session: Session, groups: Sequence[Group]) -> dict[int, dict[RunState, int]]:
    """group number → state → runs."""
    found: dict[int, dict[RunState, int]] = {group.number: {} for group in groups}
    query = (
        select(Run.group_number, Run.state, func.count())
        .where(Run.group_number.in_(list(found)))
        .group_by(Run.group_number, Run.state)
    )
    for number, state, count in session.execute(query):
        if number is not None:
            found[number][RunState(state)] = count
    return found


def find(session: Session, group_id: str, *, lock: bool = False) -> Group | None:
    """A group by its public id. lock: SELECT … FOR UPDATE."""
    query = select(Group).where(Group.id == group_id)
    return session.scalar(query.with_for_update().execution_options(populate_existing=True) if lock else query)


def ids_of(session: Session, group: Group) -> list[str]:
    """Ids of all runs of a group in order of creation."""
    return list(session.scalars(select(Run.id).where(Run.group_number == group.number).order_by(Run.number)))


def unended(session: Session, group: Group) -> list[str]:
    """Ids of the runs of a group that have not ended."""
    query = select(Run.id).where(Run.group_number == group.number, Run.state.not_in(sorted(TERMINAL)))
    return list(session.scalars(query.order_by(Run.number)))


def remove(session: Session, group: Group) -> None:
    """Delete a group; runs that it still has stay without one."""
    session.flush()
    left = update(Run).where(Run.group_number == group.number).values(group_number=None)
    session.execute(left.execution_options(synchronize_session=False))
    session.execute(delete(Group).where(Group.number == group.number).execution_options(synchronize_session=False))
    session.expunge(group)
