"""Changes of runs as Server-Sent Events, read by the product's own client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support import queued_runs as runs

from gxpo_client.client import Client, Json, connect
from gxpo_client.errors import NotFound, NotSignedIn
from gxpo_services.api.principals import hash_token
from gxpo_services.db.database import Database
from gxpo_services.db.tables import AccessToken
from gxpo_services.outputs import events
from gxpo_services.run_states import RunState
from gxpo_services.runs import changes as run_changes
from gxpo_services.runs import service
from gxpo_services.runs.changes import Changes


@pytest.fixture
def secret(token_for: Callable[[str], str]) -> str:
    return token_for("viewer")


@pytest.fixture
def client(url: str, secret: str) -> Iterator[Client]:
    with Client(connect(url), secret) as client:
        yield client


def next_change(changes: Iterator[tuple[str, Json] | None]) -> tuple[str, Json]:
    return next(change for change in changes if change is not None)


def test_every_change_is_pushed_until_all_runs_have_ended(client: Client, database: Database) -> None:
    first, second, other = (runs.add_run(database) for _ in range(3))
    changes = client.changes([first, second])
    kinds = [next_change(changes) for _ in range(2)]
    assert [(kind, run["id"], run["state"]) for kind, run in kinds] == [
        ("run", first, "queued"),
        ("run", second, "queued"),
    ]
    runs.move(database, first, RunState.STARTING)
    kind, run = next_change(changes)
    assert (kind, run["id"], run["state"]) == ("run", first, "starting")
    kind, event = next_change(changes)
    assert (kind, event["run"], event["kind"], event["fields"]["new"]) == ("event", first, "state", "starting")
    runs.change(database, first, step=3)
    assert next_change(changes)[1]["progress"]["steps"] == 3
    runs.change(database, other, step=3)
    runs.change(database, second, phase="training")
    assert next_change(changes)[1]["phase"] == "training", "nothing of a run that was not asked for"
    for run_id in (first, second):
        runs.change(database, run_id, state=RunState.CANCELLED)
    rest = [change[1]["id"] for change in changes if change is not None]
    assert sorted(set(rest)) == sorted([first, second]), "and then the stream ends"

    again = [change for change in client.changes([first], after=event["number"]) if change is not None]
    assert [kind for kind, _ in again] == ["run"], "no event twice"


def test_a_silence_is_a_change_and_a_heartbeat_is_none(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1e9
    monkeypatch.setattr(run_changes, "time", SimpleNamespace(time=lambda: now))
    run_id = runs.add_run(database, state=RunState.RUNNING, heartbeat_at=now)
    changes = Changes(None, 0)

    def told() -> int:
        with database.reading() as session:
            return sum(b"event: run" in message for message in changes.read(session))

    assert told() == 1
    counts = []
    for passed in (4.0, 8.0, 4.0, 4.0, 10.0, 10.0):
        now += passed
        if passed == 8.0:
            runs.change(database, run_id, heartbeat_at=now)
        counts.append(told())
    # Silent for 4, 0, 4, 8, 18 and 28 s.
    assert counts == [0, 0, 0, 0, 1, 0]
    now += 3.0
    assert told() == 1, "and for 31 s"
    runs.change(database, run_id, heartbeat_at=now)
    assert told() == 1, "its end is one"


def test_a_deleted_run_an_unknown_one_and_a_revoked_token_end_a_stream(
    client: Client, database: Database, secret: str
) -> None:
    run_id = runs.add_run(database)
    with pytest.raises(NotFound):
        next(client.changes(["r" + "0" * 20]))
    changes = client.changes([run_id])
    next_change(changes)
    with database.writing() as session:
        session.delete(service.find(session, run_id))
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


def test_a_run_that_has_ended_is_not_read_again_after_its_end_was_sent(database: Database) -> None:
    ended, waiting = (runs.add_run(database) for _ in range(2))
    changes = Changes(None, 0)

    def read() -> list[bytes]:
        with database.reading() as session:
            return changes.read(session)

    def number(run_id: str) -> int:
        return runs.get(database, run_id).number

    assert len(read()) == 2
    runs.change(database, ended, state=RunState.FAILED)
    (message,) = read()
    assert b"event: run" in message
    assert ended.encode() in message
    assert changes._seen.keys() == changes._ids.keys() == {number(waiting)}
    runs.change(database, ended, recoveries=1)
    assert read() == []
    assert not changes.is_over


def test_thousands_of_runs_are_sent_in_pages_and_then_events(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_changes, "_RUNS_AT_ONCE", 3)
    ids = [runs.add_run(database) for _ in range(8)]
    runs.move(database, ids[0], RunState.STARTING)
    changes = Changes(None, 0)
    sizes, kinds = [], []
    with database.reading() as session:
        while not sizes or changes.unsent:
            messages = changes.read(session)
            sizes.append(len(messages))
            kinds += [message.split(b"\n")[0] for message in messages]
    assert sizes == [3, 3, 2 + 1], "the event of the first run comes with the last page"
    assert kinds == [b"event: run"] * 8 + [b"event: event"]
    for run_id in ids[:5]:
        runs.change(database, run_id, state=RunState.CANCELLED)
    with database.reading() as session:
        assert [len(changes.read(session)) for _ in range(3)] == [3, 2, 0]
    assert len(changes._seen) == 3


def test_ids_alone_are_sent_to_a_reader_who_asks_for_the_rest(client: Client, database: Database) -> None:
    run_id = runs.add_run(database)
    changes = client.changes([], None, ids_only=True)
    assert next_change(changes) == ("run", {"id": run_id})
    runs.move(database, run_id, RunState.STARTING)
    assert next_change(changes) == ("run", {"id": run_id})
    assert next_change(changes)[0] == "event"
