"""What has changed, for all open streams of a process: one reader of the database instead of one for each stream.

The feed compares all runs that are followed with what it knows of them, once for all streams: on PostgreSQL when a
connection that listens is told of a change (db/database.py), and every COMPARE_S, which finds silent trainers and what
was not notified; every POLL_S while nothing notifies: on SQLite, and while that connection is lost.
An idle stream holds neither a thread nor a connection of the database.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import anyio
import psycopg
from anyio.to_thread import run_sync
from sqlalchemy import Select, func, or_, select
from sqlalchemy.orm import Session

from gxpo_services.api.principals import hash_token
from gxpo_services.db.database import CHANNEL, Database, listen
from gxpo_services.db.tables import QUEUE_ORDER, AccessToken, Event, Run
from gxpo_services.logging import ErrorLog
from gxpo_services.run_states import SILENCE_S, TERMINAL, RunState, silent_s

MEDIA_TYPE = "text/event-stream"
CONTENT: dict[str, Any] = {"content": {MEDIA_TYPE: {"schema": {"type": "string"}}}}
COMMENT = b": waiting\n\n"
COMPARE_S = 5.0
POLL_S = 0.5
GATHER_S = 0.25
"""Time in which further changes are gathered before they are read: with many trainers, each stream gets four messages a
second instead of one for each change."""
_RELISTEN_S = 2.0
RUNS_AT_ONCE = 200
"""Runs that are read in full at a time, as in the largest page of a list."""
EVENTS_AT_ONCE = 500
_MOST_RECENT = 1000
"""Events that are kept for all streams; a stream that is further behind reads them from the database."""
_NUMBERS_AT_ONCE = 1000
_runs, _events, _tokens = Run.__table__.c, Event.__table__.c, AccessToken.__table__.c
_COLUMNS = (
    *(_runs.number, _runs.id, _runs.state),
    *(_runs.updated_at, _runs.launch, _runs.phase, _runs.recoveries),
    *(_runs.step, _runs.attempt, _runs.backward_passes, _runs.score_step, _runs.heartbeat_at),
)
"""Number, id, state, columns of which one changes with all else that a reader of a run wants to know, the heartbeat."""
_EVENT = (_events.number, _events.time, _events.actor, _events.kind, _events.message, _events.fields)
Views = Callable[[Session, Sequence[int]], dict[int, bytes]]
"""Messages of runs in full by number, without those that were deleted."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """What is known of a run; two differ if a reader should know."""

    id: str
    state: str
    values: tuple[Any, ...]

    @property
    def has_ended(self) -> bool:
        return self.state in TERMINAL


class Subscription:
    """What an open stream follows and has not sent. Used by the event loop's thread only.

    numbers: runs to follow; None: every run that has not ended. after: number of the last event that was sent; None:
    the newest one.
    """

    def __init__(self, token: str, numbers: Collection[int] | None, after: int | None = None) -> None:
        self.token_sha256 = hash_token(token)
        self.numbers = None if numbers is None else frozenset(numbers)
        self.after = after
        self.last_event = 0
        self.changed: dict[int, str] = {}
        """Runs to send: number → id."""
        self.deleted: list[str] = []
        self.is_ready = False
        self.is_over = False
        """Whether all runs to follow have ended or were deleted."""
        self.end: Literal["revoked", "lost"] | None = None
        """Why it cannot go on: its token is invalid, or the database unavailable."""
        self.news = anyio.Event()
        """Set when there is something to send, or the stream ends."""

    def follows(self, number: int, *marks: _Mark | None) -> bool:
        """marks: of the run, before and now; the end of a run is one of its changes."""
        if self.numbers is not None:
            return number in self.numbers
        return any(mark is not None and not mark.has_ended for mark in marks)

    async def wait(self, seconds: float) -> bool:
        """Wait for news; False after `seconds` without."""
        with anyio.move_on_after(seconds):
            await self.news.wait()
        # Nothing runs between these two lines, so what comes later sets the new one.
        woken, self.news = self.news.is_set(), anyio.Event()
        return woken


class ChangeFeed:
    """Reads changes while there are subscriptions and passes them on. views: messages of runs in full."""

    def __init__(self, database: Database, views: Views) -> None:
        self._database, self._views = database, views
        self._subscriptions: set[Subscription] = set()
        self._marks: dict[int, _Mark] = {}
        self._messages: dict[int, bytes] = {}
        """Of runs in full, since the last reading."""
        self._reading_messages = anyio.Lock()
        self._recent: deque[tuple[int, int, bool, bytes]] = deque()
        """Number, run, whether it had not ended, and message of all events after `_recent_after`."""
        self._recent_after = 0
        self._last_event = -1
        """-1 while nothing is read."""
        self._is_listening = False
        self._wake = anyio.Event()
        self._errors = ErrorLog()

    @contextmanager
    def following(self, subscription: Subscription) -> Iterator[None]:
        """Fill a subscription within the context, with all of its runs first."""
        self._subscriptions.add(subscription)
        self._wake.set()
        try:
            yield
        finally:
            self._subscriptions.discard(subscription)

    async def run(self) -> None:
        """Read and listen until cancelled."""
        async with anyio.create_task_group() as tasks:
            if not self._database.is_sqlite:
                tasks.start_soon(self._listen)
            while True:
                if not self._subscriptions:
                    self._marks, self._messages, self._last_event = {}, {}, -1
                    await self._wake.wait()
                with anyio.move_on_after(COMPARE_S if self._is_listening else POLL_S):
                    await self._wake.wait()
                if self._wake.is_set():
                    await anyio.sleep(GATHER_S)
                # Before the reading, so that what comes during it is read next.
                self._wake = anyio.Event()
                await self._update()

    async def _listen(self) -> None:
        while True:
            with self._errors.outages("notifications", psycopg.Error, OSError, ValueError):
                async for _ in listen(self._database.engine.url, CHANNEL):
                    self._errors.recovered("notifications")
                    self._is_listening = True
                    if self._subscriptions:
                        self._wake.set()
            self._is_listening = False
            self._wake.set()
            await anyio.sleep(_RELISTEN_S)

    async def _update(self) -> None:
        subscriptions = list(self._subscriptions)
        if not subscriptions:
            return
        valid: set[str] | None = None
        with self._errors.once("changes", "cannot read changes of runs"):  # which ends these streams, not the service
            marks, events, valid = await run_sync(self._read, subscriptions)
        for stream in subscriptions:
            if valid is None or stream.token_sha256 not in valid:
                stream.end = "lost" if valid is None else "revoked"
                stream.news.set()
        if valid is not None:
            self._pass_on(marks, events, [stream for stream in subscriptions if stream.end is None])

    def _read(self, subscriptions: list[Subscription]) -> tuple[dict[int, _Mark], Sequence[Any], set[str]]:
        """Marks of all runs that are followed, or were; new events; hashes of valid tokens. In a thread."""
        now = time.time()
        # An event of a run that is not among the marks would pass for one of a run that has ended, and never be sent.
        with self._database.reading(one_snapshot=True) as session:
            if self._last_event < 0:
                self._last_event = self._recent_after = last_event(session)
                self._recent.clear()
            rows = _rows(session, subscriptions, self._marks)
            places = _places(session, rows, _union(stream.numbers for stream in subscriptions))
            marks = {row.number: _mark(row, places.get(row.number), now) for row in rows}
            tokens = {stream.token_sha256 for stream in subscriptions}
            valid = or_(_tokens.expires_at.is_(None), _tokens.expires_at > now)
            query = select(_tokens.sha256).where(_tokens.sha256.in_(tokens), _tokens.revoked_at.is_(None), valid)
            events = session.execute(_events_after(self._last_event).limit(EVENTS_AT_ONCE)).all()
            return marks, events, {*session.scalars(query)}

    def _pass_on(self, marks: dict[int, _Mark], new: Sequence[Any], subscriptions: list[Subscription]) -> None:
        """In the event loop. new: rows of events."""
        before = self._marks
        of_all = [stream for stream in subscriptions if stream.numbers is None]
        if of_all and not any(stream.is_ready for stream in of_all):
            # So far only some runs were read, so that others pass for runs that had ended.
            self._recent.clear()
            self._recent_after = self._last_event
        changed = [number for number, mark in marks.items() if before.get(number) != mark]
        gone = before.keys() - marks.keys()
        for row in new:
            is_open = row.run_number in marks
            self._recent.append((row.number, row.run_number, is_open, _event_message(row)))
            self._last_event = row.number
        while len(self._recent) > _MOST_RECENT:
            self._recent_after, *_ = self._recent.popleft()
        for stream in subscriptions:
            known, news = (before, changed) if stream.is_ready else ({}, sorted(marks))
            numbers = [number for number in news if stream.follows(number, known.get(number), marks[number])]
            deleted = [number for number in gone if number in known and stream.follows(number, known[number])]
            stream.changed |= {number: marks[number].id for number in numbers}
            stream.deleted += [before[number].id for number in deleted]
            for number in deleted:
                stream.changed.pop(number, None)
            if stream.numbers is not None and len(new) < EVENTS_AT_ONCE:  # else the last events of its runs may follow
                stream.is_over = all(number not in marks or marks[number].has_ended for number in stream.numbers)
            followed = marks if stream.numbers is None else stream.numbers
            events = [row.number for row in new if row.run_number in followed]
            if not stream.is_ready:
                stream.is_ready, stream.last_event = True, self._last_event
                stream.after = self._last_event if stream.after is None else stream.after
            elif events:
                stream.last_event = events[-1]
            if numbers or deleted or events or stream.is_over:
                stream.news.set()
        self._marks = marks
        if len(new) == EVENTS_AT_ONCE:
            self._wake.set()  # there may be more, also of runs that have ended
        else:
            kept = _union(stream.numbers for stream in subscriptions)
            self._marks = {number: mark for number, mark in marks.items() if number in kept or not mark.has_ended}
        self._messages = {}

    async def run_messages(self, numbers: Collection[int]) -> list[bytes]:
        """Messages of runs in full, without those that were deleted; each is read once for all streams."""
        async with self._reading_messages:
            messages = self._messages  # another dict after the next reading, which finds what changes meanwhile
            missing = [number for number in numbers if number not in messages]
            if missing:
                messages |= await run_sync(self._read_views, missing)
        return [messages[number] for number in numbers if number in messages]

    async def event_messages(self, stream: Subscription) -> list[bytes]:
        """The next messages of events after `stream.after`, which moves on. There may be none."""
        assert stream.after is not None
        if stream.after >= self._recent_after:
            after, stream.after = stream.after, self._last_event
            return [
                message
                for number, run, is_open, message in self._recent
                if number > after and (is_open if stream.numbers is None else run in stream.numbers)
            ]
        end = self._recent_after
        rows = await run_sync(self._read_events, stream, end)
        stream.after = rows[-1].number if len(rows) == EVENTS_AT_ONCE else end
        return [_event_message(row) for row in rows]

    def _read_events(self, stream: Subscription, end: int) -> Sequence[Any]:
        numbers = sorted(stream.numbers if stream.numbers is not None else self._marks)
        query = _events_after(stream.after).where(_runs.number.in_(numbers), _events.number <= end)
        with self._database.reading() as session:
            return session.execute(query.limit(EVENTS_AT_ONCE)).all()

    def _read_views(self, numbers: Sequence[int]) -> dict[int, bytes]:
        with self._database.reading() as session:
            return self._views(session, numbers)


def last_event(session: Session) -> int:
    return session.scalar(select(func.max(_events.number))) or 0


def _events_after(number: int | None) -> Select[Any]:
    """Events of runs in order, with the run's number and id."""
    joined = select(*_EVENT, _events.run_number, _runs.id.label("run")).join_from(
        Event.__table__, Run.__table__, _runs.number == _events.run_number
    )
    return joined.where(_events.number > number).order_by(_events.number)


def _union(numbers: Iterable[Collection[int] | None]) -> set[int]:
    return {number for some in numbers for number in some or ()}


def _rows(session: Session, subscriptions: list[Subscription], known: Collection[int]) -> list[Any]:
    """Rows of the runs that are followed, and of those that are known, which may have ended."""
    rows: list[Any] = []
    if any(stream.numbers is None for stream in subscriptions):
        rows += session.execute(select(*_COLUMNS).where(_runs.state.not_in(sorted(TERMINAL))))
    rest = sorted({*known, *_union(stream.numbers for stream in subscriptions)} - {row.number for row in rows})
    for begin in range(0, len(rest), _NUMBERS_AT_ONCE):
        part = rest[begin : begin + _NUMBERS_AT_ONCE]
        rows += session.execute(select(*_COLUMNS).where(_runs.number.in_(part)))
    return rows


def _places(session: Session, rows: Iterable[Any], asked: Collection[int]) -> dict[int, int]:
    """Places in the queue of the runs that some stream asked for. Not of others: a stream of all runs would get each
    queued run whenever one starts."""
    if not any(row.state == RunState.QUEUED and row.number in asked for row in rows):
        return {}
    queue = session.scalars(select(_runs.number).where(_runs.state == RunState.QUEUED).order_by(*QUEUE_ORDER))
    return {number: place for place, number in enumerate(queue, start=1) if number in asked}


def _mark(row: Any, place: int | None, now: float) -> _Mark:
    # A silence is told when it becomes one, and at each further multiple.
    silence = (silent_s(row.state, row.heartbeat_at, now) or 0.0) // SILENCE_S
    return _Mark(row.id, row.state, (*row[3:-1], place, silence))


def _event_message(row: Any) -> bytes:
    view = {column.key: getattr(row, column.key) for column in _EVENT} | {"run": row.run}
    return sse("event", view, row.number)


def sse(kind: str, data: Any, number: int | None = None) -> bytes:
    """A Server-Sent Event. JSON has no bare line ends, so a text of many lines is one line of data."""
    head = f"event: {kind}\n" + (f"id: {number}\n" if number is not None else "")
    return f"{head}data: {json.dumps(data)}\n\n".encode()
