"""SQL of comparisons and exports; see also the repositories of metrics and samples."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from sqlalchemy import select
from sqlalchemy.orm import Session

from gxpo_services.db.tables.runs import Group, Run
from gxpo_services.metrics import repository as metrics
from gxpo_trainer.compare.rows import Series

Point = tuple[int, int, str, float]
"""attempt, step, metric, value."""


def runs_by_id(session: Session, ids: Collection[str]) -> dict[str, Run]:
    return {run.id: run for run in session.scalars(select(Run).where(Run.id.in_(ids)))}


def groups_by_id(session: Session, ids: Collection[str]) -> dict[str, Group]:
    return {group.id: group for group in session.scalars(select(Group).where(Group.id.in_(ids)))}


def runs_of(session: Session, group: Group, limit: int) -> list[Run]:
    """Runs of a group in order of creation, at most `limit`."""
    return list(session.scalars(select(Run).where(Run.group_number == group.number).order_by(Run.number).limit(limit)))


def series_of(session: Session, run_numbers: Sequence[int], names: Collection[str]) -> dict[int, Series]:
    """The named metrics of each run as arrays, from the effective history."""
    numbers = metrics.find_numbers(session, names)
    found: dict[int, dict[str, tuple[np.ndarray, np.ndarray]]] = {number: {} for number in run_numbers}
    names_by_number = {number: name for name, number in numbers.items()}
    firsts = metrics.first_steps(session, run_numbers)
    for (run, name), records in metrics.histories(session, list(names_by_number), firsts).items():
        steps, values = records["step"].astype(np.float64), records["value"].astype(np.float64)
        found[run][names_by_number[name]] = (steps, values)
    return dict(found)


def points_of(session: Session, run_number: int, names: Collection[str]) -> list[Point]:
    """All values of the named metrics of a run, metric by metric in order of steps."""
    names_by_number = {number: name for name, number in metrics.find_numbers(session, names).items()}
    firsts = metrics.first_steps(session, [run_number])
    points: list[Point] = []
    for (_, number), records in metrics.histories(session, list(names_by_number), firsts).items():
        steps = records["step"]
        # At each step the latest attempt started by then is effective.
        attempts = np.zeros(len(records), dtype=np.int64)
        for attempt, first in sorted(firsts[run_number].items()):
            attempts[steps >= first] = attempt
        name = names_by_number[number]
        columns = (attempts.tolist(), steps.tolist(), records["value"].tolist())
        points += [(attempt, step, name, value) for attempt, step, value in zip(*columns, strict=True)]
    return points
