"""Curves over steps and costs, as they grow and when history is rewritten; on both databases."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import event, select, text
from sqlalchemy.orm import Session
from support import queued_runs as runs
from support.reporting import body, launch, metric_row, send
from support.service_processes import until

from gxpo_services.api.feed import last_event
from gxpo_services.db.database import Database
from gxpo_services.db.tables import Event
from gxpo_services.outputs import events
from gxpo_services.run_states import RunState

pytestmark = pytest.mark.each_database


def grown(database: Database, steps: range, *, attempt: int = 1, launched: str | None = None, number: int = 1) -> str:
    """A run that reports loss = step/10 and its costs; 3 passes, 2 s, 50 tokens a step."""
    launched = launched or launch(database)
    rates = {"loss": 0.1, "update/backward_passes_total": 3.0, "time/training_s": 2.0, "rollout/tokens_total": 50.0}
    rows = [metric_row(step, attempt, **{name: step * rate for name, rate in rates.items()}) for step in steps]
    offsets = runs.get(database, launched.split()[0]).offsets
    send(database, launched, body(number, offsets=offsets, metrics=rows))
    return launched


def get(client: TestClient, run_id: str, **query: Any) -> dict[str, Any]:
    content: dict[str, Any] = client.get(f"/api/v1/runs/{run_id}/metrics", params=query).raise_for_status().json()
    return content


def test_a_curve_over_steps_and_its_revision_after_a_new_attempt(client: TestClient, database: Database) -> None:
    launched = grown(database, range(1, 4))
    run_id = launched.split()[0]
    answer = get(client, run_id, names="loss,none")
    loss = {"x": [1, 2, 3], "y": pytest.approx([0.1, 0.2, 0.3]), "steps": [1, 2, 3], "downsampled": False}
    series = {"loss": loss, "none": {"x": [], "y": [], "steps": [], "downsampled": False}}
    assert answer == {"x": "step", "run": run_id, "last_step": 3, "attempt": 1, "revision": 1, "series": series}
    names = client.get(f"/api/v1/runs/{run_id}/metrics/names").json()
    assert names == ["loss", "rollout/tokens_total", "time/training_s", "update/backward_passes_total"]
    grown(database, range(4, 12), launched=launched, number=2)
    assert get(client, run_id, names="loss")["revision"] == 1
    grown(database, range(5, 7), attempt=2, launched=launched, number=3)
    answer = get(client, run_id, names="loss")
    assert (answer["revision"], answer["attempt"], answer["last_step"]) == (2, 2, 6)
    assert answer["series"]["loss"]["steps"] == [1, 2, 3, 4, 5, 6]


def test_points_after_a_step_are_the_tail_of_the_whole_curve(client: TestClient, database: Database) -> None:
    """Around the end of a block of 128 steps. The last cost before a point may be of a step before `after`."""
    launched = launch(database)
    costs = {"update/backward_passes_total": 3.0, "time/training_s": 2.0, "rollout/tokens_total": 50.0}
    totals = {step: {name: step * rate for name, rate in costs.items()} for step in range(10, 301, 10)}
    rows = [metric_row(step, loss=step / 10, **totals.get(step, {})) for step in range(1, 301)]
    send(database, launched, body(1, metrics=rows))
    run_id = launched.split()[0]
    for x in ("step", "backward_passes", "time", "tokens"):
        whole = get(client, run_id, names="loss", x=x)["series"]["loss"]
        for after in (126, 127, 128):
            tail = get(client, run_id, names="loss", x=x, after=after)["series"]["loss"]
            assert tail["steps"] == list(range(after + 1, 301))
            assert all(tail[part] == whole[part][-len(tail["steps"]) :] for part in ("x", "y", "steps")), (x, after)


def test_questions_that_make_no_sense_or_ask_for_too_much_are_refused(client: TestClient, database: Database) -> None:
    run_id = grown(database, range(1, 3)).split()[0]
    path = f"/api/v1/runs/{run_id}/metrics"
    for query in ({"names": ","}, {"names": "a", "max_points": 3}, {"names": "a", "smoothing": "nan"}):
        assert client.get(path, params=query).status_code == 422
    unknown = "r00000000000000000000"
    assert client.get(f"/api/v1/runs/{unknown}/metrics", params={"names": "a"}).status_code == 404
    missing = client.get("/api/v1/metrics", params={"runs": [run_id, unknown], "names": "a"})
    assert missing.status_code == 404
    assert unknown in missing.json()["detail"]
    too_many = {"runs": [run_id, *[f"r{n}" for n in range(100)]], "names": ",".join(f"m{n}" for n in range(30))}
    assert client.get("/api/v1/metrics", params=too_many).status_code == 422
    # At most two million points.
    names = ",".join(f"m{n}" for n in range(100))
    assert client.get(path, params={"names": f"m0,{names}", "max_points": 20_000}).status_code == 200
    refused = client.get(path, params={"names": f"{names},m100", "max_points": 20_000})
    assert refused.status_code == 422
    assert refused.json()["detail"].startswith("1 runs × 101 metrics × max_points (20000) exceed 2000000 points")
    of_several = {"runs": [f"r{n:020d}" for n in range(200)], "names": "m0"}
    assert client.get("/api/v1/metrics", params=of_several | {"max_points": 10_001}).status_code == 422
    assert client.get("/api/v1/metrics", params=of_several | {"max_points": 10_000}).status_code == 404, "unknown runs"


# Events become visible in the order of their numbers, so that a reader continues after the last one.


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
