"""Runs as rows of a table. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from gxpo_client.formats import count, duration, known, moment
from gxpo_dashboard.text.labels import state_word
from gxpo_dashboard.view_models.series import number

Json = Mapping[str, Any]

COLUMNS: dict[str, str] = {
    "name": "Name",
    "state": "State",
    "rule": "Rule",
    "progress": "Progress",
    "score": "Accuracy",
    "difference": "Δ baseline",
    "reward": "Reward",
    "trend": "Trend",
    "passes": "Backward passes",
    "left": "Time left",
    "model": "Model",
    "seed": "Seed",
    "tags": "Tags",
    "best": "Best",
    "step": "Step",
    "training": "Training time",
    "tokens": "Tokens",
    "created": "Created",
    "by": "By",
    "group": "Group",
    "reason": "Reason",
    "id": "Id",
}
SHOWN = ("name", "state", "rule", "progress", "score", "difference", "trend", "passes", "left", "model", "tags")
"""Default columns."""


def runs_table(
    runs: Sequence[Json], *, baseline: Json | None = None, trends: Mapping[str, Sequence[float]] | None = None
) -> pd.DataFrame:
    """One row per run. Accuracies in percent, differences in percentage points; missing values are NaN."""
    rows = [_row(run, baseline, (trends or {}).get(run["id"])) for run in runs]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def passes_used(progress: Json) -> str:
    """`37 of 90`, or `37` without a budget in backward passes."""
    used, budget = count(number(progress.get("backward_passes"))), progress.get("backward_passes_budget")
    return f"{used} of {count(number(budget))}" if known(budget) else used


def time_left(run: Json) -> str:
    """Time left as text; the queue position for a queued run."""
    progress = run.get("progress") or {}
    if (place := progress.get("queue_position")) is not None:
        return f"queue: {place}"
    return duration(progress.get("seconds_left"))


def _row(run: Json, baseline: Json | None, trend: Sequence[float] | None) -> list[Any]:
    progress = run.get("progress") or {}
    score, reference = number(run.get("score")), number((baseline or {}).get("score"))
    return [
        run["name"],
        state_word(run["state"]),
        run.get("rule_label") or run["rule"],
        100 * number(progress.get("fraction") or 0.0),
        100 * score,
        100 * (score - reference),
        100 * number(run.get("reward")),
        list(trend or []),
        passes_used(progress),
        time_left(run),
        run["model"],
        run["seed"],
        list(run.get("tags") or []),
        100 * number(run.get("score_best")),
        progress.get("steps"),
        duration(progress.get("training_s")),
        count(number(progress.get("tokens"))),
        moment(run.get("created_at")),
        run.get("created_by"),
        run.get("group"),
        run.get("reason"),
        run["id"],
    ]
