"""From a run's folder to curves that can be compared, and from runs to groups of seeds. Free of torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gxpo_trainer.compare import EvaluationCurve, GateTrace, RunCurves, SeedGroup
from gxpo_trainer.errors import DataError
from gxpo_trainer.jsonl import Row
from gxpo_trainer.report import EVALUATIONS, read_evaluations, read_identity, read_metrics

_FREE = ("name", "seed", "learner.rule", "learner.optimizer.learning_rate", "budget", "checkpoint", "diagnostics")
"""Settings in which compared runs may differ: what is compared, and what no accuracy depends on."""
_SPEED = ("placement", "rollout.gpu_memory_utilization", "rollout.cpu_kv_cache_gib", "rollout.max_num_seqs")
"""Settings that decide hours, not accuracy."""
_PACKAGES = ("torch", "vllm", "deepspeed", "transformers", "peft", "math-verify")
_COSTS = {
    "backward_passes": "update/backward_passes_total",
    "hours": "time/training_s",
    "tokens": "rollout/tokens_total",
}
_FIELDS = {"backward_passes": "backward_passes_total", "hours": "training_s", "tokens": "tokens_total"}


def load_run(out_dir: Path, benchmark: str | None = None, metric: str = "pass@1") -> RunCurves:
    """Curves of one run from metrics.jsonl, evaluations.jsonl and run.json.

    benchmark: one by name; by default the only one, or the macro average of all of them, at the steps where
    all were evaluated. metric: a name in `scores`; per-problem scores are kept for pass@1 alone, since they
    are the share of correct responses. Raises DataError when the run has no such evaluation.
    """
    identity = read_identity(out_dir)
    evaluations = read_evaluations(out_dir)
    names = list(dict.fromkeys(row["benchmark"] for row in evaluations))
    if benchmark is not None and benchmark not in names:
        raise DataError(f"{out_dir / EVALUATIONS}: no evaluation of {benchmark!r}; it has {names or 'none at all'}")
    chosen = [benchmark] if benchmark is not None else names
    by_step: dict[int, dict[str, Row]] = {}
    for row in evaluations:
        if row["benchmark"] in chosen and metric in row["scores"]:
            by_step.setdefault(row["step"], {})[row["benchmark"]] = row
    complete = [rows for _, rows in sorted(by_step.items()) if len(rows) == len(chosen)]
    if not complete:
        raise DataError(f"{out_dir / EVALUATIONS}: no step has {metric} of {chosen or 'any benchmark'}")
    metrics = read_metrics(out_dir)
    return RunCurves(
        name=str(identity["config"]["name"]),
        rule=rule_label(identity["config"]),
        seed=int(identity["config"]["seed"]),
        curve=_curve([[rows[name] for name in chosen] for rows in complete], metrics, metric),
        gate=_gate(metrics, identity["config"]),
        conditions=_conditions(identity, complete[-1]),
        hardware=_hardware(identity),
    )


def rule_label(config: Mapping[str, Any]) -> str:
    """GRPO, SFPO K=3, GXPO K=5, GXPO K=10 replay, GXPO K=10 replay 1 probe."""
    rule = config["learner"]["rule"]
    parts = [str(rule["name"]).upper()]
    if rule.get("k") is not None:
        parts.append(f"K={rule['k']}")
    if rule.get("predictor", "gradient") != "gradient":
        parts.append(str(rule["predictor"]))
    if rule.get("probes", 2) == 1:
        parts.append("1 probe")
    return " ".join(parts)


def group_runs(folders: Sequence[Path], benchmark: str | None = None, metric: str = "pass@1") -> list[SeedGroup]:
    """Load runs and group those whose configs differ in name and seed alone, in order of appearance.

    A group is called by its rule; the learning rate is added where it is not the same for all, and whatever
    else of the rule tells two groups apart. Raises DataError when one seed of a group comes twice.
    """
    configs: dict[str, dict[str, str]] = {}
    members: dict[str, list[RunCurves]] = {}
    for folder in folders:
        run = load_run(folder, benchmark, metric)
        config = read_identity(folder)["config"]
        body = {name: value for name, value in config.items() if name not in ("name", "seed")}
        key = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        configs.setdefault(key, flatten(body))
        if any(run.seed == other.seed for other in members.setdefault(key, [])):
            raise DataError(f"{folder}: seed {run.seed} of this config is already there; name one run of the two")
        members[key].append(run)
    labels = _labels({key: runs[0].rule for key, runs in members.items()}, configs)
    return [SeedGroup(labels[key], tuple(runs)) for key, runs in members.items()]


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as `a.b.c` → JSON text."""
    flat: dict[str, str] = {}
    for name, item in value.items():
        if isinstance(item, Mapping):
            flat |= flatten(item, f"{prefix}{name}.")
        else:
            flat[prefix + name] = json.dumps(item, ensure_ascii=False)
    return flat


def _labels(rules: Mapping[str, str], configs: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    rate = "learner.optimizer.learning_rate"
    rates = {key: config.get(rate, "") for key, config in configs.items()}
    several = len(set(rates.values())) > 1
    labels = {key: rule + (f" lr {float(rates[key]):g}" if several else "") for key, rule in rules.items()}
    for label in set(labels.values()):
        same = [key for key in labels if labels[key] == label]
        if len(same) < 2:
            continue
        differ = [n for n in configs[same[0]] if len({configs[k].get(n) for k in same}) > 1 and n != rate]
        differ.sort(key=lambda name: not name.startswith("learner.rule."))
        for number, key in enumerate(same):
            words = [f"{name.removeprefix('learner.rule.')}={configs[key].get(name)}" for name in differ[:2]]
            labels[key] = " ".join([label, *(words or [f"#{number + 1}"])])
    return labels


def _curve(points: list[list[Row]], metrics: list[Row], metric: str) -> EvaluationCurve:
    """points: for each step one row a benchmark. The macro average weighs benchmarks alike."""
    by_step = {row["step"]: row["metrics"] for row in metrics}
    accuracy, low, high = [], [], []
    for rows in points:
        scores = [row["scores"] for row in rows]
        mean = float(np.mean([score[metric] for score in scores]))
        accuracy.append(mean)
        # Bounds of the mean of independent benchmarks: their half-widths add in squares.
        below = [score[metric] - score.get(f"{metric}/ci_low", np.nan) for score in scores]
        above = [score.get(f"{metric}/ci_high", np.nan) - score[metric] for score in scores]
        low.append(mean - float(np.linalg.norm(below)) / len(rows))
        high.append(mean + float(np.linalg.norm(above)) / len(rows))
    costs = {name: [_cost(rows[0], by_step, name) for rows in points] for name in _COSTS}
    per_problem, ids = _per_problem(points, metric)
    return EvaluationCurve(
        steps=np.array([rows[0]["step"] for rows in points], dtype=np.float64),
        backward_passes=np.array(costs["backward_passes"]),
        hours=np.array(costs["hours"]) / 3600,
        tokens=np.array(costs["tokens"]),
        accuracy=np.array(accuracy),
        ci_low=np.array(low),
        ci_high=np.array(high),
        per_problem=per_problem,
        problem_ids=ids,
    )


def _cost(row: Row, by_step: Mapping[int, Mapping[str, float]], name: str) -> float:
    """From the evaluation itself, else from the step's metrics, 0 before the first step, NaN when unknown."""
    value = row.get(_FIELDS[name])
    if value is None:
        value = by_step.get(row["step"], {}).get(_COSTS[name], 0.0 if row["step"] == 0 else np.nan)
    return float(value)


def _per_problem(points: list[list[Row]], metric: str) -> tuple[np.ndarray | None, tuple[str, ...]]:
    """Scores [num_evaluations, num_problems], weighted so that their plain mean is the macro average."""
    ids = [f"{row['benchmark']}/{problem}" for row in points[0] for problem in row.get("problem_ids", ())]
    table = []
    for rows in points:
        present = [f"{row['benchmark']}/{problem}" for row in rows for problem in row.get("problem_ids", ())]
        sizes = [len(row.get("per_problem") or ()) for row in rows]
        if metric != "pass@1" or 0 in sizes or present != ids or sum(sizes) != len(ids):
            return None, ()
        weights = [sum(sizes) / (len(rows) * size) for size in sizes]
        table.append(
            [weight * score for row, weight in zip(rows, weights, strict=True) for score in row["per_problem"]]
        )
    return np.array(table, dtype=np.float64), tuple(ids)


def _gate(metrics: list[Row], config: Mapping[str, Any]) -> GateTrace:
    seen = [(row["step"], row["metrics"]["gate/z"]) for row in metrics if "gate/z" in row["metrics"]]
    shut = [row["metrics"]["gate/shutoff_step"] for row in metrics if "gate/shutoff_step" in row["metrics"]]
    gate = config["learner"]["rule"].get("gate") or {}
    thresholds = [row["metrics"]["gate/threshold"] for row in metrics if "gate/threshold" in row["metrics"]]
    return GateTrace(
        steps=np.array([step for step, _ in seen], dtype=np.float64),
        z=np.array([z for _, z in seen], dtype=np.float64),
        threshold=thresholds[-1] if thresholds else None,
        shutoff_step=int(shut[-1]) if shut else None,
        two_sided=bool(gate.get("two_sided", False)),
    )


def _conditions(identity: Mapping[str, Any], evaluations: Mapping[str, Row]) -> dict[str, str]:
    settings = flatten(identity["config"])
    found = {name: value for name, value in settings.items() if not _under(name, (*_FREE, *_SPEED))}
    found["policy_sha256"] = str(identity.get("policy_sha256"))
    found["code.sha256"] = str(identity.get("code", {}).get("sha256"))
    found |= {f"data_sha256.{name}": str(value) for name, value in (identity.get("data_sha256") or {}).items()}
    packages = identity.get("packages") or {}
    found |= {f"package.{name}": packages[name] for name in _PACKAGES if name in packages}
    for name, row in evaluations.items():
        for key in ("data_sha256", "sampling", "template", "num_problems", "samples_per_prompt"):
            found[f"eval.{name}.{key}"] = json.dumps(row.get(key), sort_keys=True, ensure_ascii=False)
    return found


def _hardware(identity: Mapping[str, Any]) -> dict[str, str]:
    settings = flatten(identity["config"])
    machine = identity.get("hardware") or {}
    found = {name: json.dumps(machine.get(name)) for name in ("cpu", "usable_cores", "accelerators")}
    return found | {name: value for name, value in settings.items() if _under(name, _SPEED)}


def _under(name: str, prefixes: Sequence[str]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)
