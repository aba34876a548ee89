"""API, scheduler and trainers are killed at random moments; every run still ends, once, with a whole history.

API and scheduler are the product's own, as processes; trainers are stand-ins that do everything but train.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import func, select
from support import queued_runs, stand_in_trainer as trainer
from support.service_processes import QUICK, SCHEDULER, PatientClient, ServiceProcesses, kill_trainer, trainers, until

from gxpo_services.db.database import Database
from gxpo_services.db.tables import EvaluationRow, Event, Run
from gxpo_services.run_states import TERMINAL
from gxpo_trainer.jsonl import read_lines

pytestmark = pytest.mark.long("chaos at length")

STEPS = 16
ENVIRONMENT = {
    **QUICK,
    "GXPO_MAX_CONCURRENT_RUNS": "5",
    "GXPO_LEASE_S": "3",
    "GXPO_HEARTBEAT_S": "60",
    "GXPO_START_S": "120",
    "GXPO_CANCEL_GRACE_S": "10",
    "GXPO_PAUSE_GRACE_S": "20",
    "GXPO_MAX_RECOVERIES": "1000",
}


def test_whatever_is_killed_every_run_ends_once_with_a_whole_history(
    database_url: str, database: Database, home: Path, token_for: Callable[[str], str]
) -> None:
    num_runs, num_kills = (20, 24) if database.is_sqlite else (8, 10)
    environment = {**ENVIRONMENT, "GXPO_HOME": str(home), "GXPO_DATABASE_URL": database_url}
    service = ServiceProcesses(environment, SCHEDULER, home / "logs")
    client = PatientClient(service.url, token_for("submitter"))
    try:
        with service.running():
            ids = [submit(client, number) for number in range(num_runs)]
            assert len(set(ids)) == num_runs
            steered = disturb(service, client, home / "artifacts", num_kills, random.Random(20261121))
            finish(service, client, ids)
            until(lambda: not trainers(home / "artifacts"), "the last trainer to end")
    finally:
        for pid in trainers(home / "artifacts"):
            kill_trainer(pid)
    for run_id in ids:
        check(database, home / "artifacts" / run_id, run_id, may_be_cancelled=run_id in steered)


def submit(client: PatientClient, number: int) -> str:
    """The request is repeated until it succeeds; its key makes that one run."""
    body = {"config": {"budget": {"steps": STEPS}, "seed": number}, "name": f"chaos {number}"}
    answer = client.ask("POST", "/runs", json=body, headers={"Idempotency-Key": f"chaos-{number}"})
    assert answer.status_code in (200, 201), answer.text
    return str(answer.json()["id"])


def disturb(
    service: ServiceProcesses, client: PatientClient, artifacts: Path, num_kills: int, chance: random.Random
) -> set[str]:
    """Kill processes repeatedly and control a few runs at the same time; returns the ids of cancelled runs."""
    cancelled: set[str] = set()
    num_others = num_kills // 6
    plan = [*["trainer"] * (num_kills - 2 * num_others - 1), *["api", "scheduler"] * num_others, "all"]
    chance.shuffle(plan)
    for number, victim in enumerate(plan):
        time.sleep(chance.uniform(0.05, 0.8))
        strike(victim, service, client, artifacts, chance)
        time.sleep(chance.uniform(0.0, 0.3))
        service.check()
        if number % 4 == 1:
            running = client.ask("GET", "/runs", params={"state": "running"}).json()["items"]
            for run in sorted(running, key=lambda run: run["progress"]["steps"])[:1]:
                action = "pause" if number % 8 == 1 else "cancel"
                answer = client.ask("POST", f"/runs/{run['id']}/{action}")
                assert answer.status_code in (200, 202, 409), answer.text
                if action == "cancel" and answer.is_success:
                    cancelled.add(run["id"])
    return cancelled


def strike(
    victim: str, service: ServiceProcesses, client: PatientClient, artifacts: Path, chance: random.Random
) -> None:
    """Kill a trainer, a part of the service, or "all" at once, as when the machine is switched off."""
    if victim in ("trainer", "all"):
        none_left = TERMINAL | {"paused"}
        until(lambda: trainers(artifacts) or none_left.issuperset(states(client).values()), "a trainer to kill")
    for name in ("api", "scheduler"):
        if victim in (name, "all"):
            service.kill(name)
    alive = [*trainers(artifacts)] if victim in ("trainer", "all") else []
    for pid in alive if victim == "all" else [chance.choice(alive)] if alive else []:
        kill_trainer(pid)


def states(client: PatientClient) -> dict[str, str]:
    return {run["id"]: run["state"] for run in client.ask("GET", "/runs", params={"limit": 200}).json()["items"]}


def finish(service: ServiceProcesses, client: PatientClient, ids: list[str]) -> None:
    """Nothing is killed any more; paused runs are resumed."""

    def ended() -> bool:
        service.check()
        found = states(client)
        for run_id in [run_id for run_id, state in found.items() if state == "paused"]:
            client.ask("POST", f"/runs/{run_id}/resume")
        return TERMINAL.issuperset(found.values())

    until(ended, f"all of {len(ids)} runs to end")


def check(database: Database, folder: Path, run_id: str, *, may_be_cancelled: bool) -> None:
    with database.reading() as session:
        run = session.scalars(select(Run).where(Run.id == run_id)).one()
        events = list(session.scalars(select(Event).where(Event.run_number == run.number).order_by(Event.number)))
        num_evaluations = session.scalar(
            select(func.count()).select_from(EvaluationRow).where(EvaluationRow.run_number == run.number)
        )
    wanted = {"succeeded", "cancelled"} if may_be_cancelled else {"succeeded"}
    assert run.state in wanted, (run.state, run.reason, run.detail)
    assert (run.lease_owner, run.run_token_sha256) == (None, None)
    ends = [event.fields["new"] for event in events if event.kind == "state" and event.fields["new"] in TERMINAL]
    assert ends == [run.state], "it ended once"
    if not (folder / "metrics.jsonl").exists():
        assert run.state == "cancelled"
        return
    # One trainer at a time: attempts follow each other, and the steps of each come one by one.
    rows = list(read_lines(folder / "metrics.jsonl"))
    for before, after in itertools.pairwise(rows):
        same = after["attempt"] == before["attempt"]
        assert (same and after["step"] == before["step"] + 1) or after["attempt"] > before["attempt"]
    # Every line arrived once.
    files = {kind: list(read_lines(folder / f"{kind}.jsonl")) for kind in ("metrics", "evaluations", "events")}
    assert {kind: run.offsets[kind] for kind in files} == {kind: len(lines) for kind, lines in files.items()}
    assert num_evaluations == len(files["evaluations"])
    reported = Counter(event.message for event in events if event.actor == "trainer" and event.kind != "state")
    assert reported == Counter(event["message"] for event in files["events"])
    # And the effective history is whole: an attempt replaces what earlier ones reported from its first step on.
    steps = STEPS if run.state == "succeeded" else rows[-1]["step"] if rows else 0
    assert (run.step, run.backward_passes) == (steps, trainer.PASSES_PER_STEP * steps)
    for name in trainer.metrics_at(1):
        expected = [(step, repr(trainer.metrics_at(step)[name])) for step in range(1, steps + 1)]
        assert [(step, repr(value)) for step, value in queued_runs.curve(database, run_id, name)] == expected, name
