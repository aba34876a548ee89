"""The plan of a run as sentences and rows. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gxpo_client.formats import NONE, count, duration, figure, size

Json = Mapping[str, Any]

TIME_COLUMNS = ("Rule", "Sampling", "Update", "Step", "Backward passes", "Total", "GPU hours")
MEMORY_COLUMNS = ("Phase", "Part", "Memory")


def verdict(plan: Json) -> str:
    """`Fits on 4 × h100-80.`, or the planner's sentence."""
    if not plan["fits"]:
        advice = str(plan["advice"])
        return f"{advice[:1].upper()}{advice[1:]}."
    if plan["device"] == "cpu":
        return "Planned for a host without GPUs."
    shared = "" if not plan["shared_devices"] else ", shared by learner and sampler"
    return f"Fits on {count(plan['devices_needed'])} × {plan['device']}{shared}."


def time_rows(plan: Json) -> list[tuple[str, ...]]:
    """One row a rule, the run's own marked: seconds of a step and the cost of the budget."""
    rows: list[tuple[str, ...]] = []
    for rule in plan["rules"]:
        seconds = rule["seconds"]
        hours = rule["hours"]
        rows.append(
            (
                rule["label"] + (" (this run)" if rule["own"] else ""),
                duration(seconds["sampling"]),
                duration(seconds["passes"] + seconds["look_ahead"]),
                duration(seconds["step"]),
                count(rule["backward_passes"]),
                NONE if hours is None else duration(3600 * hours),
                NONE if rule["gpu_hours"] is None else figure(rule["gpu_hours"]),
            )
        )
    return rows


def memory_rows(plan: Json) -> list[tuple[str, ...]]:
    """The parts of each phase, largest first, after the phase's sum and limit."""
    rows: list[tuple[str, ...]] = []
    for phase in plan["memory"]:
        limit = phase["limit_bytes"]
        total = size(phase["needed_bytes"]) + (f" of {size(limit)}" if limit else "")
        rows.append((phase["phase"], "total", total))
        parts = sorted(phase["parts"], key=lambda part: -part["bytes"])
        rows += [("", part["name"], size(part["bytes"])) for part in parts]
    return rows


def cache_words(plan: Json) -> str:
    return f"The KV cache of a sampler holds {count(plan['kv_cache_sequences'])} sequences of mean length."
