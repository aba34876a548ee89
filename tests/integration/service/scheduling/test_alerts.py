"""Alerts of what happened to runs, received by a real server."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs
from support.recording_server import RecordingServer
from support.scheduling import Cluster
from support.service_processes import until

from gxpo_services.outputs import events
from gxpo_services.run_states import RunState
from gxpo_services.scheduling import alerts


class Receiver(RecordingServer):
    """Answers with the statuses in turn, then with 200."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        super().__init__(lambda _: self.statuses.pop(0) if self.statuses else 200)

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(request.body) for request in self.requests]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        receiver.url += "/hook"
        yield receiver


def happened(cluster: Cluster, run_id: str, kind: str, message: str, **fields: Any) -> None:
    number = cluster.get(run_id).number
    with cluster.database.writing() as session:
        events.record(session, number, "trainer", kind, message, **fields)


def ended(cluster: Cluster, run_id: str, new: RunState, reason: str | None, message: str) -> None:
    happened(cluster, run_id, "state", message, old="running", new=new.value, reason=reason)


def test_each_event_is_sent_once_whichever_scheduler_sees_it(cluster: Cluster, receiver: Receiver) -> None:
    first, second = (cluster.scheduler(name, webhooks=(receiver.url,)) for name in ("first", "second"))
    run_id = cluster.add_run(state=RunState.RUNNING, name="night")
    ended(cluster, run_id, RunState.FAILED, "out_of_memory", "before there was a webhook")
    first.tick()
    second.tick()
    happened(cluster, run_id, "gate_fired", "step 12: the gate ended the look-ahead")
    happened(cluster, run_id, "checkpoint", "step 12 saved")
    happened(cluster, run_id, "no_signal", "step 12: no signal for 5 steps")
    happened(cluster, run_id, "no_progress", "training, no progress for 15 of 30 min")
    ended(cluster, run_id, RunState.RECOVERING, None, "launch 2 started: no heartbeat")
    happened(cluster, run_id, "recovery", "launch 3 started: no heartbeat")
    ended(cluster, run_id, RunState.RUNNING, None, "the trainer reported")
    ended(cluster, run_id, RunState.FAILED, "diverged", "diverged: no finite loss")
    ended(cluster, run_id, RunState.FAILED, "out_of_memory", "out_of_memory: killed")
    ended(cluster, run_id, RunState.SUCCEEDED, "steps_done", "budget.steps reached")
    for scheduler in (first, second, first, second):
        scheduler.tick()
    for scheduler in (first, second):
        scheduler._alerts.close()
    assert [(body["alert"], body["message"]) for body in receiver.bodies] == [
        ("gate_fired", "step 12: the gate ended the look-ahead"),
        ("no_signal", "step 12: no signal for 5 steps"),
        ("no_progress", "training, no progress for 15 of 30 min"),
        ("recovering", "launch 2 started: no heartbeat"),
        ("recovering", "launch 3 started: no heartbeat"),
        ("diverged", "diverged: no finite loss"),
        ("failed", "out_of_memory: killed"),
        ("budget_reached", "budget.steps reached"),
    ]
    body = receiver.bodies[0]
    assert body["text"] == f"Run 'night' ({run_id}) goes on without look-ahead: {body['message']}"
    assert body["url"].endswith(f"/api/v1/runs/{run_id}")


def test_what_happened_while_there_was_no_webhook_is_not_sent(cluster: Cluster, receiver: Receiver) -> None:
    run_id = cluster.add_run(state=RunState.RUNNING)
    for number, webhooks in enumerate([(receiver.url,), (), (receiver.url,)]):
        scheduler = cluster.scheduler(f"scheduler {number}", webhooks=webhooks)
        scheduler.tick()
        ended(cluster, run_id, RunState.FAILED, "training_error", f"failure {number}")
        for _ in range(2):
            scheduler.tick()
        scheduler._alerts.close()
    assert [body["message"] for body in receiver.bodies] == ["failure 0", "failure 2"]


def test_only_chosen_alerts_go_in_parts(cluster: Cluster, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "MOST_AT_ONCE", 2)
    scheduler = cluster.scheduler(webhooks=(receiver.url,), webhook_alerts=("failed",))
    run_id = cluster.add_run(state=RunState.RUNNING)
    scheduler.tick()
    for number in range(5):
        happened(cluster, run_id, "gate_fired", "step 1")
        ended(cluster, run_id, RunState.FAILED, "training_error", f"failure {number}")
    for _ in range(7):
        scheduler.tick()
    scheduler._alerts.close()
    assert [body["message"] for body in receiver.bodies] == [f"failure {number}" for number in range(5)]


def test_a_receiver_that_fails_is_tried_again_and_given_up_without_its_secret_in_the_log(
    cluster: Cluster, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alerts._post.retry, "wait", alerts.tenacity.wait_none())  # type: ignore[attr-defined]
    scheduler = cluster.scheduler(webhooks=(receiver.url,))
    run_id = cluster.add_run(state=RunState.RUNNING)
    scheduler.tick()
    # The first alert passes at its third attempt; the second meets four answers that are no success.
    receiver.statuses = [500, 302, 200, 500, 500, 302, 404]
    for message in ("one", "two"):
        ended(cluster, run_id, RunState.FAILED, "training_error", message)
    with capture_logs() as logged:
        for _ in range(3):
            scheduler.tick()
        scheduler._alerts.close()
    assert [body["message"] for body in receiver.bodies] == ["one"] * 3 + ["two"] * 4
    (entry,) = [entry for entry in logged if entry["event"] == "alert not delivered"]
    assert (entry["host"], entry["run"], entry["error"]) == ("127.0.0.1", run_id, "status 404")
    assert "/hook" not in str(logged)


def test_a_silent_receiver_delays_nobody(cluster: Cluster, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "CLOSE_S", 0.1)
    monkeypatch.setattr(alerts, "MOST_WAITING", 2)
    monkeypatch.setattr(alerts._post.retry, "wait", alerts.tenacity.wait_none())  # type: ignore[attr-defined]
    with socket.create_server(("127.0.0.1", 0)) as silent, capture_logs() as logged:
        scheduler = cluster.scheduler(webhooks=(f"http://127.0.0.1:{silent.getsockname()[1]}/hook", receiver.url))
        run_id = cluster.add_run(state=RunState.RUNNING)
        scheduler.tick()
        for number in range(4):
            ended(cluster, run_id, RunState.FAILED, "training_error", f"failure {number}")
            scheduler.tick()
            if number == 0:
                held = silent.accept()[0]
            until(lambda: len(receiver.bodies) == number + 1, "the second receiver to get it")  # noqa: B023
        scheduler._alerts.close()
        # Of four alerts, the first is being sent and two wait.
        events = [(entry["event"], entry.get("error")) for entry in logged]
        assert events.count(("alert not delivered", "2 alerts are waiting")) == 1
        assert ("alerts not delivered before the scheduler stopped", None) in events
        assert [event for event, error in events if error is not None] == ["alert not delivered"]
        # Nothing of it may log into a later test.
        silent.close()
        held.close()
        for sender in scheduler._alerts._senders:
            sender._waiting.put(None, timeout=60)
            sender._thread.join(60)
