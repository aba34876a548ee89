"""The results of a study as three files, small enough for a repository: study.json, runs.parquet, evaluations.parquet.

One row a run and one a run and evaluation; every number of the report comes from them.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet
from pydantic import ValidationError

from gxpo_trainer.compare.curves import EvaluationCurve, RunCurves
from gxpo_trainer.compare.rows import conditions_of, forward_passes
from gxpo_trainer.compare.seeds import SeedGroup, find_differences
from gxpo_trainer.config.components import CHOICES
from gxpo_trainer.config.messages import config_error
from gxpo_trainer.config.tasks import EMBEDDED_TASKS
from gxpo_trainer.errors import DataError
from gxpo_trainer.jsonl import Row
from gxpo_trainer.reporting.reading import has_curve, load_run, read_identity, read_metrics
from gxpo_trainer.studies.definition import RunKey, RunResult, Study, budget, run_config
from gxpo_trainer.studies.runner import REGISTERED, read_result, read_results

STUDY, RUNS, EVALUATIONS = "study.json", "runs.parquet", "evaluations.parquet"
_COLUMNS = ("backward_passes", "tokens", "hours", "accuracy", "ci_low", "ci_high")
"""Arrays of a curve that evaluations.parquet has as numbers, besides the step."""
_RECORDED = ("code", "packages", "hardware", "policy_sha256", "data_sha256")
"""What is kept of the first run of each folder."""
MEDIANS = {
    "gxpo/theta_k_relative_error": "error of θᴷ",
    "gxpo/retention_mean": "retention",
    "gxpo/scale_mean": "scale",
    "gxpo/displacement_ratio": "displacement ratio",
    "grad/cos_g0_slow": "cos(g⁰, g_slow)",
    "gxpo/inactive_fraction": "inactive",
}
"""Diagnostics of which a run's row has the median over its steps, with their names in the report."""


@dataclass(frozen=True, slots=True, eq=False)
class StudyData:
    """A study with what its runs left. runs: rows of runs.parquet. curves: by run, without those that diverged before
    their first evaluation."""

    study: Study
    conditions: dict[str, Any]
    runs: list[Row]
    curves: dict[RunKey, RunCurves]

    def reported(self, arm: str) -> list[Row]:
        """Rows of an arm's reported runs, by seed."""
        rows = [row for row in self.runs if row["stage"] == "report" and row["arm"] == arm]
        return sorted(rows, key=lambda row: int(row["seed"]))

    def group(self, arm: str) -> SeedGroup | None:
        """Reported runs of an arm that have a curve; None before its first."""
        runs = tuple(self.curves[key] for row in self.reported(arm) if (key := key_of(row)) in self.curves)
        return SeedGroup(self.study.arms[arm].label, runs) if runs else None


def key_of(row: Row) -> RunKey:
    # Data of the first versions has no settings.
    return RunKey(row["stage"], row["arm"], row["learning_rate"], row["seed"], row.get("settings") or "")


def known_results(study: Study, data: StudyData | None) -> dict[RunKey, RunResult]:
    """Results of the runs in data that the study would execute with the same settings."""

    def settings(of: Study, key: RunKey) -> Any:
        """All that `run_config` depends on."""
        return of.preset, of.overrides, of.arms[key.arm].overrides, budget(of, key), of.evaluate_every

    rows = {} if data is None else {key_of(row): row for row in data.runs if row["arm"] in study.arms}
    same = {key: row for key, row in rows.items() if data and settings(data.study, key) == settings(study, key)}
    return {key: RunResult(row["accuracy"], row["diverged"]) for key, row in same.items()}


def collect(study: Study, root: Path, earlier: StudyData | None = None) -> StudyData:
    """Read the complete runs of a study's folder, with those of earlier data that are not there.

    Raises DataError when there are none, and ConfigError for a run of other settings (`read_result`).
    """
    results = read_results(study, root, known_results(study, earlier))
    if not results:
        raise DataError(f"{root} has no complete run of {study.name}; `gxpo study run` executes them")
    own = {key: result for key in results if (result := read_result(study, root, key)) is not None}
    curves = {key: load_run(root / key.folder) for key in own if has_curve(root / key.folder)}
    runs = [_run_row(key, result, curves.get(key), root / key.folder) for key, result in own.items()]
    kept = [row for row in earlier.runs if key_of(row) in results.keys() - own.keys()] if earlier else []
    before = earlier.conditions if earlier and kept else {}
    conditions = _conditions(study, root, list(own), curves, before) if own else before
    earlier_curves = earlier.curves if earlier else {}
    kept_curves = {key: earlier_curves[key] for row in kept if (key := key_of(row)) in earlier_curves}
    return StudyData(study, conditions, kept + runs, kept_curves | curves)


def write(data: StudyData, folder: Path) -> None:
    """Write the three files, which replace earlier ones once all are written. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = {name: folder / f"{name}.part" for name in (STUDY, RUNS, EVALUATIONS)}
    about = {"study": data.study.model_dump(mode="json"), "conditions": data.conditions}
    parts[STUDY].write_text(json.dumps(about, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    rows = [row for key, run in data.curves.items() for row in _evaluation_rows(key, run)]
    for name, table in ((RUNS, data.runs), (EVALUATIONS, rows)):
        parquet.write_table(pa.Table.from_pylist(table), parts[name], compression="zstd")
    for name, part in parts.items():
        part.replace(folder / name)


def read(folder: Path) -> StudyData:
    """Read what `write` wrote. Raises DataError when a file is missing or damaged."""
    try:
        about = json.loads((folder / STUDY).read_text(encoding="utf-8"))
        study, conditions = Study.model_validate(about["study"]), about["conditions"]
        runs = parquet.read_table(folder / RUNS).to_pylist()
        rows = parquet.read_table(folder / EVALUATIONS).to_pylist()
    except ValidationError as error:
        raise DataError(str(config_error(error, str(folder / STUDY), Study))) from None
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise DataError(
            f"{folder} has no data of a study ({error}); `gxpo study run` executes one, `gxpo study report` collects it"
        ) from None
    by_run: dict[RunKey, list[Row]] = {}
    for row in rows:
        by_run.setdefault(key_of(row), []).append(row)
    row_of = {key_of(row): row for row in runs}
    curves = {key: _curves(study, key, own, row_of[key]) for key, own in by_run.items()}
    return StudyData(study, conditions, runs, curves)


def _run_row(key: RunKey, result: RunResult, run: RunCurves | None, folder: Path) -> Row:
    rows = read_metrics(folder)
    metrics = [row["metrics"] for row in rows]
    last = metrics[-1] if metrics else {}
    values_of = {name: [m[name] for m in metrics if math.isfinite(m.get(name, math.nan))] for name in MEDIANS}
    return {
        **asdict(key),
        **asdict(result),
        "peak": result.accuracy if run is None else float(run.curve.accuracy.max()),
        # Of the config, so that data is read without the packages of its rules.
        "rule": None if run is None else run.rule,
        "forward_passes": None if run is None else run.curve.forward_passes,
        # Checkpoints and evaluations have rows of their own.
        "steps": max((int(row["step"]) for row in rows), default=0),
        "backward_passes": float(last.get("update/backward_passes_total", 0.0)),
        **{name: median(values) if values else None for name, values in values_of.items()},
    }


def _evaluation_rows(key: RunKey, run: RunCurves) -> list[Row]:
    curve = run.curve
    scores, ids = curve.per_problem, curve.problem_ids
    collected = bool(ids) and re.fullmatch("[0-9a-f]{16}/0", ids[0])  # as `_curves` names problems
    digest = ids[0][:16] if collected else hashlib.sha256("\n".join(ids).encode()).hexdigest()[:16]
    return [
        {
            **asdict(key),
            "step": int(curve.steps[index]),
            **{name: float(getattr(curve, name)[index]) for name in _COLUMNS},
            "per_problem": [] if scores is None else [float(score) for score in scores[index]],
            "problems_sha256": digest,
        }
        for index in range(curve.steps.size)
    ]


def _curves(study: Study, key: RunKey, rows: list[Row], row_of_run: Row) -> RunCurves:
    if row_of_run.get("forward_passes") is None:  # data of the first versions
        config = run_config(study, key)
        passes = forward_passes(config.model_dump(mode="json"))
        row_of_run |= {"rule": config.learner.rule.label, "forward_passes": passes}
    rows = sorted(rows, key=lambda row: int(row["step"]))
    problems = len(rows[0]["per_problem"])
    digest = rows[0]["problems_sha256"]
    curve = EvaluationCurve(
        steps=np.array([float(row["step"]) for row in rows]),
        **{name: np.array([float(row[name]) for row in rows]) for name in _COLUMNS},
        per_problem=np.array([row["per_problem"] for row in rows]) if problems else None,
        problem_ids=tuple(f"{digest}/{number}" for number in range(problems)),
        forward_passes=row_of_run["forward_passes"],
    )
    return RunCurves(key.folder, study.arms[key.arm].label, key.seed, curve)


def _conditions(
    study: Study, root: Path, keys: list[RunKey], curves: dict[RunKey, RunCurves], before: Mapping[str, Any]
) -> dict[str, Any]:
    """Machine, versions, policy and data of the first run, what differs between arms and from the data before and
    should not, what was registered, and the first of each folder that runs were collected from."""
    identity = read_identity(root / keys[0].folder)
    by_arm: dict[str, list[RunCurves]] = {}
    for key, run in curves.items():
        if key.stage == "report":
            by_arm.setdefault(study.arms[key.arm].label, []).append(run)
    groups = [SeedGroup(label, tuple(runs)) for label, runs in by_arm.items()]
    searched = (word for key in keys for word in key.settings.split())
    overridden = (word for arm in study.arms.values() for word in arm.overrides)
    allowed = {word.partition("=")[0].strip() for word in (*overridden, *searched)}
    # With the choice of a loss its other settings differ.
    chosen = {choice.section for choice in CHOICES.values() if f"{choice.section}.{choice.key}" in allowed}
    if allowed & {"teacher.path", "rollout.source"}:
        allowed.add("data_sha256.teacher.path")  # of its weights
    within = tuple(f"{name}." for name in allowed | chosen)
    first = {name: identity.get(name) for name in _RECORDED}
    differences = [difference.setting for difference in find_differences(groups)] if groups else []
    parts = [first]
    if before:
        # The first versions kept less of a part.
        earliest, *others = before.get("parts") or [{}]
        parts = [{name: before.get(name) for name in _RECORDED} | earliest, *others, first]
        differences += _unequal_folders(before, first)
    unequal = [name for name in differences if not f"{name}.".startswith(within)]
    file = root / REGISTERED
    registered = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
    return {**first, "registered": registered, **before} | {
        "unequal": list(dict.fromkeys([*before.get("unequal", ()), *unequal])),
        "parts": [
            part
            for number, part in enumerate(parts)
            if part not in parts[:number] and not any(part.items() < other.items() for other in parts)
        ],
    }


def _unequal_folders(before: Mapping[str, Any], first: Mapping[str, Any]) -> list[str]:
    """Policy, data and packages that both folders name and that differ. The report names differences of code itself,
    and generated problems depend on the run's seed."""
    recorded, now = (conditions_of(of, {}, {}) for of in (before, first))
    return [
        name
        for name, value in recorded.items()
        if name != "code.sha256" and now.get(name, value) != value
        if not ("/" in name and name.rpartition("/")[2] in EMBEDDED_TASKS)
    ]
