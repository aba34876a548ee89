"""SQL of single metric values for lists of runs: last values, and values at a step."""

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
    """run number → last value of the metric at or before `step` in the effective history, without NaN.

    Two blocks per attempt suffice: the last block that starts at or before `step` may contain only later steps, but the
    block before it contains only earlier ones, and no block is empty.
    """
    name = repository.find_numbers(session, [metric]).get(metric)
    if name is None:
        return {}
    rows = session.execute(_newest_blocks(name, step, runs), execution_options={BINARY_ROWS: True}).all()
    # All blocks of all runs in one array: numpy calls per run would dominate.
    records = np.frombuffer(b"".join(row.data for row in rows), dtype=RECORD)
    lengths = [len(row.data) // RECORD.itemsize for row in rows]
    ends = np.array([step + 1 if row.end is None else min(row.end, step + 1) for row in rows], dtype=np.int64)
    numbers = np.repeat(np.array([row.run_number for row in rows], dtype=np.int64), lengths)
    counts = records["step"] < np.repeat(ends, lengths)
    numbers, records = numbers[counts], records[counts]
    # By run, then by step; stable for repeated steps.
    order = np.lexsort((records["step"], numbers))
    numbers, values = numbers[order], records["value"][order]
    newest = np.append(np.diff(numbers) != 0, True) & ~np.isnan(values) if len(numbers) else np.empty(0, dtype=bool)
    return dict(zip(numbers[newest].tolist(), values[newest].tolist(), strict=True))


def _newest_blocks(name: int, step: int, runs: Select[Any]) -> Select[Any]:
    """The last two blocks of each attempt that start at or before `step` and before `end`, where it is replaced."""
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
