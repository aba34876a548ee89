"""What has changed, for all open streams of a process: one reader of the database instead of one for each stream.

On PostgreSQL a connection listens for the numbers of changed runs (db/database.py), and the feed reads these runs once,
whatever the number of streams. It also compares all runs that are followed every COMPARE_S, which finds silent trainers
and what was not notified, and every POLL_S while nothing notifies: on SQLite, and while that connection is lost.
An idle stream holds neither a thread nor a connection of the database.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import anyio
import psycopg
from anyio.to_thread import run_sync
from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session

from gxpo_services.api import streams
from gxpo_services.api.principals import hash_token
from gxpo_services.db.database import Database
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
class _Wanted:
    """What one reading of the database is for. numbers: changed runs; None: all that are followed."""

    numbers: set[int] | None
    followed: set[int]
    all_followed: bool
    full: set[int] | None
    """Runs whose views are wanted; None: of all."""
    tokens: set[str]
    after: int | None


@dataclass(slots=True)
class _News:
    marks: dict[int, _Mark]
    gone: set[int]
    views: dict[int, bytes] = field(default_factory=dict)
    events: list[tuple[int, int, bytes]] = field(default_factory=list)
    """Number, run and message."""
    last_event: int = 0
    more_events: bool = False
    valid: set[str] = field(default_factory=set)


class ChangeFeed:
    """Reads changes while there are subscriptions and passes them on. views: messages of runs in full."""

    def __init__(self, database: Database, views: Views) -> None:
        self._database, self._views = database, views
        self._subscriptions: set[Subscription] = set()
        self._marks: dict[int, _Mark] = {}
        self._last_event: int | None = None
        """None while nothing is read."""
        self._notified: set[int] = set()
        self._compare_at = 0.0
        self._is_listening = False
        self._wake = anyio.Event()
        self._errors = ErrorLog()

    @contextmanager
    def following(self, subscription: Subscription) -> Iterator[None]:
        """Fill a subscription within the context, with all of its runs first."""
        self._subscriptions.add(subscription)
        self._compare_at = 0.0
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
                with anyio.move_on_after(max(0.0, self._compare_at - time.monotonic())):
                    await self._wake.wait()
                if self._wake.is_set():
                    await anyio.sleep(GATHER_S)
                # Before the reading, so that what comes during it is read next.
                self._wake = anyio.Event()
                await self._update()

    async def _listen(self) -> None:
        while True:
            with self._errors.outages("notifications", psycopg.Error, OSError, ValueError):
                async for numbers in self._database.notifications():
                    self._errors.clear("notifications")
                    self._is_listening = True
                    if not self._subscriptions:
                        continue
                    if numbers is None:
                        self._compare_at = 0.0
                    else:
                        self._notified |= numbers
                    self._wake.set()
            self._is_listening, self._compare_at = False, 0.0
            self._wake.set()
            await anyio.sleep(_RELISTEN_S)

    async def _update(self) -> None:
        subscriptions = list(self._subscriptions)
        if not subscriptions:
            return
        numbers, self._notified = self._notified, set()
        compares = time.monotonic() >= self._compare_at
        if compares:
            self._compare_at = time.monotonic() + (COMPARE_S if self._is_listening else POLL_S)
        known = [stream for stream in subscriptions if stream.is_ready and stream.shows == "runs"]
        wanted = _Wanted(
            None if compares else numbers,
            set().union(*(stream.numbers for stream in subscriptions if stream.numbers is not None)),
            any(stream.numbers is None for stream in subscriptions),
            None
            if any(stream.numbers is None for stream in known)
            else set().union(*(stream.numbers or () for stream in known)),
            {stream.token_sha256 for stream in subscriptions},
            self._last_event,
        )
        news = None
        try:
            news = await run_sync(self._read, wanted)
            self._errors.clear("changes")
        except Exception as error:  # ends these streams, not the service
            self._errors.log_once("changes", error, "cannot read changes of runs")
            self._compare_at = 0.0
        for stream in subscriptions:
            if news is None or stream.token_sha256 not in news.valid:
                stream.end = "lost" if news is None else "revoked"
                stream.wake()
        if news is not None:
            self._pass_on(news, [stream for stream in subscriptions if stream.end is None])

    # ---- in a thread ------------------------------------------------------------------------------------------------

    def _read(self, wanted: _Wanted) -> _News:
        with self._database.reading() as session:
            rows = _rows_of_all(session, wanted, self._marks) if wanted.numbers is None else _rows(session, wanted)
            now = time.time()
            news = _News({row.number: _mark(row, now) for row in rows}, set())
            looked_for = self._marks.keys() if wanted.numbers is None else self._marks.keys() & wanted.numbers
            news.gone = looked_for - news.marks.keys()
            changed = [number for number, mark in news.marks.items() if self._marks.get(number) != mark]
            shown = [number for number in changed if wanted.full is None or number in wanted.full]
            if 0 < len(shown) <= RUNS_AT_ONCE:
                news.views = self._views(session, sorted(shown))
            valid = or_(_tokens.expires_at.is_(None), _tokens.expires_at > now)
            query = select(_tokens.sha256).where(_tokens.sha256.in_(wanted.tokens), _tokens.revoked_at.is_(None), valid)
            news.valid = {*session.scalars(query)}
            news.last_event = wanted.after if wanted.after is not None else last_event(session)
            query_events = select(*_EVENT, _events.run_number, _runs.id.label("run")).outerjoin_from(
                Event.__table__, Run.__table__, _runs.number == _events.run_number
            )
            query_events = query_events.where(_events.number > news.last_event).order_by(_events.number)
            events = session.execute(query_events.limit(EVENTS_AT_ONCE)).all()
            news.events = [(row.number, row.run_number, _event_message(row)) for row in events if row.run is not None]
            news.last_event = max((row.number for row in events), default=news.last_event)
            news.more_events = len(events) == EVENTS_AT_ONCE
            return news

    # ---- in the event loop ------------------------------------------------------------------------------------------

    def _pass_on(self, news: _News, subscriptions: list[Subscription]) -> None:
        if news.more_events:
            self._wake.set()
        before, self._last_event = self._marks, news.last_event
        changed = [number for number, mark in news.marks.items() if before.get(number) != mark]
        self._marks = {number: mark for number, mark in before.items() if number not in news.gone} | news.marks
        ids: dict[int, bytes] = {}
        for stream in subscriptions:
            if not stream.is_ready:
                self._begin(stream)
                continue
            woken = False
            for number in changed:
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
            for number in news.gone:
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
            kept: set[int] = set().union(*(stream.numbers or () for stream in subscriptions))
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
        query = select(*_EVENT, _runs.id.label("run")).join_from(
            Event.__table__, Run.__table__, _runs.number == _events.run_number
        )
        query = query.where(
            _runs.number.in_(numbers), _events.number > stream.after, _events.number <= stream.behind_to
        )
        with self._database.reading() as session:
            rows = session.execute(query.order_by(_events.number).limit(EVENTS_AT_ONCE))
            return [(row.number, _event_message(row)) for row in rows]

    def read_views(self, numbers: Sequence[int]) -> dict[int, bytes]:
        """Messages of runs in full; call in a thread."""
        with self._database.reading() as session:
            return self._views(session, numbers)


def last_event(session: Session) -> int:
    return session.scalar(select(func.max(_events.number))) or 0


def _rows_of_all(session: Session, wanted: _Wanted, marks: dict[int, _Mark]) -> list[Any]:
    rows: list[Any] = []
    if wanted.all_followed:
        rows += session.execute(select(*_COLUMNS).where(_runs.state.not_in(sorted(TERMINAL))))
    rest = sorted((wanted.followed | marks.keys()) - {row.number for row in rows})  # what has ended, too
    for begin in range(0, len(rest), _NUMBERS_AT_ONCE):
        part = rest[begin : begin + _NUMBERS_AT_ONCE]
        rows += session.execute(select(*_COLUMNS).where(_runs.number.in_(part)))
    return rows


def _rows(session: Session, wanted: _Wanted) -> Sequence[Any]:
    assert wanted.numbers is not None
    numbers = wanted.numbers if wanted.all_followed else wanted.numbers & wanted.followed
    return session.execute(select(*_COLUMNS).where(_runs.number.in_(sorted(numbers)))).all() if numbers else []


def _mark(row: Any, now: float) -> _Mark:
    # A silence is told when it becomes one, and at each further multiple.
    silence = (silent_s(row.state, row.heartbeat_at, now) or 0.0) // SILENCE_S
    return _Mark(row.id, row.state, (*row[3:-1], silence))


def _event_message(row: Any) -> bytes:
    view = {name: getattr(row, name) for name in ("number", "time", "actor", "kind", "message", "fields", "run")}
    return streams.event("event", view, row.number)
