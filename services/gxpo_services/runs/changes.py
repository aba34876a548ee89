"""Changes of runs and their events, as Server-Sent Events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
from anyio.to_thread import run_sync
from sqlalchemy import ColumnElement, func, or_, select
from sqlalchemy.orm import Session

from gxpo_services.api import sse
from gxpo_services.db.database import Database
from gxpo_services.db.tables.events import Event
from gxpo_services.db.tables.runs import Run
from gxpo_services.events.schemas import EventView
from gxpo_services.run_states import TERMINAL
from gxpo_services.runs import service

_EVENTS_AT_ONCE = 500
_MARKS = (
    *(Run.state, Run.updated_at, Run.launch, Run.phase, Run.recoveries),
    *(Run.step, Run.attempt, Run.backward_passes, Run.score_step),
)
"""Columns of which one changes with everything that a reader of a run wants to know."""


@dataclass(slots=True)
class Changes:
    """What a reader has seen. numbers: the runs to follow; None: every run that has not ended.

    after: number of the last event that was sent. ids_only: a run that changed is told by its id alone, for readers who
    ask for what they need of it.
    """

    numbers: list[int] | None
    after: int
    ids_only: bool = False
    _seen: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    _ids: dict[int, str] = field(default_factory=dict)
    is_over: bool = False
    """Whether all runs to follow have ended."""

    def read(self, session: Session) -> list[bytes]:
        """What has changed since the last call: runs, then events."""
        rows = session.execute(select(Run.number, Run.id, *_MARKS).where(self._followed())).all()
        marks = {row[0]: tuple(row[2:]) for row in rows}
        changed = [number for number, mark in marks.items() if self._seen.get(number) != mark]
        deleted = [{"id": self._ids[number]} for number in sorted(self._seen.keys() - marks.keys())]
        self._ids = {row[0]: row[1] for row in rows}
        found = [sse.event("run", view) for view in self._views(session, sorted(changed))]
        found += [sse.event("deleted", gone) for gone in deleted]
        events = self._events(session)
        self._seen = marks
        ended = all(mark[0] in TERMINAL for mark in marks.values())
        self.is_over = self.numbers is not None and ended and len(events) < _EVENTS_AT_ONCE
        return found + events

    def _views(self, session: Session, changed: list[int]) -> list[dict[str, Any]]:
        if self.ids_only:
            return [{"id": self._ids[number]} for number in changed]
        return [view.model_dump(mode="json") for view in service.shown(session, changed)]

    def _followed(self) -> ColumnElement[bool]:
        if self.numbers is not None:
            return Run.number.in_(self.numbers)
        return or_(Run.state.not_in(sorted(TERMINAL)), Run.number.in_(list(self._seen)))

    def _events(self, session: Session) -> list[bytes]:
        query = select(Event).where(Event.run_number.in_(list(self._ids)), Event.number > self.after)
        found = []
        for event in session.scalars(query.order_by(Event.number).limit(_EVENTS_AT_ONCE)):
            view = EventView.model_validate(event, from_attributes=True).model_dump(mode="json")
            found.append(sse.event("event", view | {"run": self._ids[event.run_number or 0]}, event.number))
            self.after = event.number
        return found


def last_event(session: Session) -> int:
    return session.scalar(select(func.max(Event.number))) or 0


def numbers_of(session: Session, ids: Sequence[str]) -> dict[str, int]:
    """Row numbers of the runs that exist."""
    return {row.id: row.number for row in session.execute(select(Run.id, Run.number).where(Run.id.in_(ids)))}


async def follow(
    database: Database,
    changes: Changes,
    may_read: Callable[[], bool],
    *,
    pause_s: float = 0.5,
    comment_s: float = 2.0,
) -> AsyncIterator[bytes]:
    """Server-Sent Events until all runs have ended.

        run      data: the run as in lists, or its id alone; first of every run, then of each that changed
        event    data: an event with the id of its `run`, id: its number
        deleted  data: {"id"}
        end      all runs have ended
        revoked  the reader's token is no longer valid

    A comment every `comment_s` seconds without changes. may_read: asked before each read, in a thread like the reads.
    """

    def read() -> list[bytes] | None:
        if not may_read():
            return None
        with database.reading() as session:
            return changes.read(session)

    yield b": runs\n\n"
    quiet_s = 0.0
    while True:
        found = await run_sync(read)
        if found is None:
            yield sse.event("revoked", {"after": changes.after})
            return
        if found:
            yield b"".join(found)
            quiet_s = 0.0
        if changes.is_over:
            yield sse.event("end", {"after": changes.after})
            return
        await anyio.sleep(pause_s)
        quiet_s += pause_s
        if quiet_s >= comment_s:
            yield sse.COMMENT
            quiet_s = 0.0
