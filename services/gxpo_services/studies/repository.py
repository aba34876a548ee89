"""SQL of studies."""

from __future__ import annotations

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from gxpo_services.db.tables.runs import Group, Run
from gxpo_services.run_states import TERMINAL


def runs_of(session: Session, group: Group) -> list[Run]:
    """All runs of a study in order of creation."""
    return list(session.scalars(select(Run).where(Run.group_number == group.number).order_by(Run.number)))


def ended_runs(session: Session, kind: str) -> dict[int, int]:
    """group number → ended runs, of the groups of a kind."""
    query = (
        select(Group.number, func.count(Run.number))
        .join(Run, Run.group_number == Group.number)
        .where(Group.kind == kind, Run.state.in_(list(TERMINAL)))
        .group_by(Group.number)
    )
    return dict(session.execute(query).all())


def by_numbers(session: Session, numbers: list[int]) -> list[Group]:
    return list(session.scalars(select(Group).where(Group.number.in_(numbers))))
