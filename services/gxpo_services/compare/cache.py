"""Cache of comparisons, invalidated when their inputs change.

A page requests its comparison every few seconds, while evaluations arrive every few minutes. The stamp of the inputs
is a few numbers: lines received, attempts, time of the last update.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from gxpo_services.db.tables import Group, Run

Stamp = tuple[Hashable, ...]
_MAX_BYTES = 32 << 20
"""Total size of the cached responses; a comparison of 20 runs takes 75 KB."""


def read_stamp(session: Session, runs: Sequence[str], groups: Sequence[str], *, gates: bool) -> Stamp:
    """A value that changes whenever a comparison of the runs may change. gates: it has the gate's z-scores.

    Without them thresholds and shut-off steps are those of the last evaluation. Read it before the data, so that a
    concurrent change invalidates the entry.
    """
    columns = Run.__table__.c
    members = columns.group_number.in_(select(Group.__table__.c.number).where(Group.__table__.c.id.in_(groups)))
    wanted = or_(columns.id.in_(runs), members) if groups else columns.id.in_(runs)
    query = select(columns.number, columns.updated_at, columns.attempt, columns.offsets).where(wanted)
    kinds = ("evaluations", "metrics") if gates else ("evaluations",)
    return tuple(
        (row.number, row.updated_at, row.attempt, *(row.offsets.get(kind, 0) for kind in kinds))
        for row in session.execute(query.order_by(columns.number))
    )


class ComparisonCache:
    """Serialized comparisons by query, the least recently used evicted first. Not thread-safe."""

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Hashable, tuple[Stamp, bytes]] = OrderedDict()

    def get(self, question: Hashable, stamp: Stamp) -> bytes | None:
        """The cached response, if it is still valid."""
        entry = self._entries.get(question)
        if entry is None or entry[0] != stamp:
            return None
        self._entries.move_to_end(question)
        return entry[1]

    def put(self, question: Hashable, stamp: Stamp, body: bytes) -> None:
        self._entries.pop(question, None)
        self._entries[question] = (stamp, body)
        while sum(len(body) for _, body in self._entries.values()) > self._max_bytes:
            self._entries.popitem(last=False)
