"""What the soak does to files and clocks, and how it judges."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.async_simulation import Measured, Simulation
from benchmarks.faults import Clock, Fault, cut_after
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
    second = first | {"problems": ["one"], "longest step in s": 1.5, "faults": ["api killed | 60.0 | 12.0 | "]}
    lines = report([first, second]).splitlines()
    assert lines[0] == "4 faults, 2 of them two at a time, in 2 parts and 41 minutes: 1 problems"
    assert {"PROBLEM: one", "runs: 4", "steps: 160", "alerts that fired: GxpoServerErrors"} <= set(lines)
    assert "longest step, in seconds of training time: 2.5" in lines
    assert [line.split() for line in lines[-2:]] == [
        ["3", "9.5", "12.0", "60", "api", "killed"],
        ["1", "–", "clock", "moved"],
    ]


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
