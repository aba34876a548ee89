"""Files of a dead trainer are ingested exactly once by the scheduler that holds the run."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from support import queued_runs as runs
from support.reporting import body, evaluation_row, event_row, launch, metric_row, sample_row, send, write_lines

from gxpo_services.db.database import Database
from gxpo_services.ingest.drain import drain, forget_lost_lines
from gxpo_services.run_states import RunState
from gxpo_services.runs.lifecycle import StateChanged


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
    assert outcome is not None
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


def test_only_the_outcome_of_this_launch_counts(database: Database, folder: Path) -> None:
    run_id = launch(database, number=2).split()[0]
    assert drain(database, run_id, folder, 2, 2) is None
    for content in ('{"attempt": 1, "outcome": "failed"}', '{"attempt": 2', '{"attempt": 2, "outcome": "?"}', "[]"):
        (folder / "outcome.json").write_text(content)
        assert drain(database, run_id, folder, 2, 2) is None
    (folder / "outcome.json").write_text('{"attempt": 2, "outcome": "paused"}')
    outcome = drain(database, run_id, folder, 2, 2)
    assert outcome is not None
    assert outcome.outcome == "paused"


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


def test_a_link_in_the_folder_leads_nowhere(database: Database, folder: Path, tmp_path: Path) -> None:
    run_id = launch(database).split()[0]
    write_lines(tmp_path / "outside.jsonl", [metric_row(1, a=1.0)])
    (folder / "metrics.jsonl").symlink_to(tmp_path / "outside.jsonl")
    (tmp_path / "outcome.json").write_text('{"attempt": 1, "outcome": "succeeded"}')
    (folder / "outcome.json").symlink_to(tmp_path / "outcome.json")
    assert drain(database, run_id, folder, 1, 1) is None
    assert runs.get(database, run_id).offsets == {}


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

    thread = threading.Thread(target=trainer)
    thread.start()
    together.wait()
    drain(database, run_id, folder, 1, 1)
    thread.join()
    assert runs.curve(database, run_id, "a") == [(step, float(step)) for step in range(2000)]
    reported = [message for kind, message in runs.messages(database, run_id) if kind == "step"]
    assert reported == [str(step) for step in range(2000)]
