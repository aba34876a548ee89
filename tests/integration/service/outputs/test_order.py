"""Events become visible in the order of their numbers, so that a reader continues after the last one."""

from __future__ import annotations

import threading

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import event, select, text
from sqlalchemy.orm import Session
from support import queued_runs as runs
from support.service_processes import until

from gxpo_services.api.feed import last_event
from gxpo_services.db.database import Database
from gxpo_services.db.tables import Event
from gxpo_services.outputs import events
from gxpo_services.run_states import RunState

pytestmark = pytest.mark.each_database

API = "/api/v1"
WAITING = text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")


@pytest.fixture
def postgresql(database: Database) -> Database:
    if database.is_sqlite:
        pytest.skip("SQLite has one writer at a time")
    return database


def kinds(database: Database) -> list[str]:
    """Of the visible events, in the order of their numbers."""
    with database.reading() as session:
        return list(session.scalars(select(Event.kind).order_by(Event.number)))


def add(session: Session, kind: str, run_number: int | None = None) -> None:
    events.record(session, run_number, "tests", kind, kind)


def test_an_event_that_commits_later_has_a_larger_number(postgresql: Database) -> None:
    with postgresql.writing() as first:
        add(first, "first")
        first.flush()
        with postgresql.writing() as second:
            add(second, "second")
        assert kinds(postgresql) == ["second"]
    assert kinds(postgresql) == ["second", "first"]


def test_two_commits_at_the_same_time_follow_each_other(postgresql: Database) -> None:
    def write_second() -> None:
        with postgresql.writing() as session:
            add(session, "second")

    other = threading.Thread(target=write_second)

    def is_waiting() -> bool:
        with postgresql.autocommit_connection() as connection:
            return bool(connection.scalar(WAITING))

    def before_commit(_: Session) -> None:
        other.start()
        until(is_waiting, "the second writer waits for the first one's commit")
        assert kinds(postgresql) == []

    with postgresql.writing() as first:
        add(first, "first")
        event.listen(first, "before_commit", before_commit)  # after the insert, which listens already
    other.join()
    assert kinds(postgresql) == ["first", "second"]


def test_a_writer_that_waits_for_a_run_does_not_hold_the_lock(postgresql: Database) -> None:
    """With the lock it would be a deadlock with the holder of the run's row."""
    number = runs.get(postgresql, runs.add_run(postgresql)).number
    started = threading.Event()

    def write_second() -> None:
        with postgresql.writing() as session:
            add(session, "second", number)
            started.set()

    other = threading.Thread(target=write_second)
    with postgresql.writing() as first:
        first.execute(text("SELECT 1 FROM runs WHERE number = :number FOR UPDATE"), {"number": number})
        other.start()
        started.wait()
        with postgresql.autocommit_connection() as connection:
            until(
                lambda: bool(connection.scalar(text("SELECT count(*) FROM pg_locks WHERE NOT granted"))),
                "the second writer waits for the run",
            )
        add(first, "first", number)
    other.join()
    assert sorted(kinds(postgresql)) == ["first", "second"]


def test_an_event_of_a_change_that_is_rolled_back_is_not_stored(database: Database) -> None:
    def change() -> None:
        with database.writing() as session:
            add(session, "undone")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        change()
    assert kinds(database) == []


def test_no_number_is_given_twice_after_a_deletion(client: TestClient, database: Database) -> None:
    run_id = runs.add_run(database, state=RunState.RUNNING)
    number = runs.get(database, run_id).number
    with database.writing() as session:
        for kind in ("one", "two", "three"):
            add(session, kind, number)
    with database.reading() as session:
        last = last_event(session)
    runs.change(database, run_id, state=RunState.FAILED)
    assert client.delete(f"{API}/runs/{run_id}").status_code == 204
    with database.reading() as session:
        assert last_event(session) > last
