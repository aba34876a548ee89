"""Records of the service as tables: runs, plans and turns of a response. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import pandas as pd

from gxpo_client import formats
from gxpo_client.formats import NONE
from gxpo_dashboard.labels import NO_HEARTBEAT, STATE_COLORS, STATES
from gxpo_dashboard.view_models.series import number

Json = Mapping[str, Any]

METRIC, SETTING = "metric:", "config:"
"""Prefixes of further columns: last value of a metric, and a setting of the config."""


@dataclass(frozen=True, slots=True)
class Column:
    """kind: how the browser shows it. order: what the service orders by, empty for none."""

    label: str
    kind: str = "text"
    order: str = ""
    help: str = ""


COLUMNS = {
    "name": Column("Name", "name", "name"),
    "state": Column("State", "chips", "state"),
    "rule": Column("Rule", order="rule"),
    "progress": Column("Progress", "progress"),
    "score": Column("Accuracy", "number", "score", "Latest macro average of pass@1."),
    "difference": Column("Δ baseline", "number", help="Percentage points to the pinned run on the same benchmarks."),
    "reward": Column("Reward", "number", "metric:reward/mean", "Latest mean reward."),
    "trend": Column("Trend", "picture", help="Reward so far, each on its own scale."),
    "passes": Column("Backward passes", order="backward_passes", help="Backward passes, of the budget."),
    "left": Column("Time left", help="Estimated from the pace so far."),
    "model": Column("Model", order="model"),
    "seed": Column("Seed", "number", "seed"),
    "tags": Column("Tags", "chips"),
    "best": Column("Best", "number", "score_best"),
    "step": Column("Step", "number", "step"),
    "training": Column("Training time", order="training_s"),
    "tokens": Column("Tokens", order="tokens"),
    "created": Column("Created", "time", "created_at"),
    "updated": Column("Changed", "time", "updated_at"),
    "by": Column("By", order="created_by"),
    "group": Column("Group"),
    "reason": Column("Reason", order="reason"),
    "id": Column("Id"),
}
DEFAULTS = ("name", "state", "rule", "progress", "score", "difference", "trend", "passes", "left", "model", "tags")
"""Columns of the table at first."""
ORDERED = {column.order: name for name, column in COLUMNS.items() if column.order}
"""What the service orders by → the column that shows it; a column of a metric is itself an order."""
_EMPTY: tuple[Any, ...] = (None, "", NONE, [])
_CHIPS = {STATES[state]: color for state, color in STATE_COLORS.items()} | {NO_HEARTBEAT: "orange"}


def column(name: str) -> Column:
    """A column; `config:learner.rule.k` has the label `learner.rule.k`."""
    if name.startswith(METRIC):
        return Column(name.removeprefix(METRIC), "number", name)
    return COLUMNS.get(name) or Column(name.removeprefix(SETTING))


def further(columns: Iterable[str], prefix: str) -> list[str]:
    """Metrics or settings among the columns."""
    return [name.removeprefix(prefix) for name in columns if name.startswith(prefix)]


def filled(rows: Sequence[Json], columns: Sequence[str], always: Sequence[str]) -> list[str]:
    """The columns that have a value in any row, and some always."""
    return [name for name in columns if name in always or any(row.get(name, NONE) not in _EMPTY for row in rows)]


def _text(value: Any) -> str:
    """A setting or the value of a metric; a dash for none."""
    if value is None or value != value:
        return NONE
    return formats.figure(value) if formats.known(value) else value if isinstance(value, str) else json.dumps(value)


def time_left(run: Json) -> str:
    """Time left as text; the queue position for a queued run."""
    progress = run.get("progress") or {}
    if (place := progress.get("queue_position")) is not None:
        return f"queue: {place}"
    return formats.duration(progress.get("seconds_left"))


def cells(run: Json, *, baseline: Json | None = None, trend: tuple[str, str] | None = None) -> dict[str, Any]:
    """Column → cell of a run as the browser shows it: numbers as text with a true minus, states and tags with their
    colour, times in seconds since 1970, and a dash for what is missing. trend: address and text of a picture."""
    progress = run.get("progress") or {}
    pinned = baseline or {}
    own, other = (sorted(one.get("benchmarks") or ()) for one in (run, pinned))
    difference = 100 * (number(run.get("score")) - number(pinned.get("score") if own == other else None))
    passes, budget = progress.get("backward_passes"), progress.get("backward_passes_budget")
    state = str(run["state"])
    states = [STATES.get(state, state), *([NO_HEARTBEAT] if run.get("silent_s") else [])]
    return {
        **{name: run.get(name) or NONE for name in ("model", "group", "reason", "id")},
        "name": run["name"],
        "state": [[text, _CHIPS.get(text, "gray")] for text in states],
        "rule": run.get("rule_label") or run["rule"],
        # A bar, perhaps a full one, would look like success.
        "progress": [100 * number(progress.get("fraction") or 0.0), state not in ("failed", "cancelled")],
        "score": formats.percent(run.get("score")),
        "difference": formats.signed(difference, 1) if formats.known(difference) else NONE,
        "reward": formats.significant(number(run.get("reward"))),
        "trend": trend,
        "passes": formats.count(passes) + (f" of {formats.count(budget)}" if formats.known(budget) else ""),
        "left": time_left(run),
        "seed": str(run["seed"]),
        "tags": [[tag, "gray"] for tag in run.get("tags") or ()],
        "best": formats.percent(run.get("score_best")),
        "step": formats.count(progress.get("steps")),
        "training": formats.duration(progress.get("training_s")),
        "tokens": formats.count(progress.get("tokens")),
        "created": run.get("created_at"),
        "updated": run.get("updated_at"),
        "by": run.get("created_by") or NONE,
        **{METRIC + name: _text(number(value)) for name, value in (run.get("metrics") or {}).items()},
        **{SETTING + path: _text(value) for path, value in (run.get("settings") or {}).items()},
    }


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


def sweep_words(runs: Sequence[Json], seeds: int, plan: Json | None, *, by_passes: bool = True) -> str:
    """`3 settings × 1 seed = 3 runs, about 8 min one after another`.

    plan: of a run with the base settings, if any. A run takes as long as a run of its rule there; with as many passes,
    if these alone end it (by_passes).
    """
    words = f"{formats.number_of(len(runs) // seeds, 'setting')} × {formats.number_of(seeds, 'seed')} = "
    words += formats.number_of(len(runs), "run")
    rules = {rule["label"]: rule for rule in (plan or {}).get("rules", ())}
    own = next((rule for rule in rules.values() if rule["own"] and rule["hours"] is not None), None)
    if own is None:
        return words
    each = [(run["backward_passes"], rules.get(run["rule_label"], own)) for run in runs]
    hours = sum(rule["hours"] * (passes / rule["backward_passes"] if by_passes else 1.0) for passes, rule in each)
    return f"{words}, about {formats.duration(3600 * hours)} one after another"


def time_table(plan: Json) -> pd.DataFrame:
    """One row a rule, the run's own marked: seconds of a step and the cost of the budget."""
    rows = [
        {
            "Rule": rule["label"] + (" (this run)" if rule["own"] else ""),
            "Sampling": formats.duration(rule["seconds"]["sampling"]),
            "Update": formats.duration(rule["seconds"]["passes"] + rule["seconds"]["look_ahead"]),
            "Step": formats.duration(rule["seconds"]["step"]),
            "Backward passes": formats.count(rule["backward_passes"]),
            "Total": NONE if rule["hours"] is None else formats.duration(3600 * rule["hours"]),
            "GPU hours": formats.figure(rule["gpu_hours"]),
        }
        for rule in plan["rules"]
    ]
    return pd.DataFrame(rows, dtype="str")


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
    own, length = formats.count(item["sampled_length"]), formats.count(item["length"])
    facts = [ENDS.get(item["end"], item["end"]), f"{own} of {length} tokens by the policy"]
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
