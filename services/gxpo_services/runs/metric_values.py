"""SQL of single values of metrics, for lists of runs: the last ones, and those at a step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from sqlalchemy import Select, func, or_, select
from sqlalchemy.orm import Session, aliased

from gxpo_services.metrics.blocks import BLOCK_STEPS, decode, one_history
from gxpo_services.metrics.models import Attempt, MetricBlock, MetricLast, MetricName


def last_values(session: Session, runs: Iterable[int], names: Iterable[str]) -> dict[int, dict[str, float | None]]:
    """run number → metric → its last value; NaN is None."""
    query = (
        select(MetricLast.run_number, MetricName.name, MetricLast.last)
        .join(MetricName, MetricName.number == MetricLast.name_number)
        .where(MetricLast.run_number.in_(list(runs)), MetricName.name.in_(list(names)))
    )
    found: dict[int, dict[str, float | None]] = {}
    for number, name, value in session.execute(query):
        found.setdefault(number, {})[name] = value
    return found


def values_at_step(session: Session, metric: str, step: int, runs: Select[Any]) -> dict[int, float]:
    """run number → the metric's newest value at or before `step` in the history that counts; NaN is left out.

    Of each attempt two blocks are enough: in the newest that begins by `step` everything may lie behind it, the one
    before lies wholly in front of it, and there is no empty block.
    """
    later = aliased(Attempt)
    replaced_from = (
        select(func.min(later.first_step))
        .where(later.run_number == MetricBlock.run_number, later.attempt > MetricBlock.attempt)
        .scalar_subquery()
    )
    begin = MetricBlock.block * BLOCK_STEPS
    rank = func.row_number().over(
        partition_by=(MetricBlock.run_number, MetricBlock.attempt), order_by=MetricBlock.block.desc()
    )
    name_number = select(MetricName.number).where(MetricName.name == metric).scalar_subquery()
    ranked = (
        select(MetricBlock.run_number, MetricBlock.attempt, MetricBlock.block, MetricBlock.data, rank.label("rank"))
        .where(
            MetricBlock.name_number == name_number,
            begin <= step,
            or_(replaced_from.is_(None), begin < replaced_from),
            MetricBlock.run_number.in_(runs),
        )
        .subquery()
    )
    blocks: dict[int, dict[int, list[bytes]]] = {}
    chosen = select(ranked).where(ranked.c.rank <= 2).order_by(ranked.c.block)
    for row in session.execute(chosen):
        blocks.setdefault(row.run_number, {}).setdefault(row.attempt, []).append(row.data)
    firsts: dict[int, dict[int, int]] = {}
    for attempt in session.execute(
        select(Attempt.run_number, Attempt.attempt, Attempt.first_step).where(Attempt.run_number.in_(runs))
    ):
        firsts.setdefault(attempt.run_number, {})[attempt.attempt] = attempt.first_step
    values = {number: _newest(by_attempt, firsts.get(number, {}), step) for number, by_attempt in blocks.items()}
    return {number: value for number, value in values.items() if value is not None}


def _newest(by_attempt: dict[int, list[bytes]], firsts: dict[int, int], step: int) -> float | None:
    history: Any = one_history({attempt: decode(data) for attempt, data in by_attempt.items()}, firsts)
    history = history[history["step"] <= step]
    value = float(history["value"][-1]) if len(history) else math.nan
    return None if math.isnan(value) else value
