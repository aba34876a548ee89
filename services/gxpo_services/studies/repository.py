"""SQL of studies."""

from __future__ import annotations

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from gxpo_services.db.tables.runs import Group, Run
from gxpo_services.run_states import TERMINAL


def runs_of(session: Session, group: Group) -> list[Run]:
    """All runs of a study in order of creation.

    Earlier versions let users submit runs of their own to its group; those have no key and are left out.
    """
    found = session.scalars(select(Run).where(Run.group_number == group.number).order_by(Run.number))
    return [run for run in found if run.group_values]


def ended_runs(session: Session, kind: str) -> dict[int, int]:
    """group number → ended runs, of the groups of a kind."""
    query = (
        select(Group.number, func.count(Run.number))
        .join(Run, Run.group_number == Group.number)
        .where(Group.kind == kind, Run.state.in_(list(TERMINAL)))
        .group_by(Group.number)
    )
    return dict(session.execute(query).all())


def by_number(session: Session, number: int) -> Group | None:
    return session.get(Group, number)
