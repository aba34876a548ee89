"""What the soak does to files and clocks, and how it judges; what the other benchmarks count and say."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.postgres import NOT_INSTALLED

import benchmarks.__main__ as all_benchmarks
from benchmarks import agent_programs, grader, service
from benchmarks.async_simulation import Measured, Simulation
from benchmarks.faults import Clock, Fault, Faults, cut_after
from benchmarks.measure import mean, median, ratio, single
from benchmarks.soak import allowed_s, report


def test_a_file_is_cut_in_the_middle_of_the_first_row_of_a_later_step(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    rows = ['{"step": 1, "x": 0}\n', '{"step": 2, "x": 0}\n', '{"step": 3, "x": 0}\n', '{"step": 4, "x": 0}\n']
    file.write_text("".join(rows))
    cut_after(file, 4)
    assert file.read_text() == "".join(rows)
    cut_after(file, 2)
    assert file.read_text() == "".join(rows[:2]) + '{"step": 3'
    # What an earlier cut left is no row.
    cut_after(file, 1)
    assert file.read_text() == rows[0] + '{"step": 2'
    cut_after(tmp_path / "missing.jsonl", 0)
    assert not (tmp_path / "missing.jsonl").exists()


def test_the_clock_of_a_process_moves_while_it_runs(tmp_path: Path) -> None:
    clock = Clock(tmp_path, "host")
    asks = "import sys, time\nfor _ in sys.stdin: print(time.time(), flush=True)"
    words = [sys.executable, "-c", asks, "gxpo_trainer.cli"]
    with subprocess.Popen(words, env=os.environ | clock.env, stdin=-1, stdout=-1, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for offset in (3600.0, -3600.0, 0.0):
            clock.move(offset)
            before = time.time()
            print(file=process.stdin, flush=True)
            assert before <= float(process.stdout.readline()) - offset + 1e-3 <= time.time() + 1e-3
        process.stdin.close()


def test_two_faults_at_a_time_have_the_time_of_both_and_silence_counts_again() -> None:
    stopped, killed, moved = Fault("trainer stopped", 42.0), Fault("scheduler killed", 6.0), Fault("clock moved")
    assert allowed_s(stopped, None) == 42.0
    assert allowed_s(stopped, killed) == 42.0 + 6.0 + 42.0
    assert allowed_s(stopped, moved) == 42.0 + 20.0 + 42.0
    assert allowed_s(moved, killed) is None


def test_a_fault_finds_no_victim_while_the_database_does_not_answer() -> None:
    running = SimpleNamespace(is_running=lambda: True, poll=lambda: None)
    with socket.socket() as closed:  # does not listen
        closed.bind(("127.0.0.1", 0))
        faults = object.__new__(Faults)
        faults._second, faults._chance = SimpleNamespace(process=running), random.Random(0)
        faults._database = f"postgresql://gxpo@127.0.0.1:{closed.getsockname()[1]}/gxpo"
        faults._shares = {"database connections cut": (1, faults._cut_connections)}
        assert faults.inject() is None


def test_parts_add_up() -> None:
    first = {
        "minutes": 20.4,
        "problems": [],
        "totals": {"runs": 2, "steps": 80},
        "longest step in s": 2.5,
        "runs": {"strict": 2},
        "alerts": ["GxpoServerErrors"],
        "faults": [
            "api killed | 60.0 | 7.0 | ",
            "api killed | 60.0 | 9.0 | clock moved",
            "clock moved | None | 0.0 | api killed",
        ],
    }
    second = first | {"problems": ["one"], "longest step in s": 1.5, "alerts": None}
    second["faults"] = ["api killed | 60.0 | 12.0 | "]
    lines = report([first, second]).splitlines()
    assert lines[0] == "4 faults, 2 of them two at a time, in 2 parts and 41 minutes: 1 problems"
    assert {"PROBLEM: one", "runs: 4", "steps: 160"} <= set(lines)
    assert "alerts that fired in 1 part that Prometheus watched: GxpoServerErrors" in lines
    assert "longest step, in seconds of training time: 2.5" in lines
    assert [line.split() for line in lines[-2:]] == [
        ["3", "9.5", "12.0", "60", "api", "killed"],
        ["1", "–", "clock", "moved"],
    ]


# The other benchmarks.


def test_a_child_that_an_episode_left_is_counted() -> None:
    before = agent_programs.strays()
    with subprocess.Popen([sys.executable, "-c", agent_programs.STRAY]) as stray:
        try:
            assert agent_programs.strays() == before + 1
        finally:
            stray.kill()


def test_what_cannot_be_measured_is_said_and_the_rest_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    measured = []
    monkeypatch.setattr(grader, "DATA", tmp_path / "none")
    monkeypatch.setattr(service, "find_programs", lambda: None)
    monkeypatch.setitem(sys.modules, "benchmarks.rules", SimpleNamespace(main=lambda: measured.append("rules")))
    monkeypatch.setattr(sys, "argv", ["benchmarks", "grader", "service_load", "rules"])
    assert all_benchmarks.main() == 0
    no_data, no_programs = capsys.readouterr().err.splitlines()
    assert no_data.startswith(f"grader: nothing is measured: no data in {tmp_path / 'none'} for math500, ")
    assert no_programs == f"service_load: nothing is measured: {NOT_INSTALLED}"
    assert measured == ["rules"]


def test_an_interval_needs_three_values() -> None:
    assert single("s", 2.0, "s").line() == "  s: 2 s"
    assert median("m", [2.0, 2.0], "s", at_most=3).line() == "  m: 2 s  goal ≤ 3  met"
    assert median("m", [2.0] * 3, "s").line() == "  m: 2 s [2, 2]"
    assert ratio("r", [4.0] * 3, [2.0]).line() == "  r: 2 ×"
    assert mean("a", [1.0, 1.0, 4.0], "s", at_least=3).line().startswith("  a: 2 s [1, ")


def test_the_documentation_has_the_sum_of_all_parts() -> None:
    docs = Path(__file__).resolve().parents[2] / "docs"
    parts = [json.loads(file.read_text(encoding="utf-8")) for file in sorted((docs / "soak").glob("*.json"))]
    text = (docs / "soak.txt").read_text(encoding="utf-8")
    assert len(parts) >= 4
    assert text == report(parts)
    assert text.splitlines()[0] in (docs / "benchmarks.md").read_text(encoding="utf-8")


# The simulation of utilization, against cases worked by hand.


# Four prompts of two samples, ten tokens each, all at once: 10 · (0.01 + 8 · 0.01) = 0.9 s of sampling.
EQUAL = Measured(0.01, 0.01, 0.5, 0.1, [10], [0.0], prompts=4, samples=2, max_num_seqs=8)


def test_a_strict_step_is_the_sum_of_its_parts() -> None:
    result = Simulation(EQUAL, 3, 0).run(6)
    assert result.step_s == pytest.approx(0.9 + 0.5 + 0.1)
    assert result.engines == pytest.approx(0.9 / 1.5)
    assert result.learner == pytest.approx(0.6 / 1.5)
    assert result.staleness == 0


@pytest.mark.parametrize("in_flight", [False, True])
def test_one_step_ahead_a_step_is_the_longer_of_its_parts(in_flight: bool) -> None:
    result = Simulation(EQUAL, 3, 1, in_flight=in_flight).run(9)
    assert result.step_s == pytest.approx(0.9 + 0.1)
    assert result.engines == pytest.approx(0.9)
    assert result.staleness == 1


def test_in_flight_updates_hide_the_longest_responses() -> None:
    tailed = Measured(0.01, 0.0, 0.1, 0.01, [*[10] * 15, 100], [0.0], prompts=8, samples=2, max_num_seqs=16)
    strict, waiting, flying = (
        Simulation(tailed, 4, depth, in_flight=in_flight).run(40)
        for depth, in_flight in ((0, False), (2, False), (2, True))
    )
    assert flying.step_s < waiting.step_s < strict.step_s
