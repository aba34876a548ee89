"""SQL of groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from gxpo_services.db.tables.runs import Group, Run, RunDocument
from gxpo_services.run_states import RunState


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
