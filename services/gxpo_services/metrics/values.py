"""SQL of single values of metrics, for lists of runs: the last ones, and those at a step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from sqlalchemy import Select, and_, bindparam, func, or_, select
from sqlalchemy.orm import Session, aliased

from gxpo_services.db.database import BINARY_ROWS
from gxpo_services.db.tables.metrics import Attempt, MetricBlock, MetricLast
from gxpo_services.metrics import repository
from gxpo_services.metrics.blocks import BLOCK_STEPS, RECORD

_last = MetricLast.__table__.c
_LAST = select(_last.run_number, _last.name_number, _last.last).where(
    _last.run_number.in_(bindparam("runs", expanding=True)), _last.name_number.in_(bindparam("names", expanding=True))
)


def last_values(session: Session, runs: Iterable[int], names: Iterable[str]) -> dict[int, dict[str, float | None]]:
    """run number → metric → its last value; NaN is None."""
    by_number = {number: name for name, number in repository.find_numbers(session, list(names)).items()}
    found: dict[int, dict[str, float | None]] = {}
    for run, name, value in session.execute(_LAST, {"runs": list(runs), "names": list(by_number)}):
        found.setdefault(run, {})[by_number[name]] = value
    return found


def values_at_step(session: Session, metric: str, step: int, runs: Select[Any]) -> dict[int, float]:
    """run number → the metric's newest value at or before `step` in the history that counts; NaN is left out.

    Of each attempt two blocks are enough: in the newest that begins by `step` everything may lie behind it, the one
    before lies wholly in front of it, and there is no empty block.
    """
    name = repository.find_numbers(session, [metric]).get(metric)
    if name is None:
        return {}
    rows = session.execute(_newest_blocks(name, step, runs), execution_options={BINARY_ROWS: True}).all()
    # All blocks of all runs in one array: a call of numpy for each would take longer than what it does.
    records = np.frombuffer(b"".join(row.data for row in rows), dtype=RECORD)
    lengths = [len(row.data) // RECORD.itemsize for row in rows]
    ends = np.array([step + 1 if row.end is None else min(row.end, step + 1) for row in rows], dtype=np.int64)
    numbers = np.repeat(np.array([row.run_number for row in rows], dtype=np.int64), lengths)
    counts = records["step"] < np.repeat(ends, lengths)
    numbers, records = numbers[counts], records[counts]
    # By run, then by step; of a step that came twice the later one stays behind the earlier.
    order = np.lexsort((records["step"], numbers))
    numbers, values = numbers[order], records["value"][order]
    newest = np.append(np.diff(numbers) != 0, True) & ~np.isnan(values) if len(numbers) else np.empty(0, dtype=bool)
    return dict(zip(numbers[newest].tolist(), values[newest].tolist(), strict=True))


def _newest_blocks(name: int, step: int, runs: Select[Any]) -> Select[Any]:
    """The two newest blocks of each attempt that begin by `step` and before `end`, from where it is replaced."""
    later = aliased(Attempt)
    end = (
        select(func.min(later.first_step))
        .where(later.run_number == Attempt.run_number, later.attempt > Attempt.attempt)
        .scalar_subquery()
    )
    attempts = (
        select(Attempt.run_number, Attempt.attempt, end.label("end")).where(Attempt.run_number.in_(runs)).subquery()
    )

    def counts(block: type[MetricBlock]) -> Any:
        begin = block.block * BLOCK_STEPS
        return and_(
            block.run_number == attempts.c.run_number,
            block.name_number == name,
            block.attempt == attempts.c.attempt,
            begin <= step,
            or_(attempts.c.end.is_(None), begin < attempts.c.end),
        )

    other = aliased(MetricBlock)
    second = select(other.block).where(counts(other)).order_by(other.block.desc()).limit(1).offset(1).scalar_subquery()
    return (
        select(MetricBlock.run_number, MetricBlock.data, attempts.c.end)
        .join(attempts, and_(counts(MetricBlock), MetricBlock.block >= func.coalesce(second, 0)))
        .order_by(MetricBlock.run_number, MetricBlock.attempt, MetricBlock.block)
    )
