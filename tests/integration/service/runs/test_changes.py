"""Changes of runs as Server-Sent Events, read by the product's own client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import anyio
import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import event, text
from sqlalchemy.exc import OperationalError
from support import queued_runs as runs
from support.scheduling import Cluster
from support.service_processes import until

from gxpo_client.client import Client, Json, _server_sent, connect
from gxpo_client.errors import NotFound, NotSignedIn
from gxpo_services.api import feed
from gxpo_services.api.dependencies import find
from gxpo_services.api.feed import ChangeFeed, Subscription
from gxpo_services.api.principals import hash_token
from gxpo_services.db.database import Database
from gxpo_services.db.tables import AccessToken, Run
from gxpo_services.ingest.batches import KINDS
from gxpo_services.outputs import events
from gxpo_services.run_states import RunState
from gxpo_services.runs import changes as run_changes
from gxpo_services.settings import ServiceSettings


@pytest.fixture
def secret(token_for: Callable[[str], str]) -> str:
    return token_for("viewer")


@pytest.fixture
def client(url: str, secret: str) -> Iterator[Client]:
    with Client(connect(url), secret) as client:
        yield client


class Reader:
    """A feed without its task, and one stream of it that is read when the test says so."""

    def __init__(self, database: Database, secret: str, runs: list[int] | None = None, **options: Any) -> None:
        self.feed = ChangeFeed(database, run_changes.messages)
        self.stream = Subscription(secret, runs, **options)
        self.held = ExitStack()
        self.held.enter_context(self.feed.following(self.stream))

    async def read(self) -> list[bytes]:
        """What one reading finds, as it is sent."""
        await self.feed._update()
        messages: list[bytes] = []
        while page := await run_changes._next(self.feed, self.stream):
            messages += page
        return messages


def next_change(changes: Iterator[tuple[str, Json] | None]) -> tuple[str, Json]:
    return next(change for change in changes if change is not None)


def next_run(changes: Iterator[tuple[str, Json] | None]) -> Json:
    """The next change of a run after at least one event."""
    assert next_change(changes)[0] == "event"
    return next(change[1] for change in changes if change is not None and change[0] == "run")


def test_every_change_is_pushed_until_all_runs_have_ended(client: Client, database: Database) -> None:
    first, second, other = (runs.add_run(database) for _ in range(3))
    changes = client.changes([first, second])
    for run_id in (first, second):
        kind, run = next_change(changes)
        assert (kind, run["id"], run["state"]) == ("run", run_id, "queued")
    runs.move(database, first, RunState.STARTING)
    moved = [next_change(changes) for _ in range(2)]
    assert {(kind, run["id"], run["state"], run["progress"]["queue_position"]) for kind, run in moved} == {
        ("run", first, "starting", None),
        ("run", second, "queued", 1),
    }
    kind, event = next_change(changes)
    assert (kind, event["run"], event["kind"], event["fields"]["new"]) == ("event", first, "state", "starting")
    runs.change(database, first, step=3)
    assert next_change(changes)[1]["progress"]["steps"] == 3
    runs.change(database, other, step=3)
    for run_id in (first, second):
        runs.change(database, run_id, state=RunState.CANCELLED)
    rest = {change[1]["id"] for change in changes if change is not None}
    assert rest == {first, second}, "nothing of a run that was not asked for, and then the stream ends"
    again = [change for change in client.changes([first], after=event["number"]) if change is not None]
    assert [kind for kind, _ in again] == ["run"], "no event twice"


def test_silence_is_a_change_a_heartbeat_not(database: Database, secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1e9
    monkeypatch.setattr(feed, "time", SimpleNamespace(time=lambda: now, monotonic=lambda: 0.0))
    run_id = runs.add_run(database, state=RunState.RUNNING, heartbeat_at=now)

    async def test() -> None:
        nonlocal now
        reader = Reader(database, secret)
        assert len(await reader.read()) == 1
        counts = []
        for passed in (4.0, 8.0, 4.0, 4.0, 10.0, 10.0):
            now += passed
            if passed == 8.0:
                runs.change(database, run_id, heartbeat_at=now)
            counts.append(len(await reader.read()))
        # Silent for 4, 0, 4, 8, 18 and 28 s.
        assert counts == [0, 0, 0, 0, 1, 0]
        now += 3.0
        assert len(await reader.read()) == 1, "and for 31 s"
        runs.change(database, run_id, heartbeat_at=now)
        assert len(await reader.read()) == 1, "its end is one"

    anyio.run(test)


def test_a_place_in_the_queue_is_a_change_for_who_asked_for_the_run(database: Database, secret: str) -> None:
    first, second, third = (runs.add_run(database, queued_at=float(n)) for n in range(3))
    numbers = [runs.get(database, run_id).number for run_id in (second, third)]

    def places(messages: list[bytes]) -> dict[str, int | None]:
        sent = [json.loads(m.split(b"data: ")[1]) for m in messages if m.startswith(b"event: run")]
        return {run["id"]: run["progress"]["queue_position"] for run in sent}

    async def test() -> None:
        some, every = Reader(database, secret, numbers), Reader(database, secret)
        assert places(await some.read()) == {second: 2, third: 3}
        assert places(await every.read()) == {first: 1, second: 2, third: 3}
        runs.move(database, first, RunState.STARTING)
        assert places(await some.read()) == {second: 1, third: 2}
        assert places(await every.read()) == {first: None}
        runs.change(database, third, priority=1)
        assert places(await some.read()) == {second: 2, third: 1}

    anyio.run(test)


def test_a_deleted_or_unknown_run_and_a_revoked_token_end_it(client: Client, database: Database, secret: str) -> None:
    run_id = runs.add_run(database)
    with pytest.raises(NotFound):
        next(client.changes(["r" + "0" * 20]))
    changes = client.changes([run_id])
    next_change(changes)
    with database.writing() as session:
        session.delete(find(session, Run, run_id))
    assert next_change(changes) == ("deleted", {"id": run_id})
    assert next(changes, None) is None
    changes = client.changes([runs.add_run(database)])
    next_change(changes)
    with database.writing() as session:
        session.query(AccessToken).filter_by(sha256=hash_token(secret)).one().revoked_at = 1.0
    with pytest.raises(NotSignedIn, match="revoked"):
        next_change(changes)


def test_without_ids_every_run_that_has_not_ended_is_followed(client: Client, database: Database) -> None:
    runs.add_run(database, state=RunState.SUCCEEDED)
    waiting = runs.add_run(database)
    with database.writing() as session:
        events.record(session, None, "tests", "noise", "of no run")
    changes: Any = client.changes([])
    assert next_change(changes)[1]["id"] == waiting
    runs.change(database, waiting, state=RunState.FAILED)
    assert next_change(changes)[1]["state"] == "failed", "also that it has ended"
    new = runs.add_run(database)
    assert next_change(changes)[1]["id"] == new


def test_a_slow_stream_gets_all_in_order(database: Database, secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "_MOST_RECENT", 4)
    monkeypatch.setattr(feed, "EVENTS_AT_ONCE", 3)
    run_id = runs.add_run(database)
    number = runs.get(database, run_id).number

    def record(*names: str) -> None:
        for name in names:
            with database.writing() as session:
                events.record(session, number, "tests", name, "")

    def kinds(messages: list[bytes]) -> list[str]:
        return [json.loads(m.split(b"data: ")[1])["kind"] for m in messages if m.startswith(b"event: event")]

    async def test() -> None:
        record("a", "b", "c", "d")
        reader = Reader(database, secret, [number], after=0)
        assert kinds(await reader.read()) == ["a", "b", "c", "d"]
        record("e", "f")
        for _ in range(6):  # nobody takes them from the stream
            record("g")
            await reader.feed._update()
        record("h")
        assert kinds(await reader.read()) == ["e", "f", *"gggggg", "h"]
        assert len(await reader.read()) == 0

    anyio.run(test)


def test_a_stream_ends_after_the_last_event_of_its_runs(
    database: Database, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not when the end of a run is read before its events, which are behind many of other runs."""
    monkeypatch.setattr(feed, "EVENTS_AT_ONCE", 3)
    mine, other = (runs.get(database, runs.add_run(database)) for _ in range(2))

    async def test() -> None:
        reader = Reader(database, secret, [mine.number])
        await reader.read()
        with database.writing() as session:
            for _ in range(3):
                events.record(session, other.number, "tests", "noise", "")
        runs.move(database, mine.id, RunState.CANCELLED)
        read = [(len(await reader.read()), reader.stream.is_over) for _ in range(2)]
        assert read == [(1, False), (1, True)], "the run, then its event"

    anyio.run(test)


def test_any_number_of_streams_is_one_reading_and_holds_nothing(database: Database, secret: str) -> None:
    ids = [runs.add_run(database) for _ in range(5)]
    numbers = [runs.get(database, run_id).number for run_id in ids]
    statements: list[str] = []
    event.listen(database._reading_engine, "before_cursor_execute", lambda *given: statements.append(given[2]))

    async def test() -> None:
        reader = Reader(database, secret)
        counts = []
        for more in (5, 300):
            streams = [Subscription(secret, [numbers[n % 5]]) for n in range(more)]
            for stream in streams:
                reader.held.enter_context(reader.feed.following(stream))
            await reader.read()
            statements.clear()
            runs.change(database, ids[0], step=more + 1)
            assert len(await reader.read()) == 1
            counts.append(len(statements))
            assert sum(bool(stream.changed) for stream in streams) == more // 5 + 4 * more // 5, "first of every run"
        assert counts[0] == counts[1]
        assert database._reading_engine.pool.checkedout() == 0  # type: ignore[attr-defined]

    anyio.run(test)


def test_streams_end_when_changes_cannot_be_read(
    client: Client, app: FastAPI, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = client.changes([runs.add_run(database)])
    next_change(changes)

    def fail(*_: Any) -> None:
        raise OperationalError("select", {}, Exception("gone"))

    monkeypatch.setattr(app.state.changes, "_read", fail)
    assert [change for change in changes if change is not None] == []
    monkeypatch.undo()
    assert next_change(client.changes([runs.add_run(database)]))[0] == "run"


@pytest.fixture
def only_notified(monkeypatch: pytest.MonkeyPatch) -> None:
    """On PostgreSQL nothing but notifications tells of changes."""
    monkeypatch.setattr(feed, "COMPARE_S", 3600.0)


@pytest.mark.each_database
@pytest.mark.usefixtures("only_notified")
def test_whatever_changes_a_run_is_pushed_at_once(
    client: Client, database: Database, url: str, token_for: Callable[[str], str], settings: ServiceSettings
) -> None:
    admin = token_for("admin")
    changes = client.changes([])
    assert next(changes) is None
    with Client(connect(url), admin) as submitter:
        run_id = submitter.submit({"preset": "demo"})["id"]
        assert next_change(changes)[1]["state"] == "queued"
        cluster = Cluster(database, settings)
        scheduler = cluster.scheduler()
        scheduler.tick()
        assert next_run(changes)["state"] == "starting"
        token = scheduler._held[run_id].secret
        report = {"attempt": 1, "batch": None, "phase": "training"}
        with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, trust_env=False) as trainer:
            trainer.post(f"/api/v1/runs/{run_id}/ingest", json=report).raise_for_status()
            run = next_run(changes)
            assert (run["state"], run["phase"]) == ("running", "training")
            row = {"attempt": 1, "step": 7, "time": 1.0, "metrics": {"reward/mean": 0.5}}
            report = {"attempt": 1, "batch": 1, "offsets": dict.fromkeys(KINDS, 0), "metrics": [row]}
            trainer.post(f"/api/v1/runs/{run_id}/ingest", json=report).raise_for_status()
            assert next_run(changes)["progress"]["steps"] == 7
        submitter.request("PATCH", f"/runs/{run_id}", json={"name": "other"})
        assert next_change(changes)[1]["name"] == "other"
        submitter.post("/runs", run_id, "cancel")
        assert next_run(changes)["state"] == "cancelling"
        assert next_change(changes)[0] == "event"
        mine = client.get("/tokens/me")["id"]
        submitter.request("DELETE", f"/tokens/{mine}")
    with pytest.raises(NotSignedIn, match="revoked"):
        next_change(changes)


@pytest.mark.each_database
def test_the_events_of_a_run_that_comes_during_a_reading_are_read_next(
    database: Database, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    new: list[str] = []

    def rows_of(*arguments: Any) -> list[Any]:
        found = rows(*arguments)
        if not new:
            new.append(runs.add_run(database))
            runs.move(database, new[0], RunState.STARTING)
        return found

    rows = feed._rows
    monkeypatch.setattr(feed, "_rows", rows_of)

    async def test() -> None:
        reader = Reader(database, secret, after=0)
        assert await reader.read() == []
        run, started = await reader.read()
        assert [part.split(b"\n")[0] for part in (run, started)] == [b"event: run", b"event: event"]

    anyio.run(test)


def test_a_reader_of_all_runs_who_returns_gets_what_happened_while_others_followed_some(
    database: Database, secret: str
) -> None:
    """A reading for streams of some runs does not tell which others have not ended."""
    mine, other = (runs.get(database, runs.add_run(database)) for _ in range(2))
    with database.reading() as session:
        after = feed.last_event(session)

    async def test() -> None:
        reader = Reader(database, secret, [mine.number])
        await reader.read()
        runs.move(database, other.id, RunState.STARTING)
        assert await reader.read() == []
        returned = Subscription(secret, None, after)
        with reader.feed.following(returned):
            await reader.feed._update()
            runs.move(database, other.id, RunState.RUNNING)
            await reader.feed._update()
            messages: list[bytes] = []
            while page := await run_changes._next(reader.feed, returned):
                messages += page
        sent = [json.loads(m.split(b"data: ")[1]) for m in messages if m.startswith(b"event: event")]
        assert [event["fields"]["new"] for event in sent] == ["starting", "running"]

    anyio.run(test)


@pytest.mark.each_database
@pytest.mark.usefixtures("only_notified")
def test_a_change_during_a_reading_is_read_next(database: Database, secret: str) -> None:
    run_id = runs.add_run(database)
    number = runs.get(database, run_id).number
    steps = iter(range(1, 4))

    def views(session: Any, numbers: Any) -> dict[int, bytes]:
        """The rows of this reading have been read already."""
        found = run_changes.messages(session, numbers)
        if (step := next(steps, None)) is not None:
            runs.change(database, run_id, step=step)
        return found

    async def test() -> None:
        changes, stream = ChangeFeed(database, views), Subscription(secret, [number])
        seen = 0
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(changes.run)
            with anyio.fail_after(60.0), changes.following(stream):
                while seen < 3:
                    await stream.wait(60.0)
                    for message in await run_changes._next(changes, stream):
                        seen = json.loads(message.split(b"data: ")[1])["progress"]["steps"]
            tasks.cancel_scope.cancel()

    anyio.run(test)


@pytest.mark.each_database
@pytest.mark.usefixtures("only_notified")
def test_a_lost_listening_connection_is_replaced_and_bridged_by_polling(
    client: Client, database: Database, app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    if database.is_sqlite:
        pytest.skip("SQLite does not notify")
    monkeypatch.setattr(feed, "_RELISTEN_S", 3600.0)
    run_id = runs.add_run(database)
    changes = client.changes([run_id])
    assert next_change(changes)[0] == "run"
    until(lambda: app.state.changes._is_listening, "the feed listens")
    listening = "FROM pg_stat_activity WHERE query LIKE 'LISTEN%' AND datname = current_database()"
    with database.autocommit_connection() as connection:
        monkeypatch.setattr(feed, "_RELISTEN_S", 2.0)
        connection.execute(text(f"SELECT pg_terminate_backend(pid, 5000) {listening}"))
        until(lambda: not app.state.changes._is_listening, "the loss is noticed")
        connection.execute(text("UPDATE runs SET step = 1"))  # notifies nobody
        assert next_change(changes)[1]["progress"]["steps"] == 1
        until(lambda: app.state.changes._is_listening, "the feed listens again")
        assert connection.execute(text(f"SELECT count(*) {listening}")).scalar_one() == 1
    runs.change(database, run_id, step=2)
    assert next_change(changes)[1]["progress"]["steps"] == 2


def test_ids_alone_are_sent_to_a_reader_who_asks_for_the_rest(client: Client, database: Database) -> None:
    run_id = runs.add_run(database)
    with client.stream("/events/stream", ids_only=True) as (_, pieces):
        changes = _server_sent(pieces)
        assert next_change(changes) == ("run", {"id": run_id})
        runs.change(database, run_id, step=1)
        assert next_change(changes) == ("run", {"id": run_id})
