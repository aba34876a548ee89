"""Comparability of evaluation records: rows of evaluations.jsonl and of `gxpo eval --out`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gxpo_trainer.config.environment import SINGLE_TURN

_CONDITIONS = (
    ("benchmark", "the benchmarks differ"),
    ("data_sha256", "the problems, golds or rules differ"),
    ("problem_ids", "not the same problems in the same order"),
    ("template", "the prompt templates differ"),
    ("sampling.temperature", "the temperatures differ"),
    ("sampling.max_new_tokens", "the longest responses differ"),
    ("versions", "the graders differ"),
)


def incomparable(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Reasons why the pass@1 of two records is not comparable; empty if it is.

    A condition missing from a record is a reason; only `environment` is recorded just where there is one. pass@k for
    larger k also requires equal `samples_per_prompt`.
    """
    reasons = []
    for path, words in _CONDITIONS:
        values = [_at(record, path) for record in (first, second)]
        if None in values:
            reasons.append(f"{path} is not recorded on both sides")
        elif values[0] != values[1]:
            reasons.append(f"{words} ({path}: {_short(values[0])} and {_short(values[1])})")
    environments = [record.get("environment", SINGLE_TURN) for record in (first, second)]
    if environments[0] != environments[1]:
        reasons.append(f"the environments differ ({_short(environments[0])} and {_short(environments[1])})")
    return reasons


def _at(record: Mapping[str, Any], path: str) -> Any:
    value: Any = record
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _short(value: Any) -> str:
    text = f"{len(value)} entries" if isinstance(value, list) else str(value)
    return text if len(text) <= 60 else text[:57] + "…"
