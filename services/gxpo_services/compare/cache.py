"""Cache of comparisons, invalidated when their inputs change.

A page requests its comparison every few seconds, while evaluations arrive every few minutes. The version of the inputs
is a few numbers: lines received, attempts, time of the last update, and last values of metrics.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from gxpo_services.db.tables import Group, Run
from gxpo_services.outputs import metrics
from gxpo_services.outputs.metrics import last_values
from gxpo_trainer.compare.rows import LAST_ONLY, SERIES_NAMES

Stamp = tuple[Hashable, ...]
_MAX_BYTES = 32 << 20
"""Total size of the cached responses; a comparison of 20 runs takes 75 KB."""


@dataclass(frozen=True, slots=True)
class Versions:
    """Versions of the inputs of a comparison, by run number."""

    rows: Mapping[int, Stamp]
    metric_lines: Mapping[int, int]
    last: Mapping[int, Mapping[str, float | None]]
    """Last values of the metrics that curves may use."""

    def stamp(self, names: Collection[str]) -> Stamp:
        """A version that changes whenever a comparison that uses these metrics may change."""
        stamp: list[Hashable] = []
        for run, row in self.rows.items():
            last = self.last.get(run, {})
            used = sorted(last.keys() & set(names))
            stamp += [run, row, *((name, last[name] if name in LAST_ONLY else self.metric_lines[run]) for name in used)]
        return tuple(stamp)


def read_versions(session: Session, runs: Sequence[str], groups: Sequence[str]) -> Versions:
    """Versions of the runs' data. Call it before reading the data, so that concurrent changes invalidate the entry."""
    columns = Run.__table__.c
    members = columns.group_number.in_(select(Group.__table__.c.number).where(Group.__table__.c.id.in_(groups)))
    wanted = or_(columns.id.in_(runs), members) if groups else columns.id.in_(runs)
    query = select(columns.number, columns.updated_at, columns.attempt, columns.offsets).where(wanted)
    rows = session.execute(query.order_by(columns.number)).all()
    numbers = [row.number for row in rows]
    firsts = metrics.first_steps(session, numbers)
    return Versions(
        {
            row.number: (row.updated_at, row.attempt, row.offsets.get("evaluations", 0), *firsts[row.number].items())
            for row in rows
        },
        {row.number: row.offsets.get("metrics", 0) for row in rows},
        last_values(session, numbers, SERIES_NAMES),
    )


@dataclass(frozen=True, slots=True)
class _Entry:
    names: frozenset[str]
    stamp: Stamp
    body: bytes


class ComparisonCache:
    """Thread-safe LRU cache of serialized comparisons by query."""

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, question: Hashable, versions: Versions) -> bytes | None:
        """The cached response, if it is still valid."""
        with self._lock:
            entry = self._entries.get(question)
            if entry is None or versions.stamp(entry.names) != entry.stamp:
                return None
            self._entries.move_to_end(question)
            return entry.body

    def put(self, question: Hashable, versions: Versions, names: Collection[str], body: bytes) -> None:
        """Store a response. names: metrics that it was computed from."""
        entry = _Entry(frozenset(names), versions.stamp(names), body)
        with self._lock:
            self._entries.pop(question, None)
            self._entries[question] = entry
            while sum(len(entry.body) for entry in self._entries.values()) > self._max_bytes:
                self._entries.popitem(last=False)
