"""How metrics are stored, and the SQL that reads and writes them.

A block is one database row with 128 steps of a metric: records of (step int32, value float64), little-endian, 12 bytes
each. Ingest appends bytes, a chart of 5,000 steps reads 40 rows, and NaN and the infinities keep their bits. Last and
extreme values have a table of their own, for lists."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from sqlalchemy import LargeBinary, String, any_, bindparam, cast, delete, exists, func, literal, select
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import Session, aliased

from gxpo_services.db.database import BINARY_ROWS, INSERTS
from gxpo_services.db.tables import Attempt, MetricBlock, MetricLast, MetricName

BLOCK_STEPS = 128
RECORD = np.dtype([("step", "<i4"), ("value", "<f8")])
# Table columns instead of ORM attributes: their statements run in half the time. Made once where each report has them:
# making a statement takes longer than its rows.
_attempt, _last, _name = (table.__table__.c for table in (Attempt, MetricLast, MetricName))

Records = npt.NDArray[np.void]


def encode(rows: Iterable[tuple[int, Mapping[str, float]]]) -> dict[tuple[str, int], bytes]:
    """(metric, block) → bytes to append, from (step, {metric: value}) in order of arrival."""
    gathered: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for step, metrics in rows:
        block = step // BLOCK_STEPS
        for name, value in metrics.items():
            gathered.setdefault((name, block), []).append((step, value))
    return {key: np.array(values, dtype=RECORD).tobytes() for key, values in gathered.items()}


def decode(data: Iterable[bytes]) -> Records:
    """Records of several blocks of an attempt in order of steps; a repeated step keeps its last value."""
    records = np.frombuffer(b"".join(data), dtype=RECORD)
    if (records["step"][1:] > records["step"][:-1]).all():
        return records
    records = records[np.argsort(records["step"], kind="stable")]
    ascending: Records = records[np.append(np.diff(records["step"]) > 0, True)]
    return ascending


def one_history(by_attempt: Mapping[int, Records], first_steps: Mapping[int, int]) -> Records:
    """The history that counts: from the first step that an attempt reported on, it replaces all earlier ones.

    by_attempt: records of one metric in order of steps. first_steps: of every attempt of the run, those without this
    metric too. So what is left of an attempt lies before all that is left of later ones.
    """
    parts = []
    for attempt, records in sorted(by_attempt.items()):
        later = [first for other, first in first_steps.items() if other > attempt]
        parts.append(records[records["step"] < min(later)] if later else records)
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


BACKWARD_PASSES, TOKENS, TRAINING_S = "update/backward_passes_total", "rollout/tokens_total", "time/training_s"
SCORE = "eval/average/pass@1"
NEVER_SMOOTHED = ("eval/", "gate/", "update/backward_passes")
"""Prefixes of metrics whose averages would mislead: evaluations are few and have intervals, a single step above the
threshold fires the gate, and passes are counted."""


_AT_ONCE = 500
MOST_OF_RUN = 2000
"""Maximum number of metrics of a run, not counting those of its progress and score. Ours have about 150, and for each
benchmark 3·samples_per_prompt + 6, or twice as many with full_at_end."""


@dataclass(slots=True)
class Summary:
    """Last and extreme values of one metric; None stands for NaN, and for extremes of nothing but NaN."""

    last: float | None
    last_step: int
    lowest: float | None
    highest: float | None

    def add(self, step: int, value: float) -> None:
        """One more value, of a later step."""
        self.last, self.last_step = (None if math.isnan(value) else value), step
        if self.last is not None:
            self.lowest = value if self.lowest is None else min(self.lowest, value)
            self.highest = value if self.highest is None else max(self.highest, value)


def find_numbers(session: Session, names: Collection[str], *, lock: bool = False) -> dict[str, int]:
    """Numbers of known names. lock: they are not deleted before the end of the transaction."""
    # An array on PostgreSQL: psycopg parses a statement of more than 50 parameters each time.
    is_array, wanted, numbers = session.get_bind().dialect.name == "postgresql", list(names), dict[str, int]()
    for begin in range(0, len(wanted), _AT_ONCE):
        some = wanted[begin : begin + _AT_ONCE]
        among = _name.name == any_(literal(some, postgresql.ARRAY(String))) if is_array else _name.name.in_(some)
        query = select(_name.name, _name.number).where(among)
        if lock:
            query = query.with_for_update(read=True, key_share=True)
        numbers |= {row.name: row.number for row in session.execute(query)}
    return numbers


def numbers_of(session: Session, names: Collection[str]) -> dict[str, int]:
    """Numbers of names, locked; adds new ones in sorted order, so that two writers cannot deadlock."""
    numbers = find_numbers(session, names, lock=True)
    missing = sorted(set(names) - numbers.keys())
    if not missing:
        return numbers
    insert = INSERTS[session.get_bind().dialect.name](MetricName.__table__)
    insert = insert.on_conflict_do_nothing(index_elements=["name"])
    session.execute(insert, [{"name": name} for name in missing])
    return numbers | find_numbers(session, missing, lock=True)


def delete_unused_names(session: Session, most: int) -> int:
    """Delete names that no run has values of any more, at most `most`; how many.

    The one with the largest number stays: SQLite would give the number to another name.
    """
    largest = select(func.max(aliased(MetricName).number)).scalar_subquery()
    used = (exists().where(table.name_number == MetricName.number) for table in (MetricBlock, MetricLast))
    unused = select(MetricName.number).where(MetricName.number < largest, *(~one for one in used)).limit(most)
    unused = unused.with_for_update(of=MetricName, skip_locked=True)
    gone = delete(MetricName).where(MetricName.number.in_(unused)).execution_options(synchronize_session=False)
    return int(session.execute(gone).rowcount)  # type: ignore[attr-defined]


def names_of(session: Session, run_number: int) -> list[str]:
    """Metrics that a run has values of, in order."""
    query = select(MetricName.name).join(MetricLast, MetricLast.name_number == MetricName.number)
    return sorted(session.scalars(query.where(MetricLast.run_number == run_number)))


_FIRST_STEPS = select(_attempt.run_number, _attempt.attempt, _attempt.first_step).where(
    _attempt.run_number.in_(bindparam("runs", expanding=True))
)


def first_steps(session: Session, run_numbers: Iterable[int]) -> dict[int, dict[int, int]]:
    """The first step of each attempt, by run."""
    firsts: dict[int, dict[int, int]] = {number: {} for number in run_numbers}
    for run, attempt, first_step in session.execute(_FIRST_STEPS, {"runs": list(firsts)}):
        firsts[run][attempt] = first_step
    return firsts


def put_first_steps(session: Session, run_number: int, firsts: Mapping[int, int]) -> None:
    rows = [{"run_number": run_number, "attempt": a, "first_step": first} for a, first in sorted(firsts.items())]
    _put(session, Attempt, ("first_step",), rows)


def append_blocks(session: Session, run_number: int, attempt: int, parts: Mapping[tuple[int, int], bytes]) -> None:
    """Append bytes to blocks, by (number of the name, block)."""
    rows = [
        {"run_number": run_number, "name_number": name, "attempt": attempt, "block": block, "data": data}
        for (name, block), data in sorted(parts.items())
    ]
    _put(session, MetricBlock, ("data",), rows)


_SUMMARY = Summary.__slots__
_SUMMARIES = (
    select(_name.name, _last.name_number, *(_last[field] for field in _SUMMARY))
    .join_from(MetricLast.__table__, MetricName.__table__, _last.name_number == _name.number)
    .where(_last.run_number == bindparam("run"))
)


def summaries(session: Session, run_number: int) -> tuple[dict[str, int], dict[int, Summary]]:
    """Numbers of the names of a run's metrics, and their last and extreme values by number."""
    rows = session.execute(_SUMMARIES, {"run": run_number}).all()
    return {name: number for name, number, *_ in rows}, {number: Summary(*values) for _, number, *values in rows}


def put_summaries(session: Session, run_number: int, changed: Mapping[int, Summary | None]) -> None:
    """Write last and extreme values; None deletes them."""
    gone = [name for name, summary in changed.items() if summary is None]
    if gone:
        condition = (MetricLast.run_number == run_number) & MetricLast.name_number.in_(gone)
        session.execute(delete(MetricLast).where(condition).execution_options(synchronize_session=False))
    rows = [
        {"run_number": run_number, "name_number": name, **{field: getattr(summary, field) for field in _SUMMARY}}
        for name, summary in sorted(changed.items())
        if summary is not None
    ]
    _put(session, MetricLast, _SUMMARY, rows)


def histories(
    session: Session, names: Collection[int], firsts: Mapping[int, Mapping[int, int]], *, after: int | None = None
) -> dict[tuple[int, int], Records]:
    """The history that counts of each (run, name) that has values; `firsts`: first steps of attempts, by run.

    after: only later steps.
    """
    table = MetricBlock.__table__.c
    query = (
        select(table.run_number, table.name_number, table.attempt, table.data)
        .where(table.run_number.in_(firsts), table.name_number.in_(names))
        .order_by(table.run_number, table.name_number, table.attempt, table.block)
    )
    if after is not None:
        query = query.where(table.block >= (after + 1) // BLOCK_STEPS)
    gathered: dict[tuple[int, int], dict[int, list[bytes]]] = {}
    for run, name, attempt, data in session.execute(query, execution_options={BINARY_ROWS: True}).all():
        gathered.setdefault((run, name), {}).setdefault(attempt, []).append(data)
    effective: dict[tuple[int, int], Records] = {}
    for (run, name), attempts in gathered.items():
        records = one_history({attempt: decode(data) for attempt, data in attempts.items()}, firsts[run])
        effective[run, name] = records if after is None else records[records["step"] > after]
    return effective


def summary_of(records: Records) -> Summary | None:
    """Last and extreme values of a history, None of an empty one."""
    if len(records) == 0:
        return None
    values = records["value"][~np.isnan(records["value"])]
    lowest, highest = (float(values.min()), float(values.max())) if len(values) else (None, None)
    last = float(records["value"][-1])
    return Summary(None if math.isnan(last) else last, int(records["step"][-1]), lowest, highest)


def _put(session: Session, table: Any, names: tuple[str, ...], rows: list[dict[str, Any]]) -> None:
    if rows:
        dialect = session.get_bind().dialect.name
        # PostgreSQL takes an array of each column: a statement for each row costs several times as much.
        whole = {name: [row[name] for row in rows] for name in rows[0]} if dialect == "postgresql" else rows
        session.execute(_upsert(dialect, table, names), whole)


@functools.cache
def _upsert(dialect: str, table: Any, names: tuple[str, ...]) -> Any:
    """Insert rows, or replace these columns; bytes are appended. Making the statement takes longer than a row."""
    insert = INSERTS[dialect](table.__table__)
    if dialect == "postgresql":
        columns = list(table.__table__.c)
        arrays = (func.unnest(bindparam(column.key, type_=postgresql.ARRAY(column.type))) for column in columns)
        insert = insert.from_select(columns, select(*arrays))
    changed: dict[str, Any] = {name: insert.excluded[name] for name in names}
    if table is MetricBlock:
        # In SQLite, || of two blobs is a text; the cast makes it a blob with the same bytes.
        changed = {"data": cast(MetricBlock.data.op("||")(insert.excluded.data), LargeBinary)}
    return insert.on_conflict_do_update(index_elements=list(table.__table__.primary_key), set_=changed)


def last_values(session: Session, runs: Iterable[int], names: Iterable[str]) -> dict[int, dict[str, float | None]]:
    """run number → metric → its last value; NaN is None."""
    by_number = {number: name for name, number in find_numbers(session, list(names)).items()}
    values: dict[int, dict[str, float | None]] = {}
    columns = (MetricLast.run_number, MetricLast.name_number, MetricLast.last)
    query = select(*columns).where(MetricLast.run_number.in_(list(runs)), MetricLast.name_number.in_(by_number))
    for run, name, value in session.execute(query):
        values.setdefault(run, {})[by_number[name]] = value
    return values
