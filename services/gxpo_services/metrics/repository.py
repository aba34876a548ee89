"""SQL of metrics: names, blocks, attempts and last values."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import LargeBinary, Pool, cast, delete, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from gxpo_services.db.database import BINARY_ROWS
from gxpo_services.db.tables.metrics import Attempt, MetricBlock, MetricLast, MetricName
from gxpo_services.db.tables.runs import Run
from gxpo_services.metrics.blocks import BLOCK_STEPS, RECORD, Records, decode, one_history

_NUMBERS: WeakKeyDictionary[Pool, dict[str, int]] = WeakKeyDictionary()
"""Numbers of metric names, cached by database; they are immutable."""
_AT_ONCE = 500
_MADE_NAMES = "gxpo_made_metric_names"


@dataclass(slots=True)
class Summary:
    """Last and extreme values of one metric; None stands for NaN, and for extremes of nothing but NaN."""

    last: float | None
    last_step: int
    lowest: float | None
    highest: float | None

    def add(self, step: int, value: float) -> None:
        """One more value, of a later step."""
        self.last_step = step
        if math.isnan(value):
            self.last = None
            return
        self.last = value
        self.lowest = value if self.lowest is None else min(self.lowest, value)
        self.highest = value if self.highest is None else max(self.highest, value)


def heads(session: Session, run_ids: Sequence[str]) -> dict[str, tuple[int, int, int]]:
    """Number, newest step and attempt of runs by id; unknown ones are left out."""
    rows = session.execute(select(Run.id, Run.number, Run.step, Run.attempt).where(Run.id.in_(run_ids)))
    return {row.id: (row.number, row.step, row.attempt) for row in rows}


def find_numbers(session: Session, names: Collection[str]) -> dict[str, int]:
    """Numbers of known names. Not cached in a transaction that added names: it may be rolled back."""
    known = _NUMBERS.setdefault(session.get_bind().engine.pool, {})
    found = {name: known[name] for name in names if name in known}
    looked_up: dict[str, int] = {}
    unknown = [name for name in names if name not in found]
    for begin in range(0, len(unknown), _AT_ONCE):
        part = unknown[begin : begin + _AT_ONCE]
        rows = session.execute(select(MetricName.name, MetricName.number).where(MetricName.name.in_(part)))
        looked_up |= {row.name: row.number for row in rows}
    if not session.info.get(_MADE_NAMES):
        known.update(looked_up)
    return found | looked_up


def numbers_of(session: Session, names: Collection[str]) -> dict[str, int]:
    """Numbers of names; adds new ones in sorted order, so that two writers cannot deadlock."""
    found = find_numbers(session, names)
    missing = sorted(set(names) - found.keys())
    if not missing:
        return found
    session.info[_MADE_NAMES] = True
    insert = _insert(session)(MetricName.__table__).on_conflict_do_nothing(index_elements=["name"])
    session.execute(insert, [{"name": name} for name in missing])
    return found | find_numbers(session, missing)


def names_of(session: Session, run_number: int) -> list[str]:
    """Metrics that a run has values of, in order."""
    query = (
        select(MetricName.name)
        .join(MetricLast, MetricLast.name_number == MetricName.number)
        .where(MetricLast.run_number == run_number)
    )
    return sorted(session.scalars(query))


def first_steps(session: Session, run_numbers: Iterable[int]) -> dict[int, dict[int, int]]:
    """The first step of each attempt, by run."""
    found: dict[int, dict[int, int]] = {number: {} for number in run_numbers}
    query = select(Attempt.run_number, Attempt.attempt, Attempt.first_step).where(Attempt.run_number.in_(found))
    for run, attempt, first_step in session.execute(query):
        found[run][attempt] = first_step
    return found


def put_first_steps(session: Session, run_number: int, firsts: Mapping[int, int]) -> None:
    rows = [{"run_number": run_number, "attempt": a, "first_step": first} for a, first in sorted(firsts.items())]
    if rows:
        insert = _insert(session)(Attempt.__table__)
        changed = {"first_step": insert.excluded.first_step}
        session.execute(insert.on_conflict_do_update(index_elements=["run_number", "attempt"], set_=changed), rows)


def append_blocks(session: Session, run_number: int, attempt: int, parts: Mapping[tuple[int, int], bytes]) -> None:
    """Append bytes to blocks, by (number of the name, block)."""
    rows = [
        {"run_number": run_number, "name_number": name, "attempt": attempt, "block": block, "data": data}
        for (name, block), data in sorted(parts.items())
    ]
    insert = _insert(session)(MetricBlock.__table__)
    # In SQLite, || of two blobs is a text; the cast makes it a blob with the same bytes.
    joined = cast(MetricBlock.data.op("||")(insert.excluded.data), LargeBinary)
    keys = ["run_number", "name_number", "attempt", "block"]
    session.execute(insert.on_conflict_do_update(index_elements=keys, set_={"data": joined}), rows)


def summaries(session: Session, run_number: int) -> dict[int, Summary]:
    """Last and extreme values of a run's metrics, by number of the name."""
    columns = (MetricLast.name_number, MetricLast.last, MetricLast.last_step, MetricLast.lowest, MetricLast.highest)
    rows = session.execute(select(*columns).where(MetricLast.run_number == run_number))
    return {row[0]: Summary(*row[1:]) for row in rows}


def put_summaries(session: Session, run_number: int, changed: Mapping[int, Summary | None]) -> None:
    """Write last and extreme values; None deletes them."""
    gone = [name for name, summary in changed.items() if summary is None]
    if gone:
        condition = (MetricLast.run_number == run_number) & MetricLast.name_number.in_(gone)
        session.execute(delete(MetricLast).where(condition).execution_options(synchronize_session=False))
    rows = [
        {"run_number": run_number, "name_number": name, **asdict(summary)}
        for name, summary in sorted(changed.items())
        if summary is not None
    ]
    if rows:
        insert = _insert(session)(MetricLast.__table__)
        values = {name: insert.excluded[name] for name in ("last", "last_step", "lowest", "highest")}
        keys = ["run_number", "name_number"]
        session.execute(insert.on_conflict_do_update(index_elements=keys, set_=values), rows)


def histories(
    session: Session,
    names: Collection[int],
    firsts: Mapping[int, Mapping[int, int]],
    *,
    after: int | None = None,
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
    found: dict[tuple[int, int], Records] = {}
    for (run, name), attempts in gathered.items():
        records = one_history({attempt: decode(data) for attempt, data in attempts.items()}, firsts[run])
        found[run, name] = records if after is None else records[records["step"] > after]
    return found


def summary_of(records: Records) -> Summary | None:
    """Last and extreme values of a history, None of an empty one."""
    if len(records) == 0:
        return None
    values = records["value"][~_is_nan(records)]
    lowest, highest = (float(values.min()), float(values.max())) if len(values) else (None, None)
    last = float(records["value"][-1])
    return Summary(None if math.isnan(last) else last, int(records["step"][-1]), lowest, highest)


def _is_nan(records: Records) -> Any:
    assert records.dtype == RECORD
    return records["value"] != records["value"]


def _insert(session: Session) -> Any:
    """`INSERT … ON CONFLICT` of this database; both spell it alike."""
    return postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
