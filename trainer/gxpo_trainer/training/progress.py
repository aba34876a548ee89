"""Progress of a run in the terminal: one line per step.

A closed or full stream ends the display and never the run. It writes to stderr, so that stdout is free for results.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping
from typing import TextIO

from gxpo_client.formats import duration
from gxpo_trainer.config import BudgetConfig

_WINDOW = 20
"""Steps that the pace is computed over: a run becomes faster when its gate switches the look-ahead off."""


class TrainingProgress:
    """Reward, z-score, backward passes and time left, from the metric rows of the run.

    budget: the bounds of the run; the share done is that of the bound nearest to its end, and the time left follows
    from the pace of the last steps in the rows (`time/elapsed_s`), so no clock is read here. stream: stderr by default.
    """

    def __init__(
        self, budget: BudgetConfig, *, name: str = "train", warm_steps: int = 0, stream: TextIO | None = None
    ) -> None:
        self._budget, self._warm_steps = budget, warm_steps
        self._name = name
        self._stream: TextIO | None = stream if stream is not None else sys.stderr
        self._pace: deque[tuple[float, float]] = deque(maxlen=_WINDOW)

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished step; missing metrics are omitted."""
        warm = step <= self._warm_steps
        # A warm start counts as a part of its own, with a bound in steps.
        budget = BudgetConfig(steps=self._warm_steps) if warm else self._budget
        if step == self._warm_steps + 1:
            self._pace.clear()
        step -= 0 if warm else self._warm_steps
        if "gate/shutoff_step" in metrics:
            metrics = {**metrics, "gate/shutoff_step": metrics["gate/shutoff_step"] - self._warm_steps}
        done = share_done(budget, step, metrics)
        self.message(("warm start " if warm else "") + describe(budget, step, metrics, self._time_left(done, metrics)))

    def message(self, text: str) -> None:
        """Print a line; a closed or full stream ends the display, not the run."""
        line = f"{self._name}: " + " ".join(text.splitlines())
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        if self._stream is not None:
            try:
                print(line.encode(encoding, "replace").decode(encoding), file=self._stream, flush=True)
            except (OSError, ValueError):
                self._stream = None

    def _time_left(self, done: float, metrics: Mapping[str, float]) -> float | None:
        elapsed = metrics["time/elapsed_s"]
        self._pace.append((elapsed, done))
        first_elapsed, first_done = self._pace[0]
        if done <= first_done:
            return None
        return max(0.0, (elapsed - first_elapsed) * (1 - done) / (done - first_done))


def share_done(budget: BudgetConfig, step: int, metrics: Mapping[str, float]) -> float:
    """The largest share used of any bound, in [0, 1]: the first bound that is reached ends the run."""
    used = {
        "steps": float(step),
        "backward_passes": metrics.get("update/backward_passes_total", 0.0),
        "hours": metrics.get("time/training_s", 0.0) / 3600,
        "tokens": metrics.get("rollout/tokens_total", 0.0),
    }
    return min(1.0, max(used[name] / bound for name, bound in budget.bounds.items()))


def describe(budget: BudgetConfig, step: int, metrics: Mapping[str, float], left_s: float | None) -> str:
    """`step 12/40  reward 0.312  length 42  truncated 2%  z +0.41  passes 36/120  left 3 min 12 s`, ASCII, without what
    is unknown, and without shares of 0."""
    parts = [f"step {step}" + (f"/{budget.steps}" if budget.steps is not None else "")]
    for name in ("warm_start/loss", "policy/loss"):
        if name in metrics and "reward/mean" not in metrics:
            parts.append(f"loss {metrics[name]:.3f}")
    if "reward/mean" in metrics:
        parts.append(f"reward {metrics['reward/mean']:.3f}")
    if "rollout/length_mean" in metrics:
        parts.append(f"length {metrics['rollout/length_mean']:.0f}")
    failed = metrics.get("verify/timeout_fraction", 0.0) + metrics.get("verify/error_fraction", 0.0)
    shares = {"truncated": metrics.get("rollout/truncated_fraction", 0.0), "failed verdicts": failed}
    parts += [f"{name} " + ("<1%" if share < 0.01 else f"{share:.0%}") for name, share in shares.items() if share]
    if "gate/z" in metrics:
        parts.append(f"z {metrics['gate/z']:+.2f}")
    if "gate/shutoff_step" in metrics and metrics.get("gate/active", 0.0) == 0.0:
        parts.append(f"gate shut at {metrics['gate/shutoff_step']:.0f}")
    if "update/backward_passes_total" in metrics and "warm_start/loss" not in metrics:
        bound = f"/{budget.backward_passes}" if budget.backward_passes is not None else ""
        parts.append(f"passes {metrics['update/backward_passes_total']:.0f}{bound}")
    if left_s is not None:
        parts.append(f"left {duration(left_s)}")
    return "  ".join(parts)
