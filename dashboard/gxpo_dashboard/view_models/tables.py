"""Records of the service as tables: runs and means over seeds, plans and turns of a response. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

import pandas as pd

from gxpo_client import formats
from gxpo_dashboard.labels import NO_HEARTBEAT, STATE_COLORS, STATES
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
    "updated": "Changed",
    "by": "By",
    "group": "Group",
    "reason": "Reason",
    "id": "Id",
}
DEFAULTS = ("name", "state", "rule", "progress", "score", "difference", "trend", "passes", "left", "model", "tags")
"""Columns of the table at first."""
ORDERS = {
    **{name: name for name in ("name", "state", "rule", "score", "model", "seed", "step", "tokens", "reason")},
    "best": "score_best", "reward": "metric:reward/mean", "passes": "backward_passes", "training": "training_s",
    "created": "created_at", "updated": "updated_at", "by": "created_by",
}  # fmt: skip
"""Column → what the service orders by; a column of a metric is itself an order."""
KINDS = {"name": "name", "state": "chips", "tags": "chips", "progress": "progress", "trend": "picture"}
KINDS |= dict.fromkeys(("created", "updated"), "time")
"""How the browser shows a column that is more than text or numbers."""
_CHIPS = {STATES[state]: color for state, color in STATE_COLORS.items()} | {NO_HEARTBEAT: "orange"}
_COSTS = ("backward_passes", "backward_passes_budget", "seconds_left", "training_s", "tokens")
METRIC, SETTING = "metric:", "config:"
"""Prefixes of further columns: last value of a metric, and a setting of the config."""
RUNS = "runs"
"""Column of the number of runs in a row of means."""


def column_label(name: str) -> str:
    """`config:learner.rule.k` → `learner.rule.k`."""
    return COLUMNS.get(name) or name.removeprefix(METRIC).removeprefix(SETTING)


def ordered_column(order: str) -> str:
    """The column that shows what an order compares."""
    return next((column for column, name in ORDERS.items() if name == order), order)


def further(columns: Iterable[str], prefix: str) -> list[str]:
    """Metrics or settings among the columns."""
    return [name.removeprefix(prefix) for name in columns if name.startswith(prefix)]


def filled(frame: pd.DataFrame, columns: Sequence[str], always: Sequence[str] = ("name", "state")) -> list[str]:
    """The columns that have a value in any row, and some always."""

    def is_missing(value: Any) -> bool:
        return not value if isinstance(value, list) else value is None or value in ("", formats.NONE) or value != value

    return [name for name in columns if name in always or not frame[name].map(is_missing).all()]


def configurations(runs: Sequence[dict[str, Any]], sections: Sequence[str]) -> list[list[dict[str, Any]]]:
    """Runs that differ in name and seed only, in order of their first run.

    sections: all parts of the config but name and seed, which the runs have as settings.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        own = json.dumps([run["settings"].get(part) for part in sections], sort_keys=True)
        groups.setdefault(own, []).append(run)
    return list(groups.values())


def ordered(groups: Sequence[list[dict[str, Any]]], sort: str, *, descending: bool) -> list[list[dict[str, Any]]]:
    """Groups by the mean of a numeric sort value, those without one last: by its best run, a group of many seeds would
    come before an equal one of few. Other orders stay that of the first runs."""

    def value(run: Json) -> float:
        values = {"backward_passes": run["progress"]["backward_passes"], "step": run["progress"]["steps"]}
        values |= {"score": run["score"], "score_best": run["score_best"]}
        values |= {METRIC + name: metric for name, metric in (run.get("metrics") or {}).items()}
        return number(values.get(sort))

    def place(group: Sequence[Json]) -> tuple[bool, float]:
        values = [mean for run in group if _is_averaged(run, group) and formats.known(mean := value(run))]
        return (False, (-1 if descending else 1) * fmean(values)) if values else (True, 0.0)

    numeric = sort in ("score", "score_best", "backward_passes", "step") or sort.startswith(METRIC)
    return sorted(groups, key=place) if numeric else list(groups)


def _is_averaged(run: Json, group: Sequence[Any]) -> bool:
    """Whether a run's figures are in the means of its group: runs that succeeded, and a single one in any state."""
    return len(group) == 1 or run["state"] == "succeeded"


def means(frame: pd.DataFrame, runs: Sequence[Json], groups: Sequence[Sequence[int]]) -> pd.DataFrame:
    """One row per group of row numbers: means of numbers, all words of lists, the common text or `various`.

    Means are over the runs that succeeded, and NaN without one; RUNS has their number.

    frame: the table of `runs`, whose costs are averaged before they are written out.
    """
    # The progress is that of all runs of a row.
    numeric = [name for name in frame if pd.api.types.is_numeric_dtype(frame[name]) and name != "progress"]
    results = [name for name in numeric if not name.startswith(SETTING)]
    rows = []
    for group in groups:
        members = [runs[position] for position in group]
        done = [position for position in group if _is_averaged(runs[position], group)]
        row = {name: _joint(frame[name].iloc[list(group)]) for name in frame} | {"name": members[0]["name"]}
        if len(group) > 1:
            row |= {name: frame[name].iloc[done].mean() for name in results}
            row |= _costs(_mean_progress([runs[position] for position in done]))
            row["name"] = members[0]["rule_label"]
        row["seed"] = ", ".join(str(seed) for seed in sorted(run["seed"] for run in members))
        rows.append(row | {RUNS: str(len(done)) if len(done) == len(group) else f"{len(done)} of {len(group)}"})
    return pd.DataFrame(rows, columns=[*frame, RUNS])


def _mean_progress(runs: Sequence[Json]) -> dict[str, float]:
    """The mean of what is known of each cost."""
    values = {name: [number((run.get("progress") or {}).get(name)) for run in runs] for name in _COSTS}
    known_values = {name: list(filter(formats.known, numbers)) for name, numbers in values.items()}
    return {name: fmean(numbers) for name, numbers in known_values.items() if numbers}


def _costs(progress: Json) -> dict[str, str]:
    """The columns that write out costs."""
    return {
        "passes": passes_used(progress),
        "left": formats.duration(progress.get("seconds_left")),
        "training": formats.duration(progress.get("training_s")),
        "tokens": formats.count(number(progress.get("tokens"))),
    }


def _joint(values: pd.Series) -> Any:
    if pd.api.types.is_numeric_dtype(values):
        return values.mean()
    if pd.api.types.is_datetime64_any_dtype(values):
        return values.max()
    first = values.iloc[0]
    if all(value == first for value in values):
        return first
    if not isinstance(first, list):
        return "various"
    return list(dict.fromkeys(item for value in values for item in value))


def runs_table(
    runs: Sequence[Json], *, baseline: Json | None = None, trends: Mapping[str, str] | None = None
) -> pd.DataFrame:
    """One row per run. Accuracies in percent, differences in percentage points, rewards as reported.

    Missing values are NaN. trends: addresses of pictures by run.
    """
    reference = number((baseline or {}).get("score"))
    rows = [_row(run, reference) | {"trend": (trends or {}).get(run["id"]) or None} for run in runs]
    frame = pd.DataFrame(rows, columns=list(COLUMNS))
    for name in dict.fromkeys(name for run in runs for name in run.get("metrics") or {}):
        frame[METRIC + name] = [number(run["metrics"].get(name)) for run in runs]
    for path in dict.fromkeys(path for run in runs for path in run.get("settings") or {}):
        frame[SETTING + path] = [_setting(run["settings"].get(path)) for run in runs]
    return frame


def _setting(value: Any) -> Any:
    """A setting as a cell: numbers stay numbers, booleans are words."""
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, list | dict) else value


def passes_used(progress: Json) -> str:
    """`37 of 90`, or `37` without a budget in backward passes."""
    used, budget = formats.count(number(progress.get("backward_passes"))), progress.get("backward_passes_budget")
    return f"{used} of {formats.count(number(budget))}" if formats.known(budget) else used


def time_left(run: Json) -> str:
    """Time left as text; the queue position for a queued run."""
    progress = run.get("progress") or {}
    if (place := progress.get("queue_position")) is not None:
        return f"queue: {place}"
    return formats.duration(progress.get("seconds_left"))


def _row(run: Json, reference: float) -> dict[str, Any]:
    """Column → cell, but for the trend. reference: accuracy of the baseline."""
    progress = run.get("progress") or {}
    score = number(run.get("score"))
    return {
        **{name: run.get(name) for name in ("model", "seed", "group", "reason", "id")},
        **_costs(progress),
        "name": str(run["name"]),
        "state": [STATES.get(run["state"], run["state"]), *([NO_HEARTBEAT] if run.get("silent_s") else [])],
        "rule": run.get("rule_label") or run["rule"],
        "progress": 100 * number(progress.get("fraction") or 0.0),
        "score": 100 * score,
        "difference": 100 * (score - reference),
        "reward": number(run.get("reward")),
        "left": time_left(run),
        "tags": list(run.get("tags") or []),
        "best": 100 * number(run.get("score_best")),
        "step": progress.get("steps"),
        "created": pd.to_datetime(run.get("created_at"), unit="s", utc=True),
        "updated": pd.to_datetime(run.get("updated_at"), unit="s", utc=True),
        "by": run.get("created_by"),
    }


def cells(frame: pd.DataFrame, columns: Sequence[str]) -> list[list[Any]]:
    """Rows of cells as the browser shows them: numbers as text with a true minus, states with their colour, times in
    seconds since 1970 or None, what is missing as a dash."""
    forms: dict[str, Callable[[Any], Any]] = {
        "score": lambda value: formats.percent(value / 100),
        "best": lambda value: formats.percent(value / 100),
        "difference": lambda value: formats.signed(value, 1),
        "reward": formats.significant,
        "step": lambda value: formats.count(round(value, 1)),
        "seed": lambda value: f"{value:.0f}",
    }

    def cell(kind: str, form: Callable[[Any], Any], value: Any) -> Any:
        if kind == "chips":
            return [[text, _CHIPS.get(text, "gray")] for text in value]
        if kind in ("time", "picture"):
            return None if pd.isna(value) else value.timestamp() if kind == "time" else value
        if value is None or value == "" or value != value:
            return formats.NONE
        return value if kind == "progress" else form(value)

    numeric = {name for name in columns if pd.api.types.is_numeric_dtype(frame[name])}
    kinds = [
        (name, KINDS.get(name, ""), (forms.get(name, formats.figure) if name in numeric else str)) for name in columns
    ]
    return [[cell(kind, form, row[name]) for name, kind, form in kinds] for row in frame.to_dict("records")]


def csv_file(frame: pd.DataFrame) -> bytes:
    """The table as CSV without formulas: names of runs are cells or column names."""
    escaped = frame.map(formats.literal).rename(columns=formats.literal)
    # Both characters in the line end: the writer quotes a text that contains one of its characters, and no other.
    text: str = escaped.to_csv(index=False, lineterminator="\r\n")
    return text.encode()


def verdict(plan: Json) -> str:
    """`Fits on 4 × h100-80.`, or the planner's sentence."""
    if not plan["fits"]:
        advice = str(plan["advice"])
        return f"{advice[:1].upper()}{advice[1:]}."
    if plan["device"] == "cpu":
        return "Planned for a host without GPUs."
    shared = "" if not plan["shared_devices"] else ", shared by learner and sampler"
    return f"Fits on {formats.count(plan['devices_needed'])} × {plan['device']}{shared}."


def sweep_words(runs: int, seeds: int, plan: Json | None) -> str:
    """`3 settings × 1 seed = 3 runs, about 8 min one after another`; plan: of a run with the base settings, if any."""
    words = f"{formats.number_of(runs // seeds, 'setting')} × {formats.number_of(seeds, 'seed')} = "
    words += formats.number_of(runs, "run")
    hours = next((rule["hours"] for rule in (plan or {}).get("rules", ()) if rule["own"]), None)
    return words if hours is None else f"{words}, about {formats.duration(3600 * hours * runs)} one after another"


def time_table(plan: Json) -> pd.DataFrame:
    """One row a rule, the run's own marked: seconds of a step and the cost of the budget."""
    rows = [
        {
            "Rule": rule["label"] + (" (this run)" if rule["own"] else ""),
            "Sampling": formats.duration(rule["seconds"]["sampling"]),
            "Update": formats.duration(rule["seconds"]["passes"] + rule["seconds"]["look_ahead"]),
            "Step": formats.duration(rule["seconds"]["step"]),
            "Backward passes": formats.count(rule["backward_passes"]),
            "Total": formats.NONE if rule["hours"] is None else formats.duration(3600 * rule["hours"]),
            "GPU hours": formats.figure(rule["gpu_hours"]),
        }
        for rule in plan["rules"]
    ]
    return pd.DataFrame(rows, dtype="str")


def memory_table(plan: Json) -> pd.DataFrame:
    """The parts of each phase, largest first, after the phase's sum and limit."""
    rows: list[tuple[str, ...]] = []
    for phase in plan["memory"]:
        limit = phase["limit_bytes"]
        total = formats.size(phase["needed_bytes"]) + (f" of {formats.size(limit)}" if limit else "")
        parts = sorted(phase["parts"], key=lambda part: -part["bytes"])
        rows += [(phase["phase"], "total", total), *(("", part["name"], formats.size(part["bytes"])) for part in parts)]
    return pd.DataFrame(rows, columns=["Phase", "Part", "Memory"], dtype="str")


SPEAKERS = {"policy": "Policy", "environment": "Environment"}
ENDS = {
    "done": "ended by the environment",
    "max_turns": "turn limit reached",
    "length": "token limit reached",
    "timeout": "environment timed out",
    "error": "environment failed",
}


def turn_rows(item: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Heading (speaker, number and reward) and untrusted text of the turns of a sample, in order; none for a response
    of a single turn."""
    rows, exchange = [], 0
    for turn in item.get("turns") or []:
        exchange += turn["speaker"] == "policy"
        reward = turn.get("reward")
        words = "" if reward is None else f", reward {formats.signed(reward)}"
        rows.append((f"{SPEAKERS.get(turn['speaker'], 'Unknown')}, turn {exchange}{words}", turn["text"]))
    return rows


def episode_facts(item: Mapping[str, Any]) -> str:
    """How the episode ended, what the policy wrote of it, and where its reward came from; empty for a single turn."""
    if item.get("end") is None:
        return ""
    rewarded = any(turn.get("reward") is not None for turn in item.get("turns") or [])
    source = "environment" if rewarded else "verifier"
    facts = [ENDS.get(item["end"], item["end"]), f"{item['sampled_length']} of {item['length']} tokens by the policy"]
    if branches := (item.get("extra") or {}).get("branches"):
        facts.append(f"{formats.number_of(branches + 1, 'row')} of tokens")
    return ", ".join([*facts, *([] if item.get("reward") is None else [f"reward from the {source}"])])


def worst_first(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Counts of groups of samples, those with the lowest share of correct answers first, then of the lowest reward."""
    return sorted(groups, key=lambda group: (group["correct"] / group["responses"], _known_reward(group)))


def answers(items: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Samples of a prompt with the same verdict and answer together: those of the lowest mean reward first, of equal
    ones the most frequent."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for item in items:
        groups.setdefault((item["verdict"], item["extracted"]), []).append(item)
    return sorted(groups.values(), key=lambda group: (fmean(map(_known_reward, group)), -len(group)))


def _known_reward(item: Json) -> float:
    """Its reward; the lowest of all where it has none."""
    reward = number(item["reward"])
    return reward if formats.known(reward) else -math.inf
