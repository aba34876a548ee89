"""What trainers report: applied once each, whatever comes twice, late or never; on both databases."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from fastapi.testclient import TestClient
from sqlalchemy import select
from support import queued_runs as runs
from support.reporting import body, evaluation_row, event_row, launch, metric_row, post, sample_row, send, write_lines

from gxpo_services.api.dependencies import find
from gxpo_services.api.principals import Principal, Role
from gxpo_services.db.database import Database
from gxpo_services.db.tables import MetricLast, MetricName, Run
from gxpo_services.ingest import reports
from gxpo_services.ingest.drain import drain, forget_lost_lines
from gxpo_services.outputs import metrics
from gxpo_services.run_states import RunState
from gxpo_services.runs import service
from gxpo_services.runs.lifecycle import StateChanged
from gxpo_services.scheduling.launcher import prepare
from gxpo_trainer.config.base import idle_phase
from gxpo_trainer.reporting.uploader import take_service
from gxpo_trainer.training.checkpoints import next_attempt
from gxpo_trainer.training.evaluation import score_groups
from gxpo_trainer.types import Group, Prompt, Sample, ScoredGroup, Verdict

COUNTERS = ("attempt", "step", "backward_passes", "tokens", "training_s", "score", "score_best", "score_step")


def last_values(database: Database, run_id: str) -> dict[str, tuple[Any, ...]]:
    """metric → (last, last_step, lowest, highest)."""
    number = runs.get(database, run_id).number
    query = (
        select(MetricName.name, MetricLast.last, MetricLast.last_step, MetricLast.lowest, MetricLast.highest)
        .join(MetricLast, MetricLast.name_number == MetricName.number)
        .where(MetricLast.run_number == number)
    )
    with database.reading() as session:
        return {row[0]: tuple(row[1:]) for row in session.execute(query)}


def totals(step: int, attempt: int = 1, **more: float) -> dict[str, Any]:
    """A row as a trainer writes it: 3 passes, 100 tokens and half a second a step."""
    costs = {
        "update/backward_passes_total": 3.0 * step,
        "rollout/tokens_total": 100.0 * step,
        "time/training_s": 0.5 * step,
    }
    return metric_row(step, attempt, **costs, **more)


def test_a_run_has_limited_metrics_and_says_what_is_out(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MOST_OF_RUN", 3)
    launched = launch(database)
    run_id = launched.split()[0]
    send(database, launched, body(1, metrics=[metric_row(1, a=1.0, b=1.0), metric_row(2, a=2.0, c=2.0, d=2.0)]))
    send(database, launched, body(2, offsets={"metrics": 2}, metrics=[metric_row(3, a=3.0, e=3.0, f=3.0)]))
    assert last_values(database, run_id) == {"a": (3.0, 3, 1.0, 3.0), "b": (1.0, 1, 1.0, 1.0), "c": (2.0, 2, 2.0, 2.0)}
    said = [message for kind, message in runs.messages(database, run_id) if kind == "metrics_left_out"]
    assert len(said) == 1, "once, not with every batch"
    assert said[0].startswith("metric 'd' and 0 more are left out: a run has at most 3 metrics")
    # Another attempt replaces the steps of the first, and its metrics count together with those of that.
    send(database, launched, body(3, offsets={"metrics": 3}, metrics=[metric_row(1, 2, g=1.0, a=5.0)]))
    assert {*last_values(database, run_id)} == {"a"}
    with database.reading() as session:
        known = metrics.find_numbers(session, ["a", "b", "c", "d", "e", "f", "g"])
    assert {*known} == {"a", "b", "c"}, "what is left out leaves no name behind"


def test_a_large_evaluation_arrives_and_never_hides_the_score(
    anonymous: TestClient, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the trainer writes it: the average comes after the scores of all benchmarks."""
    ids = np.array([1], dtype=np.int32)
    sample, verdict = Sample("2", ids, np.zeros(1, dtype=np.float32), "stop"), Verdict("correct", "2", 0.0)
    scores, _ = score_groups([ScoredGroup(Group(Prompt("1", "1+1?", "2"), ids, (sample,) * 64, 0), (verdict,) * 64)])
    values = {f"eval/{name}/{score}": value for name in ("a", "b", "c") for score, value in scores.items()}
    values |= {"eval/average/pass@1": 0.5, "time/evaluate_s": 1.0}
    # Three benchmarks with 3·64 + 6 scores each.
    assert len(values) == 596
    launched = launch(database)
    run_id = launched.split()[0]
    assert post(anonymous, launched, body(1, metrics=[metric_row(0, **values)])).status_code == 200
    assert len(last_values(database, run_id)) == 596
    monkeypatch.setattr(metrics, "MOST_OF_RUN", 3)
    crowded = launch(database)
    for number, row in enumerate([metric_row(0, **values), totals(1, loss=2.0)], start=1):
        post(anonymous, crowded, body(number, offsets={"metrics": number - 1}, metrics=[row])).raise_for_status()
    run_id = crowded.split()[0]
    run = runs.get(database, run_id)
    assert tuple(getattr(run, name) for name in COUNTERS) == (1, 1, 3.0, 100.0, 0.5, 0.5, 0.5, 0)
    assert len(last_values(database, run_id)) == 3 + 4
    (message,) = [text for kind, text in runs.messages(database, run_id) if kind == "metrics_left_out"]
    assert message == (
        "metric 'eval/a/pass@2' and 591 more are left out: a run has at most 3 metrics; report fewer names, or lower "
        "evaluation.samples_per_prompt"
    )


def test_the_first_heartbeat_makes_the_run_running_and_one_that_says_nothing_new_changes_its_time_alone(
    anonymous: TestClient, database: Database
) -> None:
    launched = launch(database)
    run_id, secret = launched.split()
    answer = post(anonymous, launched, body(None) | {"phase": "training"})
    nothing = {"metrics": 0, "samples": 0, "evaluations": 0, "events": 0}
    assert (answer.status_code, answer.json()) == (200, {"applied": False, "offsets": nothing, "request": None})
    run = runs.get(database, run_id)
    assert (run.state, run.phase) == (RunState.RUNNING, "training")
    assert ("state", "launch 1 sent its first heartbeat") in runs.messages(database, run_id)
    assert post(anonymous, launched, body(1, metrics=[totals(1)])).status_code == 200
    before = runs.row(database, run_id)
    for phase in (None, "training"):
        answer = post(anonymous, launched, body(None) | {"phase": phase})
        assert answer.json() == {"applied": False, "offsets": before["offsets"], "request": None}
    after = runs.row(database, run_id)
    assert after["heartbeat_at"] > before["heartbeat_at"]
    assert after | {"heartbeat_at": 0.0} == before | {"heartbeat_at": 0.0}
    for other in (body(None, attempt=2), body(None, attempt=2) | {"phase": "training"}):
        assert post(anonymous, launched, other).status_code == 401
    assert post(anonymous, f"{run_id} {secret}x", body(None)).status_code == 401
    assert runs.row(database, run_id) == after


def test_rows_arrive_and_the_run_shows_how_far_it_is(anonymous: TestClient, database: Database) -> None:
    launched = launch(database)
    run_id = launched.split()[0]
    content = body(
        1,
        metrics=[metric_row(0, **{"eval/average/pass@1": 0.2}), totals(1), totals(2, loss=math.nan)],
        samples=[sample_row(1), sample_row(2)],
        evaluations=[evaluation_row(0)],
        events=[event_row("checkpoint", "step 2 saved", step=2)],
        identity={"config": {"seed": 0}, "attempts": [{"attempt": 1}]},
    )
    answer = post(anonymous, launched, content)
    assert answer.json() == {
        "applied": True,
        "offsets": {"metrics": 3, "samples": 2, "evaluations": 1, "events": 1},
        "request": None,
    }
    run = runs.get(database, run_id)
    assert tuple(getattr(run, name) for name in COUNTERS) == (1, 2, 6.0, 200.0, 1.0, 0.2, 0.2, 0)
    assert run.identity == {"config": {"seed": 0}, "attempts": [{"attempt": 1}]}
    assert last_values(database, run_id)["loss"] == (None, 2, None, None)
    assert ("checkpoint", "step 2 saved") in runs.messages(database, run_id)
    gap = post(anonymous, launched, body(2, offsets={"metrics": 3, "events": 5}, metrics=[totals(3)], events=[None]))
    assert (gap.status_code, gap.headers["content-type"]) == (409, "application/problem+json")
    assert gap.json()["offsets"] == answer.json()["offsets"]
    assert runs.curve(database, run_id, "time/training_s") == [(1, 0.5), (2, 1.0)]


def test_a_bad_row_refuses_the_whole_batch_and_is_named(anonymous: TestClient, database: Database) -> None:
    launched = launch(database)
    bad = body(1, metrics=[totals(1), metric_row(2, a="much")], samples=[sample_row(1)])  # type: ignore[arg-type]
    answer = post(anonymous, launched, bad)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == "metrics[1].metrics['a']"
    assert post(anonymous, f"{launched}x", bad).status_code == 401
    run_id = launched.split()[0]
    assert runs.curve(database, run_id, "time/training_s") == []
    assert runs.get(database, run_id).offsets == {}
    # The number is free for the batch without it.
    good = post(anonymous, launched, body(1, metrics=[totals(1), None], samples=[sample_row(1)]))
    assert (good.status_code, good.json()["offsets"]["metrics"]) == (200, 2)


def test_heartbeats_that_arrive_meanwhile_are_recorded_together(
    anonymous: TestClient, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = [launch(database) for _ in range(4)]
    for launched in launches:
        post(anonymous, launched, body(None) | {"phase": "training"})
    before = {launched: runs.row(database, launched.split()[0]) for launched in launches}
    taken, record = [], reports._record_together
    monkeypatch.setattr(reports, "_record_together", lambda *given: (taken.append(len(given[1])), record(*given)))
    heartbeats = reports.Heartbeats(database)
    calls = [
        (launches[0], body(None) | {"phase": "training"}),
        (launches[1], body(None)),
        (f"{launches[1]}x", body(None)),
        (f"{launches[2]}x", body(None)),
        (launches[3], body(None) | {"phase": "evaluating"}),
        (launches[3], body(1, metrics=[totals(1)])),
    ]

    async def record_all() -> list[Any]:
        bodies = [(*launched.split(), json.dumps(content).encode()) for launched, content in calls]
        return await asyncio.gather(*(heartbeats.record(*given) for given in bodies))

    views = asyncio.run(record_all())
    assert taken == [6]
    assert [view is not None for view in views] == [True, True, False, False, False, False]
    after = {launched: runs.row(database, launched.split()[0]) for launched in launches}
    changed = [before[launched] != after[launched] for launched in launches]
    assert changed == [True, True, False, False]
    for launched in launches[:2]:
        assert after[launched]["heartbeat_at"] > before[launched]["heartbeat_at"]
        assert after[launched] | {"heartbeat_at": 0.0} == before[launched] | {"heartbeat_at": 0.0}


def test_a_report_that_waits_too_long_counts_as_a_heartbeat_and_is_sent_again(
    anonymous: TestClient, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = launch(database)
    run_id = launched.split()[0]
    post(anonymous, launched, body(None))
    with database.writing() as session:
        find(session, Run, run_id).heartbeat_at -= 100.0  # type: ignore[operator]
    before = runs.row(database, run_id)
    monkeypatch.setattr(reports, "_WAIT_S", 0.05)
    state = anonymous.app.state  # type: ignore[attr-defined]
    gate, state.report_gate = state.report_gate, anyio.Semaphore(0)
    for secret, counts in ((f"{launched}x", False), (launched, True)):
        answer = post(anonymous, secret, body(1, metrics=[totals(1)]))
        assert (answer.status_code, "counts as a heartbeat" in answer.json()["detail"]) == (503, counts)
    state.report_gate = gate
    after = runs.row(database, run_id)
    assert after["heartbeat_at"] > before["heartbeat_at"] + 99.0
    assert after | {"heartbeat_at": 0.0} == before | {"heartbeat_at": 0.0}
    assert post(anonymous, launched, body(1, metrics=[totals(1)])).json()["applied"] is True


def test_only_the_present_launch_may_report(anonymous: TestClient, database: Database, token_for: Any) -> None:
    old = launch(database)
    post(anonymous, old, body(1, metrics=[totals(1)]))
    run_id = old.split()[0]
    new = launch(database, run_id, 2, RunState.RECOVERING)
    assert post(anonymous, old, body(2, metrics=[totals(2)], offsets={"metrics": 1})).status_code == 401
    assert post(anonymous, new, body(None, attempt=1)).status_code == 401, "token of launch 2, number of launch 1"
    assert post(anonymous, f"{run_id} {token_for('admin')}", body(None, 2)).status_code == 401
    assert runs.get(database, run_id).state == RunState.RECOVERING, "a refused call is no word of the trainer"
    answer = post(anonymous, new, body(None, 2))
    assert (answer.status_code, answer.json()["offsets"]["metrics"]) == (200, 1)
    # Batch numbers restart with each launch.
    assert post(anonymous, new, body(1, 2, offsets={"metrics": 1}, metrics=[totals(2, 2)])).json()["applied"] is True


def test_the_answer_carries_pause_and_cancel_requests(anonymous: TestClient, database: Database) -> None:
    launched = launch(database)
    run_id = launched.split()[0]
    post(anonymous, launched, body(None))
    runs.request(database, run_id, "pause", at=1.0)
    assert post(anonymous, launched, body(None)).json()["request"] == "pause"
    runs.request(database, run_id, "cancel", at=1.0)
    assert post(anonymous, launched, body(1, metrics=[totals(1)])).json()["request"] == "cancel"
    assert runs.get(database, run_id).state == RunState.CANCELLING, "a report does not withdraw a request"


@pytest.mark.parametrize(
    ("outcome", "state", "reason"),
    [
        ({"outcome": "succeeded", "ended_by": "steps"}, RunState.SUCCEEDED, "steps_done"),
        ({"outcome": "succeeded", "ended_by": "tokens"}, RunState.SUCCEEDED, "budget_reached"),
        ({"outcome": "failed", "reason": "diverged", "message": "loss is NaN"}, RunState.FAILED, "diverged"),
        ({"outcome": "failed", "reason": "boredom"}, RunState.FAILED, "training_error"),
        ({"outcome": "failed", "reason": "diverged", "message": "a\0b\ud800"}, RunState.FAILED, "diverged"),
    ],
)
def test_an_outcome_ends_the_run(
    anonymous: TestClient, database: Database, outcome: dict[str, Any], state: RunState, reason: str
) -> None:
    launched = launch(database)
    last = body(1, metrics=[totals(1)], outcome={"attempt": 1, **outcome})
    assert [post(anonymous, launched, last).status_code for _ in range(2)] == [200, 410]
    assert post(anonymous, "r00000000000000000000 secret", body(None)).status_code == 410
    run = runs.get(database, launched.split()[0])
    assert (run.state, run.reason, run.run_token_sha256, run.step) == (state, reason, None, 1)
    assert run.ended_at is not None


def test_an_outcome_of_an_earlier_launch_is_old_news(database: Database) -> None:
    launched = launch(database, number=2)
    assert send(database, launched, body(1, 2, outcome={"attempt": 1, "outcome": "failed"})).applied
    assert runs.get(database, launched.split()[0]).state == RunState.RUNNING


def test_one_event_says_that_a_run_makes_no_progress(anonymous: TestClient, database: Database) -> None:
    launched = launch(database)
    # Of time-outs of 30 and, for a look-ahead that takes long, 120 minutes; inf never ends.
    idle = [(0, 1800), (14, 1800), (15, 1800), (16, 1800), (0, 1800), (17, 7200), (60, 7200), (0, 7200), (99, math.inf)]
    for minutes, limit_s in idle:
        post(anonymous, launched, body(None) | {"phase": idle_phase("training", minutes, limit_s)})
    messages = [message for kind, message in runs.messages(database, launched.split()[0]) if kind == "no_progress"]
    assert messages == ["training, no progress for 15 of 30 min", "training, no progress for 60 of 120 min"]


@pytest.mark.each_database
def test_names_go_with_their_last_run_and_numbers_are_never_given_again(database: Database, tmp_path: Path) -> None:
    first, second = launch(database), launch(database)
    send(database, first, body(1, metrics=[metric_row(1, shared=1.0, **{f"own/{n}": 1.0 for n in range(5)})]))
    send(database, second, body(1, metrics=[metric_row(1, shared=2.0, replaced=1.0, last=1.0)]))
    # A later attempt replaces the step: the block is left, the summary is not.
    send(database, second, body(2, offsets={"metrics": 1}, metrics=[metric_row(1, 2, shared=3.0, last=1.0)]))
    admin = Principal("t0", "admin", Role.ADMIN)

    def delete(launched: str) -> None:
        runs.change(database, launched.split()[0], state=RunState.SUCCEEDED)
        with database.writing() as session:
            service.delete(session, find(session, Run, launched.split()[0], lock=True), admin)

    def collect(most: int = 100) -> int:
        with database.writing() as session:
            return metrics.delete_unused_names(session, most)

    def numbers() -> dict[str, int]:
        with database.reading() as session:
            return dict(session.execute(select(MetricName.name, MetricName.number)).all())

    before = numbers()
    assert collect() == 0
    delete(first)
    assert [collect(3), collect(3), collect(3)] == [3, 2, 0]
    assert numbers().keys() == {"shared", "replaced", "last"}
    delete(second)
    collect()
    kept = max(before, key=before.__getitem__)
    assert numbers() == {kept: before[kept]}, "the largest number"
    third = launch(database)
    send(database, third, body(1, metrics=[metric_row(1, **{"own/0": 4.0, "new": 5.0})]))
    after = numbers()
    assert min(after["own/0"], after["new"]) > max(before.values())
    assert runs.curve(database, third.split()[0], "own/0") == [(1, 4.0)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "artifacts" / "run"
    made.mkdir(parents=True)
    return made


def test_the_rest_of_the_files_and_the_outcome_are_read(database: Database, folder: Path) -> None:
    launched = launch(database)
    run_id = launched.split()[0]
    rows = [metric_row(step, a=float(step)) for step in range(1200)]
    send(database, launched, body(1, metrics=rows[:3]))
    write_lines(folder / "metrics.jsonl", rows)
    write_lines(folder / "samples.jsonl", [sample_row(1)])
    write_lines(folder / "evaluations.jsonl", [evaluation_row(1)])
    write_lines(folder / "events.jsonl", [event_row("finished", "done")])
    (folder / "run.json").write_text(json.dumps({"config": {"seed": 3}}))
    (folder / "outcome.json").write_text(
        json.dumps({"attempt": 1, "outcome": "failed", "reason": "diverged", "message": "NaN", "time": 1.0})
    )
    heartbeat = runs.get(database, run_id).heartbeat_at
    outcome = drain(database, run_id, folder, 1, 1)
    assert (outcome.outcome, outcome.reason, outcome.message) == ("failed", "diverged", "NaN")
    assert runs.curve(database, run_id, "a") == [(step, float(step)) for step in range(1200)]
    run = runs.get(database, run_id)
    assert run.offsets == {"metrics": 1200, "samples": 1, "evaluations": 1, "events": 1}
    assert (run.step, run.identity) == (1199, {"config": {"seed": 3}})
    assert run.state == RunState.RUNNING, "what the outcome leads to is the scheduler's to decide"
    assert run.heartbeat_at == heartbeat, "reading a file is no heartbeat"
    before = runs.row(database, run_id)
    assert drain(database, run_id, folder, 1, 1) == outcome
    assert runs.row(database, run_id) == before


def test_lines_that_a_power_cut_took_do_not_hide_those_of_the_next_launch(database: Database, folder: Path) -> None:
    """100 lines were received, 85 and a torn one are on disk: the next launch's lines count from 86 on."""
    launched = launch(database)
    run_id = launched.split()[0]
    rows = [metric_row(step, a=float(step)) for step in range(1, 101)]
    send(database, launched, body(1, metrics=rows, samples=[sample_row(1)]))
    write_lines(folder / "metrics.jsonl", rows[:85])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"attempt": 1, "st')
    assert drain(database, run_id, folder, 1, 1) is None
    launch(database, run_id, number=2)
    forget_lost_lines(database, run_id, folder, 2, 2)
    assert runs.get(database, run_id).offsets["metrics"] == 85
    assert runs.get(database, run_id).offsets["samples"] == 0, "this file is gone altogether"
    messages = [message for kind, message in runs.messages(database, run_id) if kind == "lines_lost"]
    assert messages[0] == "metrics.jsonl holds 85 lines of the 100 that were received"
    # The second attempt resumes at the checkpoint of step 80.
    repeated = [metric_row(step, attempt=2, a=-float(step)) for step in range(81, 111)]
    write_lines(folder / "metrics.jsonl", rows[:85] + repeated)
    drain(database, run_id, folder, 2, 2)
    expected = [(step, float(step)) for step in range(1, 81)] + [(step, -float(step)) for step in range(81, 111)]
    assert runs.curve(database, run_id, "a") == expected
    assert runs.get(database, run_id).offsets["metrics"] == 115
    before = runs.row(database, run_id)
    forget_lost_lines(database, run_id, folder, 2, 2)
    assert runs.row(database, run_id) == before, "nothing is missing"


def test_a_lost_folder_makes_no_attempt_of_a_number_that_was_received(
    client: TestClient, database: Database, folder: Path
) -> None:
    """Else rows of the dead attempt 2 would replace those of the new one, and its samples would be added to them."""
    samples = [{"group": number, "sample": 0} for number in range(4)]
    run_id = runs.add_run(database)
    for number, steps in ((1, range(1, 61)), (2, range(51, 121))):
        launched, before = launch(database, run_id, number), runs.get(database, run_id).offsets
        rows = {
            "metrics": [metric_row(step, number, a=1.0) for step in steps],
            "samples": [sample_row(60, number, **sample) for sample in samples],
        }
        send(database, launched, body(1, number, offsets=before, **rows))
    launch(database, run_id, number=3)
    forget_lost_lines(database, run_id, folder, 3, 3)
    prepare(folder, runs.get(database, run_id), url="http://127.0.0.1:1", token="t")
    assert json.loads((folder / "service.json").read_text())["after"] == 2
    attempt = next_attempt(folder, None, after=take_service(folder / "service.json").after)
    assert attempt == 3
    write_lines(folder / "metrics.jsonl", [metric_row(step, attempt, a=2.0) for step in range(1, 101)])
    write_lines(folder / "samples.jsonl", [sample_row(60, attempt, **sample) for sample in samples])
    drain(database, run_id, folder, 3, 3)
    run = runs.get(database, run_id)
    assert (run.attempt, run.step) == (3, 100)
    assert runs.curve(database, run_id, "a") == [(step, 2.0) for step in range(1, 101)]
    assert len(client.get(f"/api/v1/runs/{run_id}/samples", params={"step": 60}).json()["items"]) == 4


def test_only_the_outcome_of_this_launch_counts(database: Database, folder: Path) -> None:
    run_id = launch(database, number=2).split()[0]
    assert drain(database, run_id, folder, 2, 2) is None
    for content in ('{"attempt": 1, "outcome": "failed"}', '{"attempt": 2', '{"attempt": 2, "outcome": "?"}', "[]"):
        (folder / "outcome.json").write_text(content)
        assert drain(database, run_id, folder, 2, 2) is None
    (folder / "outcome.json").write_text('{"attempt": 2, "outcome": "paused"}')
    outcome = drain(database, run_id, folder, 2, 2)
    assert outcome.outcome == "paused"


def test_a_link_in_the_folder_leads_nowhere(database: Database, folder: Path, tmp_path: Path) -> None:
    run_id = launch(database).split()[0]
    write_lines(tmp_path / "metrics.jsonl", [metric_row(1, a=1.0)])
    (tmp_path / "outcome.json").write_text('{"attempt": 1, "outcome": "succeeded"}')
    for name in ("metrics.jsonl", "outcome.json"):
        (folder / name).symlink_to(tmp_path / name)
    assert drain(database, run_id, folder, 1, 1) is None
    assert runs.get(database, run_id).offsets == {}


def test_a_scheduler_without_the_lease_reads_nothing(database: Database, folder: Path) -> None:
    run_id = launch(database, number=2).split()[0]
    write_lines(folder / "metrics.jsonl", [metric_row(1, a=1.0)])
    for number, lease_token in ((2, 1), (1, 2)):
        with pytest.raises(StateChanged):
            drain(database, run_id, folder, number, lease_token)
    with pytest.raises(StateChanged):
        drain(database, "r00000000000000000000", folder, 1, 1)
    assert runs.get(database, run_id).offsets == {}


def test_an_unusable_line_is_skipped_and_reported_but_at_the_end_awaits_the_next_launch(
    database: Database, folder: Path
) -> None:
    run_id = launch(database).split()[0]
    good = [json.dumps(metric_row(step, a=float(step))) for step in range(4)]
    lines = [good[0], "what?", good[1], json.dumps(metric_row(-1)), '{"attempt": 1, "x": "\\u0000"}', good[2]]
    whole = "\n".join(lines) + "\n"
    (folder / "metrics.jsonl").write_text(whole + '{"attempt": 1, "st\n' + '{"attempt": 1')
    drain(database, run_id, folder, 1, 1)
    assert runs.curve(database, run_id, "a") == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert runs.get(database, run_id).offsets["metrics"] == 6
    (reported,) = [message for kind, message in runs.messages(database, run_id) if kind == "lines_left_out"]
    assert reported.startswith("metrics.jsonl, line 2: is not valid JSON")
    assert reported.endswith("and 2 more")
    # The next launch cuts the end off and writes on from there.
    (folder / "metrics.jsonl").write_text(whole + json.dumps(metric_row(3, 2, a=3.0)) + "\n")
    drain(database, run_id, folder, 1, 1)
    assert runs.curve(database, run_id, "a") == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)]


def test_a_line_without_an_end_does_not_fill_the_memory(database: Database, folder: Path) -> None:
    run_id = launch(database).split()[0]
    long = '{"x": "' + "y" * (9 * 1024 * 1024) + '"}'
    good = json.dumps(metric_row(0, a=1.0))
    (folder / "metrics.jsonl").write_text(f"{long}\n{good}\n{long}")
    drain(database, run_id, folder, 1, 1)
    assert runs.get(database, run_id).offsets["metrics"] == 2
    assert runs.curve(database, run_id, "a") == [(0, 1.0)]


def test_reading_files_while_the_trainer_sends_doubles_nothing(database: Database, folder: Path) -> None:
    launched = launch(database)
    run_id = launched.split()[0]
    rows = [metric_row(step, a=float(step)) for step in range(2000)]
    events = [event_row("step", str(step)) for step in range(2000)]
    write_lines(folder / "metrics.jsonl", rows)
    write_lines(folder / "events.jsonl", events)
    together = threading.Barrier(2)

    def trainer() -> None:
        together.wait()
        for number, begin in enumerate(range(0, 2000, 100), start=1):
            part = slice(begin, begin + 100)
            offsets = {"metrics": begin, "events": begin}
            send(database, launched, body(number, offsets=offsets, metrics=rows[part], events=events[part]))

    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(trainer)
        together.wait()
        drain(database, run_id, folder, 1, 1)
        sent.result()
    assert runs.curve(database, run_id, "a") == [(step, float(step)) for step in range(2000)]
    reported = [message for kind, message in runs.messages(database, run_id) if kind == "step"]
    assert reported == [str(step) for step in range(2000)]
