"""Load runs by id with their curves; runs that cannot be compared are listed with the reason."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sqlalchemy import select
from sqlalchemy.orm import Session

from gxpo_services.api.errors import Invalid, NotFound
from gxpo_services.compare.schemas import MOST_RUNS, LeftOutView
from gxpo_services.db.tables import STUDY, Group, Run
from gxpo_services.outputs import metrics, samples
from gxpo_trainer.compare.curves import RunCurves
from gxpo_trainer.compare.rows import GATE_ENDS, GATE_Z, Series, decode_evaluation, run_curves
from gxpo_trainer.errors import DataError
from gxpo_trainer.jsonl import Row


def series_of(session: Session, run_numbers: Sequence[int], names: Collection[str]) -> Mapping[int, Series]:
    """The named metrics of each run as arrays, from the effective history."""
    series: dict[int, dict[str, tuple[np.ndarray, np.ndarray]]] = {number: {} for number in run_numbers}
    by_number = {number: name for name, number in metrics.find_numbers(session, names).items()}
    firsts = metrics.first_steps(session, run_numbers)
    for (run, name), records in metrics.histories(session, list(by_number), firsts).items():
        steps, values = records["step"].astype(np.float64), records["value"].astype(np.float64)
        series[run][by_number[name]] = (steps, values)
    return series


_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
REPORTED = "report"
"""Stage of the runs of a study that are no tuning runs."""
_STAGE = Run.group_values["stage"].as_string()
_RUNS_AT_ONCE = 25
"""Runs whose evaluations are fetched per query: as JSON they take several times the memory of arrays."""
_PARTS_OF_IDENTITY = ("code", "packages", "data_sha256", "hardware")


@dataclass(slots=True)
class Loaded:
    """Runs with their curves, in the order of the request, and those without any."""

    benchmarks: list[str]
    runs: list[tuple[Run, RunCurves]]
    left_out: list[LeftOutView]


def split_ids(values: Sequence[str], name: str) -> list[str]:
    """Unique ids of repeated and comma-separated parameters. Raises Invalid for a malformed id."""
    ids = [word for value in values for word in (part.strip() for part in value.split(",")) if word]
    bad = [word for word in ids if not _ID.fullmatch(word)]
    if bad:
        raise Invalid.of(name, f"{bad[0][:100]!r} is not an id; ids consist of letters, digits, - and _")
    if len(ids) > MOST_RUNS:
        raise Invalid.of(name, f"contains {len(ids)} ids; name at most {MOST_RUNS}")
    return list(dict.fromkeys(ids))


def select_runs(session: Session, runs: Sequence[str], groups: Sequence[str], *, tuning: bool = True) -> list[Run]:
    """The runs with these ids and the runs of these groups in order of creation, each once. tuning: with the tuning
    runs of studies.

    Raises NotFound for an unknown id, Invalid for none or too many runs.
    """
    if not runs and not groups:
        raise Invalid.of("runs", "is empty, and so is groups; name at least one run or group")
    runs_by_id = {run.id: run for run in session.scalars(select(Run).where(Run.id.in_(runs)))}
    groups_by_id = {group.id: group for group in session.scalars(select(Group).where(Group.id.in_(groups)))}
    for kind, ids, known in (("run", runs, runs_by_id.keys()), ("group", groups, groups_by_id.keys())):
        missing = [given for given in ids if given not in known]
        if missing:
            raise NotFound(f"there is no {kind} {', '.join(missing[:10])}")
    chosen = {run_id: runs_by_id[run_id] for run_id in runs}
    for group_id in groups:
        group = groups_by_id[group_id]
        members = select(Run).where(Run.group_number == group.number).order_by(Run.number)
        if group.kind == STUDY and not tuning:
            members = members.where(_STAGE == REPORTED)
        chosen |= {run.id: run for run in session.scalars(members.limit(MOST_RUNS + 1))}
    if len(chosen) > MOST_RUNS:
        raise Invalid.of("groups", f"contain more than {MOST_RUNS} runs; select some of them with runs")
    return list(chosen.values())


def tuning_runs(session: Session, runs: Collection[str], groups: Sequence[str]) -> list[LeftOutView]:
    """The tuning runs of studies, which have other seeds and budgets than the reported ones, without the named runs."""
    of_studies = select(Group.number).where(Group.id.in_(groups), Group.kind == STUDY)
    tuning = select(Run.id, Run.name).where(Run.group_number.in_(of_studies), _STAGE != REPORTED).order_by(Run.number)
    reason = "tuning run of a study"
    return [LeftOutView(run=id, name=name, reason=reason) for id, name in session.execute(tuning) if id not in runs]


def load(session: Session, runs: Sequence[Run], benchmark: str | None, metric: str, *, gates: bool = False) -> Loaded:
    """Load the curves of runs, optionally with gate z-scores. Default benchmark: the average of all common ones.

    Raises Invalid when the runs have evaluations and none in common.
    """
    evaluations, left_out = _evaluations(session, runs)
    names_of = [list(dict.fromkeys(row["benchmark"] for row in rows)) for rows in evaluations.values()]
    benchmarks = [benchmark] if benchmark is not None else []
    if benchmark is None and names_of:
        benchmarks = [name for name in names_of[0] if all(name in other for other in names_of)]
    if evaluations and not benchmarks:
        raise Invalid.of("benchmark", "the runs have no common benchmark; name one, and runs without it are excluded")
    names = (GATE_Z, *GATE_ENDS) if gates else GATE_ENDS
    evaluated = [run for run in runs if run.id in evaluations]
    series = series_of(session, [run.number for run in evaluated], names)
    loaded: list[tuple[Run, RunCurves]] = []
    for run in evaluated:
        rows, own = evaluations[run.id], series[run.number]
        try:
            loaded.append((run, run_curves(identity_of(run), rows, own, benchmarks=benchmarks, metric=metric)))
        except DataError as error:
            left_out[run.id] = str(error)
    without = [LeftOutView.of(run, left_out[run.id]) for run in runs if run.id in left_out]
    return Loaded(benchmarks, loaded, without)


def _evaluations(session: Session, runs: Sequence[Run]) -> tuple[dict[str, list[Row]], dict[str, str]]:
    """Evaluations by run id, and the reasons for runs without any."""
    evaluations: dict[str, list[Row]] = {}
    left_out: dict[str, str] = {}
    for start in range(0, len(runs), _RUNS_AT_ONCE):
        some = runs[start : start + _RUNS_AT_ONCE]
        records = samples.evaluations_of(session, [run.number for run in some])
        for run in some:
            try:
                rows = [decode_evaluation(row) for row in records.pop(run.number)]
            except DataError as error:
                left_out[run.id] = str(error)
                continue
            if rows:
                evaluations[run.id] = rows
            else:
                left_out[run.id] = "it has no evaluation (yet)"
    return evaluations, left_out


def identity_of(run: Run) -> dict[str, Any]:
    """run.json as sent by the trainer, with the config stored by the service."""
    stated: Mapping[str, Any] = run.identity or {}
    parts = {name: stated.get(name) for name in _PARTS_OF_IDENTITY}
    kept = {name: value for name, value in parts.items() if isinstance(value, Mapping)}
    return {"config": run.config, "policy_sha256": stated.get("policy_sha256"), **kept}
