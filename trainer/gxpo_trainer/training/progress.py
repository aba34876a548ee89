"""Progress display of a run: a live bar on a terminal, one plain line per step elsewhere.

A closed or full stream disables the display and never ends the run. It writes to stderr, so that stdout is free for
results; on a terminal, other output of the process appears above the bar.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column
from rich.text import Text

from gxpo_trainer.compare.evidence import hours
from gxpo_trainer.config import BudgetConfig

_WINDOW = 20
"""Steps that the pace is computed over: a run becomes faster when its gate switches the look-ahead off."""


class TrainingProgress:
    """Reward, z-score, backward passes and time left, from the metric rows of the run.

    budget: the bounds of the run; the share done is that of the bound nearest to its end, and the time left follows
    from the pace of the last steps in the rows (`time/elapsed_s`), so no clock is read here. stream: stderr by default.
    live: forces (True) or forbids (False) the bar.
    """

    def __init__(
        self,
        budget: BudgetConfig,
        *,
        name: str = "train",
        warm_steps: int = 0,
        stream: TextIO | None = None,
        live: bool | None = None,
    ) -> None:
        self._budget, self._warm_steps = budget, warm_steps
        self._name = name
        self._stream: TextIO | None = stream if stream is not None else sys.stderr
        self._pace: deque[tuple[float, float]] = deque(maxlen=_WINDOW)
        self._progress: Progress | None = None
        console = Console(file=self._stream, force_terminal=live, highlight=False)
        if console.is_terminal and not console.is_dumb_terminal and live is not False:
            width = 24 if console.width >= 110 else 10
            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=width, table_column=Column(min_width=width)),
                TextColumn("{task.fields[line]}", markup=False),
            )
            # Refreshed by updates only: a refresh thread would take CPU time from the sampler.
            self._progress = Progress(*columns, console=console, auto_refresh=False)
            self._task = self._progress.add_task(name, total=1.0, line="starting")

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._guarded(self._progress.start)
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._guarded(self._progress.stop)

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished step; missing metrics are omitted."""
        warm = step <= self._warm_steps
        # A warm start counts as a part of its own, with a bound in steps.
        budget = BudgetConfig(steps=self._warm_steps) if warm else self._budget
        if step == self._warm_steps + 1:
            self._pace.clear()
        step -= 0 if warm else self._warm_steps
        done = share_done(budget, step, metrics)
        line = ("warm start " if warm else "") + describe(budget, step, metrics, self._time_left(done, metrics))
        if self._progress is None:
            self._write_line(f"{self._name}: {line}")
            return
        self._guarded(self._progress.update, self._task, completed=done, line=line, refresh=True)

    def message(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._progress is None:
            self._write_line(f"{self._name}: {text}")
            return
        self._guarded(self._progress.console.print, Text(text))

    def _time_left(self, done: float, metrics: Mapping[str, float]) -> float | None:
        elapsed = metrics.get("time/elapsed_s")
        if elapsed is None:
            return None
        self._pace.append((elapsed, done))
        first_elapsed, first_done = self._pace[0]
        if done <= first_done:
            return None
        return max(0.0, (elapsed - first_elapsed) * (1 - done) / (done - first_done))

    def _write_line(self, text: str) -> None:
        line = " ".join(text.split("\n")) + "\n"
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._guarded(print, line.encode(encoding, "replace").decode(encoding), end="", file=self._stream, flush=True)

    def _guarded(self, action: Callable[..., object], *args: object, **options: object) -> None:
        """Run a display action; a closed or full stream ends the display, not the run."""
        if self._stream is None:
            return
        try:
            action(*args, **options)
        except (OSError, ValueError):
            self._stream = None


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
        parts.append(f"left {hours(left_s / 3600)}")
    scores = [name for name in metrics if name.startswith("eval/") and name.endswith("/pass@1")]
    average = "eval/average/pass@1" if "eval/average/pass@1" in metrics else next(iter(scores), None)
    if average is not None:
        parts.append(f"accuracy {metrics[average]:.3f}")
    return "  ".join(parts)
