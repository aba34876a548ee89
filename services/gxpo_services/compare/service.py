"""Comparisons and heat maps: the trainer's pure functions (gxpo_trainer.compare) on what runs reported.

A page requests its comparison every few seconds, while evaluations arrive every few minutes: comparisons are kept until
their inputs change. The stamp of the inputs is a few numbers: lines received, attempts, time of the last update.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from gxpo_services.api.dependencies import find
from gxpo_services.api.errors import Invalid
from gxpo_services.compare import loading
from gxpo_services.compare.loading import Loaded
from gxpo_services.compare.schemas import (
    CompareQuery,
    ComparisonView,
    HeatCellView,
    HeatMapQuery,
    HeatMapView,
    LeftOutView,
    SettingView,
    Shown,
    compared_group,
)
from gxpo_services.db.tables import SETTING_ORDER, STUDY, Group, Run
from gxpo_trainer.compare.curves import AXES, Axis, RunCurves, peak
from gxpo_trainer.compare.evidence import weigh
from gxpo_trainer.compare.groups import compare_groups, default_baseline
from gxpo_trainer.compare.intervals import mean_interval
from gxpo_trainer.compare.rows import STEP_TIMES, flatten, sampling_share
from gxpo_trainer.compare.seeds import SeedGroup, config_key, group_by_config
from gxpo_trainer.compare.text_tables import all_tables
from gxpo_trainer.errors import DataError

_MOST_BUDGETS = 20
_AXIS_OF: dict[str, Axis] = {axis: axis for axis in AXES} | {"step": "steps", "time": "hours"}


_MAX_BYTES, _REFUSAL_BYTES = 32 << 20, 64 << 10
"""Total size of the responses that a process keeps; a comparison of 20 runs takes 75 KB, a refusal counts as 64 KiB."""
_kept: dict[str, tuple[Hashable, bytes | Invalid]] = {}


def _stamp(session: Session, runs: Sequence[str], groups: Sequence[str], *, gates: bool) -> Hashable:
    """A value that changes whenever a comparison of the runs may change. gates: it has the gate's z-scores.

    Without them thresholds and shut-off steps are those of the last evaluation. Read it before the data, so that a
    concurrent change invalidates the entry.
    """
    columns = Run.__table__.c
    members = columns.group_number.in_(select(Group.__table__.c.number).where(Group.__table__.c.id.in_(groups)))
    wanted = or_(columns.id.in_(runs), members) if groups else columns.id.in_(runs)
    query = select(columns.number, columns.updated_at, columns.attempt, columns.offsets).where(wanted)
    kinds = ("evaluations", "metrics") if gates else ("evaluations",)
    return tuple(
        (row.number, row.updated_at, row.attempt, *(row.offsets.get(kind, 0) for kind in kinds))
        for row in session.execute(query.order_by(columns.number))
    )


def compare_as_json(session: Session, query: CompareQuery) -> bytes:
    """A ComparisonView as JSON, kept until its inputs change.

    Raises NotFound for unknown ids; Invalid for invalid parameters, or when nothing can be compared.
    """
    budgets = _budgets(query.budgets, _AXIS_OF[query.x])
    ids = (loading.split_ids(query.runs, "runs"), loading.split_ids(query.groups, "groups"))
    question = query.model_dump_json()
    stamp = _stamp(session, *ids, gates=query.gates)
    kept_stamp, answer = _kept.pop(question, (None, b""))
    if kept_stamp != stamp:
        runs = loading.select_runs(session, *ids, tuning=False)
        try:
            loaded = loading.load(session, runs, query.benchmark, query.metric, gates=query.gates)
            loaded.left_out += loading.tuning_runs(session, *ids)
            answer = compare(session, loaded, query, budgets).model_dump_json().encode()
        except Invalid as refusal:
            answer = copy(refusal)  # without its traceback, which holds all that was loaded
    _kept[question] = stamp, answer
    while sum(len(kept) if isinstance(kept, bytes) else _REFUSAL_BYTES for _, kept in _kept.values()) > _MAX_BYTES:
        del _kept[next(iter(_kept))]  # the least recently used
    if isinstance(answer, Invalid):
        raise copy(answer)
    return answer


def compare(
    session: Session, loaded: Loaded, query: CompareQuery, budgets: Mapping[Axis, tuple[float, ...]]
) -> ComparisonView:
    """Compare loaded runs, at `budgets` if given.

    Raises Invalid for an unknown baseline, or when nothing can be compared.
    """
    groups = _grouped(loaded)
    if not groups:
        reasons = "; ".join(f"{run.run}: {run.reason}" for run in loaded.left_out[:5]) or "the group has no run"
        left_out = [run.model_dump() for run in loaded.left_out]
        raise Invalid(f"nothing can be compared: {reasons}", left_out=left_out)
    rows = {curves: run for run, curves in loaded.runs}
    baseline = _baseline(query.baseline, groups, rows, loaded.left_out)
    comparison = compare_groups(groups, baseline, budgets=budgets or None)
    evidence, arms = weigh(comparison), [_arms(run) for run in rows.values()]
    absent = sorted({baseline for _, baseline in arms} - {arm for arm, _ in arms})
    return ComparisonView(
        metric=query.metric,
        benchmarks=loaded.benchmarks,
        x=_AXIS_OF[query.x],
        baseline=comparison.baseline,
        smoothing=query.smoothing,
        level=comparison.level,
        target=comparison.target,
        groups=[compared_group(group, comparison, rows, query.smoothing) for group in groups],
        differences=comparison.differences,
        settings=_settings(groups, rows),
        ranking=[group.name for group in comparison.ranking],
        evidence="\n".join(
            [evidence.sentence, *(f"No run of {arm}, the study's baseline arm, is compared." for arm in absent)]
        ),
        conclusive=evidence.conclusive,
        supported=evidence.supported,
        missing=evidence.missing,
        left_out=loaded.left_out,
        tables=all_tables(_with_share(session, groups, comparison.baseline, rows), comparison, query.sampling_share),
    )


def _budgets(words: Sequence[str], axis: Axis) -> dict[Axis, tuple[float, ...]]:
    """Parse `108` and `hours:4` to axis → ascending values. Raises Invalid."""
    budgets: dict[Axis, set[float]] = {}
    for word in (part.strip() for value in words for part in value.split(",") if part.strip()):
        name, colon, number = word.rpartition(":")
        if colon and name not in _AXIS_OF:
            raise Invalid.of(
                "budgets", f"{word[:100]!r}: no such axis; write step, backward_passes, hours, tokens or token_passes"
            )
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not 0 <= value < math.inf:
            raise Invalid.of("budgets", f"{word[:100]!r} is not a budget; write 108 or hours:4")
        budgets.setdefault(_AXIS_OF[name] if colon else axis, set()).add(value)
    if sum(map(len, budgets.values())) > _MOST_BUDGETS:
        raise Invalid.of("budgets", f"contains more than {_MOST_BUDGETS} budgets; name fewer")
    return {name: tuple(sorted(values)) for name, values in budgets.items()}


def _grouped(loaded: Loaded) -> list[SeedGroup]:
    """Configurations with their seeds. Excludes duplicate seeds, and configurations whose seeds share no evaluation."""
    keys = {run.id: (config_key(run.config), curves.seed) for run, curves in loaded.runs}
    by_reach = sorted(loaded.runs, key=lambda pair: (pair[1].curve.steps[-1], pair[0].number))
    furthest = {keys[run.id]: run for run, _ in by_reach}
    for run, _ in loaded.runs:
        if (winner := furthest[keys[run.id]]) is not run:
            reason = f"run {winner.id} has the same config and seed, and more steps or a later start"
            loaded.left_out.append(LeftOutView.of(run, reason))
    loaded.runs = [(run, curves) for run, curves in loaded.runs if furthest[keys[run.id]] is run]
    rows = {curves: run for run, curves in loaded.runs}
    groups = []
    for group in group_by_config([(curves, run.config) for run, curves in loaded.runs]):
        try:
            _ = group.mean
        except DataError as error:
            loaded.left_out += [LeftOutView.of(rows[run], str(error)) for run in group.runs]
        else:
            groups.append(group)
    return groups


def _baseline(
    word: str | None, groups: Sequence[SeedGroup], rows: Mapping[RunCurves, Run], left_out: Sequence[LeftOutView]
) -> str:
    """A configuration by its name, or by id or name of one of its runs."""
    names = [group.name for group in groups]
    if word is None:
        arms = {group.name: [_arms(rows[run]) for run in group.runs] for group in groups}
        own = (name for name, pairs in arms.items() if any(arm == baseline != "" for arm, baseline in pairs))
        return next(own, default_baseline(groups))
    if word in names:
        return word
    for attribute in ("id", "name"):
        named = [group.name for group in groups if any(getattr(rows[run], attribute) == word for run in group.runs)]
        if named:
            return named[0]
    for run in left_out:
        if word in (run.run, run.name):
            raise Invalid.of("baseline", f"{run.name} is excluded: {run.reason}")
    raise Invalid.of("baseline", f"{word!r} is neither one of {', '.join(map(repr, names))} nor one of their runs")


def _arms(run: Run) -> tuple[str, str]:
    """The arm of a reported run, and the one that its study compares the others with; empty for other runs."""
    values = run.group_values or {}
    if run.group is None or run.group.kind != STUDY or values.get("stage") != loading.REPORTED:
        return "", ""
    study = run.group.spec["study"]
    return str(values.get("arm")), (json.loads(study) if isinstance(study, str) else study)["baseline"]


def _settings(groups: Sequence[SeedGroup], rows: Mapping[RunCurves, Run]) -> list[SettingView]:
    configs = {group.name: flatten(rows[group.runs[0]].config) for group in groups}
    names = dict.fromkeys(name for config in configs.values() for name in config if name not in ("name", "seed"))
    values = {name: {group: config.get(name) for group, config in configs.items()} for name in names}
    return [SettingView(setting=name, values=own) for name, own in values.items() if len(set(own.values())) > 1]


def _with_share(
    session: Session, groups: Sequence[SeedGroup], baseline: str, rows: Mapping[RunCurves, Run]
) -> list[SeedGroup]:
    """The groups, with the sampling share of the baseline's runs. That of the others is not needed, and costly."""
    reference = next(group for group in groups if group.name == baseline)
    series = loading.series_of(session, [rows[run].number for run in reference.runs], STEP_TIMES)
    shares = {run: sampling_share(series[rows[run].number]) for run in reference.runs}
    measured = SeedGroup(baseline, tuple(replace(run, sampling_share=share) for run, share in shares.items()))
    return [measured if group is reference else group for group in groups]


_MOST_RUNS = 1000
_SET_BY_CONTROLS = ("learner.rule.name", "learner.optimizer.learning_rate")
_VALUES: dict[Shown, Callable[[RunCurves], float | None]] = {
    "final": lambda run: float(run.curve.accuracy[-1]),
    "best": lambda run: peak(run.curve).accuracy,
    "steps_to_best": lambda run: peak(run.curve).steps,
    "backward_passes_to_best": lambda run: peak(run.curve).backward_passes,
    "hours_to_best": lambda run: peak(run.curve).hours,
    "shutoff_step": lambda run: run.gate.shutoff_step,
}


def group_heat_map(session: Session, group_id: str, query: HeatMapQuery) -> HeatMapView:
    """Heat map of a group. Raises NotFound; Invalid when the group does not vary the two settings."""
    group = find(session, Group, group_id)
    runs = session.scalars(
        select(Run).where(Run.group_number == group.number).order_by(Run.number).limit(_MOST_RUNS)
    ).all()
    places = {name: place for place, name in enumerate(group.spec.get(SETTING_ORDER, []))}
    settings = {
        run.id: {
            name: value
            for name, value in sorted((run.group_values or {}).items(), key=lambda item: places.get(item[0], 0))
            if name != "seed"
        }
        for run in runs
    }
    swept = [values for values in settings.values() if values]
    # A control alone has a rule or a learning rate that is no axis of its sweep, or no value of this axis.
    grid = group.spec.get("grid", {})
    allowed: dict[str, list[Any]] = {name: grid[name] for name in _SET_BY_CONTROLS if name in grid}
    allowed |= {name: [] for name in _SET_BY_CONTROLS if not all(name in values for values in swept)}
    if group.spec.get("preset") == "rules":
        allowed.pop("learner.rule.name", None)
    controls = {
        run for run in runs if any(value not in allowed.get(name, [value]) for name, value in settings[run.id].items())
    }
    varied = _varied([values for run in runs if run not in controls and (values := settings[run.id])])
    x, y = _axes(query, varied)
    absent = {run: [name for name in (x, y) if name not in settings[run.id]] for run in runs if run not in controls}
    reason = "it has no value of {} in the sweep"
    left_out = [LeftOutView.of(run, "it is a learning-rate control") for run in runs if run in controls]
    left_out += [LeftOutView.of(run, reason.format(" and ".join(names))) for run, names in absent.items() if names]
    members = [run for run, names in absent.items() if not names]
    loaded = loading.load(session, members, query.benchmark, query.metric)
    values = {run.id: _VALUES[query.show](curves) for run, curves in loaded.runs}
    x_values, y_values = (_in_order([settings[run.id][name] for run in members]) for name in (x, y))
    runs_of: dict[tuple[int, int], list[str]] = {}
    for run in members:
        row, column = y_values.index(settings[run.id][y]), x_values.index(settings[run.id][x])
        runs_of.setdefault((row, column), []).append(run.id)
    cells = []
    for (row, column), ids in sorted(runs_of.items()):
        known = [value for run_id in ids if (value := values.get(run_id)) is not None and math.isfinite(value)]
        cells.append(HeatCellView(x=column, y=row, value=mean_interval(known) if known else None, runs=ids))
    mixed = dict.fromkeys(name for ids in runs_of.values() for name in _varied([settings[run_id] for run_id in ids]))
    return HeatMapView(
        group=group.id,
        x=x,
        y=y,
        **query.model_dump(include={"show", "metric"}),
        benchmarks=loaded.benchmarks,
        x_values=x_values,
        y_values=y_values,
        cells=cells,
        settings=varied,
        mixed=list(mixed),
        left_out=[*left_out, *loaded.left_out],
    )


def _varied(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Settings with more than one value among the runs, in order of appearance."""
    names = dict.fromkeys(name for run in settings for name in run)
    return [name for name in names if len(_in_order([run.get(name) for run in settings])) > 1]


def _in_order(values: Sequence[Any]) -> list[Any]:
    """Unique values, which may be lists; numbers ascending, anything else in order of appearance."""
    unique = [value for number, value in enumerate(values) if value not in values[:number]]
    return sorted(unique) if all(isinstance(value, int | float) for value in unique) else unique


def _axes(query: HeatMapQuery, varied: Sequence[str]) -> tuple[str, str]:
    """The requested settings, by default the first ones that vary."""
    others = (path for path in varied if path not in (query.x, query.y))
    x, y = query.x or next(others, None), query.y or next(others, None)
    for field, path in (("x", x), ("y", y)):
        if path is None:
            have = " and ".join(varied) or "no setting"
            raise Invalid.of(field, f"the group varies {have}; a heat map needs two settings")
        if path not in varied:
            raise Invalid.of(field, f"{path!r} does not vary in the group; choose from {', '.join(varied) or 'none'}")
    if x == y:
        raise Invalid.of("y", f"is {y!r}, the same as x; choose two settings")
    return str(x), str(y)
