"""Progress: plain lines where there is no terminal, a bar where there is one, and never in the way."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import threading

import pytest

from gxpo_trainer.config import BudgetConfig
from gxpo_trainer.training.progress import TrainingProgress, describe, share_done

ROW = {
    "reward/mean": 0.3125,
    "gate/z": -0.414,
    "gate/active": 1.0,
    "update/backward_passes_total": 36.0,
    "time/elapsed_s": 50.0,
}


def test_without_a_terminal_each_step_is_one_plain_line() -> None:
    stream = io.StringIO()
    with TrainingProgress(BudgetConfig(steps=40, backward_passes=120), name="demo", stream=stream) as progress:
        progress.update(12, ROW)
        progress.update(13, ROW | {"time/elapsed_s": 52.0, "update/backward_passes_total": 39.0})
        progress.message("checkpoint\nat step 13")
    # BP bound nearest: 36/120 → 39/120 in 2 s, so 81 passes take 54 s.
    assert stream.getvalue() == (
        "demo: step 12/40  reward 0.312  z -0.41  passes 36/120\n"
        "demo: step 13/40  reward 0.312  z -0.41  passes 39/120  left 54 s\n"
        "demo: checkpoint at step 13\n"
    )


def test_a_warm_start_has_a_count_of_its_own() -> None:
    stream = io.StringIO()
    with TrainingProgress(BudgetConfig(steps=5), name="demo", warm_steps=2, stream=stream) as progress:
        progress.update(1, {"warm_start/loss": 2.5, "time/elapsed_s": 10.0, "update/backward_passes_total": 0.0})
        progress.update(2, {"warm_start/loss": 1.5, "time/elapsed_s": 11.0, "update/backward_passes_total": 0.0})
        progress.update(3, ROW)
        progress.update(4, ROW | {"time/elapsed_s": 52.0})
    assert stream.getvalue() == (
        "demo: warm start step 1/2  loss 2.500\n"
        "demo: warm start step 2/2  loss 1.500  left 0.0 s\n"
        "demo: step 1/5  reward 0.312  z -0.41  passes 36\n"
        "demo: step 2/5  reward 0.312  z -0.41  passes 36  left 6.0 s\n"
    )


def test_a_shut_gate_an_accuracy_and_unknown_values_are_described() -> None:
    row = {"gate/active": 0.0, "gate/shutoff_step": 9.0, "eval/b/pass@1": 0.5}
    assert describe(BudgetConfig(hours=2), 10, row, None) == "step 10  gate shut at 9  accuracy 0.500"


def test_length_and_what_went_wrong_are_described_without_shares_of_0() -> None:
    row = {"rollout/length_mean": 41.6, "rollout/truncated_fraction": 0.125, "verify/timeout_fraction": 0.001}
    assert describe(BudgetConfig(steps=9), 3, row, None) == "step 3/9  length 42  truncated 12%  failed verdicts <1%"
    row = dict.fromkeys(row, 0.0) | {"rollout/length_mean": 41.6}
    assert describe(BudgetConfig(steps=9), 3, row, None) == "step 3/9  length 42"


def test_the_bound_nearest_to_its_end_counts() -> None:
    budget = BudgetConfig(steps=100, backward_passes=40, hours=1, tokens=1000)
    row = {"update/backward_passes_total": 10.0, "time/training_s": 1800.0, "rollout/tokens_total": 100.0}
    assert share_done(budget, 10, row) == 0.5
    assert share_done(budget, 200, row) == 1.0


def test_the_pace_follows_the_last_steps() -> None:
    stream = io.StringIO()
    progress = TrainingProgress(BudgetConfig(steps=100), stream=stream)
    # 30 steps of 10 s, then 30 of 1 s: the window holds fast ones alone.
    elapsed = 0.0
    for step in range(1, 61):
        elapsed += 10.0 if step <= 30 else 1.0
        progress.update(step, {"time/elapsed_s": elapsed})
    assert stream.getvalue().splitlines()[-1].endswith("left 40 s")


def read_terminal(descriptor: int, into: list[bytes]) -> None:
    """Read until the other side is closed, which Linux reports as an error."""
    with contextlib.suppress(OSError):
        while data := os.read(descriptor, 65536):
            into.append(data)


def test_on_a_terminal_one_bar_is_redrawn_and_messages_stay_above(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    leader, follower = pty.openpty()
    parts: list[bytes] = []
    reader = threading.Thread(target=read_terminal, args=(leader, parts))
    reader.start()
    with (
        os.fdopen(follower, "w", encoding="utf-8") as stream,
        TrainingProgress(BudgetConfig(steps=40), name="demo", stream=stream) as progress,
    ):
        progress.update(1, ROW)
        progress.message("saved [bold]x[/bold]")
        progress.update(40, ROW)
    reader.join()
    os.close(leader)
    rendered = b"".join(parts).decode()
    assert "\x1b[2K" in rendered
    assert "step 40/40" in rendered
    assert "saved [bold]x[/bold]" in rendered


def test_a_closed_or_full_stream_silences_progress_and_nothing_else() -> None:
    stream = io.StringIO()
    progress = TrainingProgress(BudgetConfig(steps=4), stream=stream)
    stream.close()
    progress.update(1, ROW)
    with open("/dev/full", "w", encoding="utf-8") as full:  # noqa: PTH123 (a device, not a path of ours)
        progress = TrainingProgress(BudgetConfig(steps=4), stream=full)
        progress.update(1, ROW)
        progress.update(2, ROW)
        with pytest.raises(OSError, match="No space"):
            full.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())
