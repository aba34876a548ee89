"""SQL of samples and evaluations. Queries return the effective history (trainer's report.py)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, case, exists, func, insert, or_, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from gxpo_services.db.tables.metrics import Attempt
from gxpo_services.db.tables.samples import EvaluationRow, Sample


class GroupCount(NamedTuple):
    """Responses to a prompt in a step, and how many of them are correct."""

    step: int
    attempt: int
    group: int
    prompt_id: str
    responses: int
    correct: int


def add_samples(session: Session, run_number: int, rows: Sequence[dict[str, Any]]) -> None:
    if rows:
        session.execute(insert(Sample.__table__), [{"run_number": run_number, **row} for row in rows])  # type: ignore[arg-type]


def add_evaluations(session: Session, run_number: int, rows: Sequence[dict[str, Any]]) -> None:
    if rows:
        session.execute(insert(EvaluationRow.__table__), [{"run_number": run_number, **row} for row in rows])  # type: ignore[arg-type]


def arrived_samples(session: Session, run_number: int, *, after: int, limit: int) -> list[Sample]:
    """Samples in order of arrival, after the number `after`."""
    query = select(Sample).where(Sample.run_number == run_number, Sample.number > after, _counts(Sample))
    return list(session.scalars(query.order_by(Sample.number).limit(limit)))


def newest_samples(
    session: Session,
    run_number: int,
    *,
    step: int | None,
    verdict: str | None,
    group: int | None = None,
    after: tuple[int, int] | None,
    limit: int,
) -> list[Sample]:
    """Samples of the newest step first, those of a step in order of arrival. after: step and number of a sample."""
    query = select(Sample).where(Sample.run_number == run_number, _counts(Sample))
    if step is not None:
        query = query.where(Sample.step == step)
    if verdict is not None:
        query = query.where(Sample.verdict == verdict)
    if group is not None:
        query = query.where(Sample.group_index == group)
    if after is not None:
        last_step, last_number = after
        query = query.where(Sample.step <= last_step, or_(Sample.step < last_step, Sample.number > last_number))
    return list(session.scalars(query.order_by(Sample.step.desc(), Sample.number).limit(limit)))


def group_counts(session: Session, rows: Sequence[Sample]) -> list[GroupCount]:
    """Responses of the groups that these samples of a run belong to, in order of their first sample."""
    if not rows:
        return []
    keys = dict.fromkeys((row.step, row.attempt, row.group_index, row.prompt_id) for row in rows)
    group = (Sample.step, Sample.attempt, Sample.group_index, Sample.prompt_id)
    query = select(*group, func.count(), func.sum(case((Sample.verdict == "correct", 1), else_=0))).where(
        Sample.run_number == rows[0].run_number,
        Sample.step.in_({row.step for row in rows}),
        Sample.group_index.in_({row.group_index for row in rows}),
    )
    found = {tuple(row[:4]): (row[4], row[5]) for row in session.execute(query.group_by(*group))}
    return [GroupCount(*key, *found[key]) for key in keys]


def sample_steps(session: Session, run_number: int) -> list[int]:
    """Steps that have samples."""
    # The index yields few pairs of step and attempt, which are then filtered.
    pairs = select(Sample.run_number, Sample.step, Sample.attempt).where(Sample.run_number == run_number).distinct()
    found = pairs.subquery()
    query = select(found.c.step).where(_not_replaced(found.c.run_number, found.c.attempt, found.c.step)).distinct()
    return sorted(session.scalars(query))


def evaluations(
    session: Session, run_number: int, *, benchmark: str | None = None, after: int | None = None
) -> list[dict[str, Any]]:
    """Records in order of steps and benchmarks, one each: the last one of the latest attempt."""
    return evaluations_of(session, [run_number], benchmark=benchmark, after=after)[run_number]


def evaluations_of(
    session: Session, run_numbers: Collection[int], *, benchmark: str | None = None, after: int | None = None
) -> dict[int, list[dict[str, Any]]]:
    """The same of several runs, by their numbers."""
    rows = EvaluationRow.__table__.c
    query = select(rows.run_number, rows.step, rows.benchmark, rows.record, rows.attempt, rows.number)
    query = query.where(rows.run_number.in_(run_numbers), _not_replaced(rows.run_number, rows.attempt, rows.step))
    if benchmark is not None:
        query = query.where(rows.benchmark == benchmark)
    if after is not None:
        query = query.where(rows.step > after)
    chosen: dict[int, dict[tuple[int, str], dict[str, Any]]] = {number: {} for number in run_numbers}
    # Sorted here: a database would move the records with their thousands of scores.
    for row in sorted(session.execute(query), key=lambda row: (row.attempt, row.number)):
        chosen[row.run_number][row.step, row.benchmark] = row.record
    return {number: [found[key] for key in sorted(found)] for number, found in chosen.items()}


def _counts(table: type[Sample]) -> ColumnElement[bool]:
    return _not_replaced(table.run_number, table.attempt, table.step)


def _not_replaced(
    run: InstrumentedAttribute[int] | ColumnElement[int],
    attempt: InstrumentedAttribute[int] | ColumnElement[int],
    step: InstrumentedAttribute[int] | ColumnElement[int],
) -> ColumnElement[bool]:
    """No later attempt reported on this step or an earlier one."""
    return ~exists().where(Attempt.run_number == run, Attempt.attempt > attempt, Attempt.first_step <= step)
