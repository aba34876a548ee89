"""What has changed, for all open streams of a process: one reader of the database instead of one for each stream.

The feed compares all runs that are followed with what it knows of them, once for all streams: on PostgreSQL when a
connection that listens is told of a change (db/database.py), and every COMPARE_S, which finds silent trainers and what
was not notified; every POLL_S while nothing notifies: on SQLite, and while that connection is lost.
An idle stream holds neither a thread nor a connection of the database.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import anyio
import psycopg
from anyio.to_thread import run_sync
from fastapi import Request
from sqlalchemy import Select, func, or_, select
from sqlalchemy.orm import Session

from gxpo_services.api import streams
from gxpo_services.api.dependencies import Slots, SlottedResponse
from gxpo_services.api.principals import Principal, hash_token
from gxpo_services.db import postgres
from gxpo_services.db.database import CHANNEL, Database
from gxpo_services.db.tables import AccessToken, Event, Run
from gxpo_services.logging import ErrorLog
from gxpo_services.run_states import SILENCE_S, TERMINAL, silent_s

COMPARE_S = 5.0
POLL_S = 0.5
GATHER_S = 0.25
"""Time in which further changes are gathered before they are read: with many trainers, each stream gets four messages a
second instead of one for each change."""
_RELISTEN_S = 2.0
RUNS_AT_ONCE = 200
"""Runs that are read in full at a time, as in the largest page of a list."""
EVENTS_AT_ONCE = 500
_MOST_UNSENT = 1000
"""Events that are kept for a slow stream; it reads further ones from the database."""
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


class Subscription:
    """What an open stream follows and has not sent. Used by the event loop's thread only.

    numbers: runs to follow; None: every run that has not ended. after: number of the last event that was sent; None:
    the newest one. shows: runs in full, their ids alone, or nothing but whether they have ended.
    """

    def __init__(
        self,
        token: str,
        numbers: Collection[int] | None,
        after: int | None = None,
        shows: Literal["runs", "ids", "ends"] = "ends",
    ) -> None:
        self.token_sha256 = hash_token(token)
        self.numbers = None if numbers is None else frozenset(numbers)
        self.after, self.shows = after, shows
        self.changed: dict[int, bytes | None] = {}
        """Runs to send: number → message; None: to be read."""
        self.deleted: list[bytes] = []
        self.events: deque[tuple[int, bytes]] = deque()
        self.behind_to = 0
        """Events up to this number, after `after`, are to be read."""
        self.unfinished: set[int] = set()
        self.is_ready = False
        """Whether the state of its runs is known."""
        self.end: Literal["revoked", "lost"] | None = None
        """Why it cannot go on: its token is invalid, or the database unavailable."""
        self._news = anyio.Event()

    @property
    def is_over(self) -> bool:
        """Whether all runs to follow have ended or were deleted."""
        return self.is_ready and self.numbers is not None and not self.unfinished

    async def wait(self, seconds: float) -> bool:
        """Wait until there is something to send, or the stream ends; False after `seconds` without."""
        with anyio.move_on_after(seconds):
            await self._news.wait()
        # Nothing runs between these two lines, so what comes later sets the new one.
        woken, self._news = self._news.is_set(), anyio.Event()
        return woken

    def wake(self) -> None:
        self._news.set()

    def add_event(self, number: int, message: bytes) -> None:
        if len(self.events) >= _MOST_UNSENT:
            self.events.clear()
            self.behind_to = number
        elif number > self.behind_to:
            self.events.append((number, message))


@dataclass(frozen=True, slots=True)
class _Mark:
    """What is known of a run; two differ if a reader should know."""

    id: str
    state: str
    values: tuple[Any, ...]


@dataclass(slots=True)
class _News:
    marks: dict[int, _Mark]
    """Of all runs that are followed, or were."""
    changed: list[int]
    views: dict[int, bytes]
    events: list[tuple[int, int, bytes]]
    """Number, run and message."""
    last_event: int
    more_events: bool
    valid: set[str]
    """Hashes of the tokens that may read on."""


class ChangeFeed:
    """Reads changes while there are subscriptions and passes them on. views: messages of runs in full."""

    def __init__(self, database: Database, views: Views) -> None:
        self._database, self._views = database, views
        self._subscriptions: set[Subscription] = set()
        self._marks: dict[int, _Mark] = {}
        self._last_event: int | None = None
        """None while nothing is read."""
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
                    self._marks, self._last_event = {}, None
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
                async for _ in postgres.listen(self._database.engine.url, CHANNEL):
                    self._errors.clear("notifications")
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
        news = None
        with self._errors.once("changes", "cannot read changes of runs"):  # which ends these streams, not the service
            news = await run_sync(self._read, subscriptions)
        for stream in subscriptions:
            if news is None or stream.token_sha256 not in news.valid:
                stream.end = "lost" if news is None else "revoked"
                stream.wake()
        if news is not None:
            self._pass_on(news, [stream for stream in subscriptions if stream.end is None])

    # ---- in a thread ------------------------------------------------------------------------------------------------

    def _read(self, subscriptions: list[Subscription]) -> _News:
        now = time.time()
        with self._database.reading() as session:
            marks = {row.number: _mark(row, now) for row in _rows(session, subscriptions, self._marks)}
            changed = [number for number, mark in marks.items() if self._marks.get(number) != mark]
            shown = [stream.numbers for stream in subscriptions if stream.is_ready and stream.shows == "runs"]
            in_full = changed if None in shown else sorted(_union(shown).intersection(changed))
            views = self._views(session, in_full) if 0 < len(in_full) <= RUNS_AT_ONCE else {}
            tokens = {stream.token_sha256 for stream in subscriptions}
            valid = or_(_tokens.expires_at.is_(None), _tokens.expires_at > now)
            query = select(_tokens.sha256).where(_tokens.sha256.in_(tokens), _tokens.revoked_at.is_(None), valid)
            before = self._last_event if self._last_event is not None else last_event(session)
            rows = session.execute(_events_after(before).limit(EVENTS_AT_ONCE)).all()
            return _News(
                marks,
                changed,
                views,
                [(row.number, row.run_number, _event_message(row)) for row in rows],
                last_event=rows[-1].number if rows else before,
                more_events=len(rows) == EVENTS_AT_ONCE,
                valid={*session.scalars(query)},
            )

    # ---- in the event loop ------------------------------------------------------------------------------------------

    def _pass_on(self, news: _News, subscriptions: list[Subscription]) -> None:
        if news.more_events:
            self._wake.set()
        before, self._marks, self._last_event = self._marks, news.marks, news.last_event
        gone = before.keys() - news.marks.keys()
        ids: dict[int, bytes] = {}
        for stream in subscriptions:
            if not stream.is_ready:
                self._begin(stream)
                continue
            woken = False
            for number in news.changed:
                mark = news.marks[number]
                if stream.numbers is not None:
                    is_shown = number in stream.numbers
                else:  # also that a run has ended
                    old = before.get(number)
                    is_shown = mark.state not in TERMINAL or (old is not None and old.state not in TERMINAL)
                if not is_shown:
                    continue
                woken = True
                if mark.state in TERMINAL:
                    stream.unfinished.discard(number)
                if stream.shows == "ids":
                    stream.changed[number] = ids.setdefault(number, streams.event("run", {"id": mark.id}))
                elif stream.shows == "runs":
                    stream.changed[number] = news.views.get(number)
            for number in gone:
                if number in stream.numbers if stream.numbers is not None else before[number].state not in TERMINAL:
                    woken = True
                    stream.unfinished.discard(number)
                    stream.changed.pop(number, None)
                    if stream.shows != "ends":
                        stream.deleted.append(streams.event("deleted", {"id": before[number].id}))
            if stream.shows != "ends":
                for event, run, message in news.events:
                    if run in (self._marks if stream.numbers is None else stream.numbers):
                        woken = True
                        stream.add_event(event, message)
            if woken:
                stream.wake()
        if not news.more_events:  # some may be of runs that have ended
            kept = _union(stream.numbers for stream in subscriptions)
            self._marks = {n: mark for n, mark in self._marks.items() if n in kept or mark.state not in TERMINAL}

    def _begin(self, stream: Subscription) -> None:
        runs = {
            number: mark
            for number, mark in sorted(self._marks.items())
            if (number in stream.numbers if stream.numbers is not None else mark.state not in TERMINAL)
        }
        if stream.shows == "ids":
            stream.changed = {number: streams.event("run", {"id": mark.id}) for number, mark in runs.items()}
        elif stream.shows == "runs":
            stream.changed = dict.fromkeys(runs)
        stream.unfinished = {number for number, mark in runs.items() if mark.state not in TERMINAL}
        assert self._last_event is not None
        if stream.after is None:
            stream.after = self._last_event
        stream.behind_to = max(stream.after, self._last_event)
        stream.is_ready = True
        stream.wake()

    def read_events(self, stream: Subscription) -> list[tuple[int, bytes]]:
        """The next page of the events that a stream is behind with; call in a thread."""
        numbers = sorted(stream.numbers if stream.numbers is not None else self._marks)
        query = _events_after(stream.after).where(_runs.number.in_(numbers), _events.number <= stream.behind_to)
        with self._database.reading() as session:
            rows = session.execute(query.limit(EVENTS_AT_ONCE))
            return [(row.number, _event_message(row)) for row in rows]

    def read_views(self, numbers: Sequence[int]) -> dict[int, bytes]:
        """Messages of runs in full; call in a thread."""
        with self._database.reading() as session:
            return self._views(session, numbers)


def event_stream(
    request: Request, principal: Principal, changes: Subscription, messages: AsyncIterator[bytes]
) -> SlottedResponse:
    """Server-Sent Events, which follow `changes` and occupy one of the principal's slots."""
    feed: ChangeFeed = request.app.state.changes
    slots: Slots = request.app.state.stream_slots
    within = feed.following(changes)
    return SlottedResponse(slots, principal.token_id, messages, within=within, media_type=streams.MEDIA_TYPE)


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


def _mark(row: Any, now: float) -> _Mark:
    # A silence is told when it becomes one, and at each further multiple.
    silence = (silent_s(row.state, row.heartbeat_at, now) or 0.0) // SILENCE_S
    return _Mark(row.id, row.state, (*row[3:-1], silence))


def _event_message(row: Any) -> bytes:
    view = {name: getattr(row, name) for name in ("number", "time", "actor", "kind", "message", "fields", "run")}
    return streams.event("event", view, row.number)
