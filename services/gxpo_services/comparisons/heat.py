"""Heat map of a sweep over two of its settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlalchemy.orm import Session

from gxpo_services.api.errors import Invalid, NotFound
from gxpo_services.comparisons import loading, repository
from gxpo_services.comparisons.loading import left_out_view
from gxpo_services.comparisons.schemas import HeatCellView, HeatMapQuery, HeatMapView, LeftOutView, Shown
from gxpo_services.db.tables.runs import Run
from gxpo_trainer.compare.curves import RunCurves, peak
from gxpo_trainer.compare.heat_map import heat_map, varied_settings

_MOST_RUNS = 1000
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
    group = repository.groups_by_id(session, [group_id]).get(group_id)
    if group is None:
        raise NotFound(f"there is no group {group_id}")
    runs = repository.runs_of(session, group, _MOST_RUNS)
    settings = {run.id: _settings(run) for run in runs}
    varied = varied_settings([found for found in settings.values() if found])
    x, y = _axes(query, varied)
    members, left_out = _members(runs, settings, (x, y))
    loaded = loading.load(session, members, query.benchmark, query.metric)
    values = {source.run.id: _VALUES[query.show](curves) for source, curves in loaded.runs}
    found = heat_map([settings[run.id] for run in members], [values.get(run.id) for run in members], x, y)
    cells = [
        HeatCellView(
            x=cell.x,
            y=cell.y,
            value=cell.interval,
            runs=[members[index].id for index in cell.runs],
        )
        for cell in found.cells
    ]
    return HeatMapView(
        group=group.id,
        x=x,
        y=y,
        show=query.show,
        metric=query.metric,
        benchmarks=loaded.benchmarks,
        x_values=found.x_values,
        y_values=found.y_values,
        cells=cells,
        settings=varied,
        mixed=found.mixed,
        left_out=[*left_out, *loaded.left_out],
    )


def _settings(run: Run) -> dict[str, Any]:
    return {name: value for name, value in (run.group_values or {}).items() if name != "seed"}


def _axes(query: HeatMapQuery, varied: Sequence[str]) -> tuple[str, str]:
    """The requested settings, by default the first ones that vary."""
    chosen: list[str | None] = []
    for name, other in ((query.x, query.y), (query.y, query.x)):
        taken = {other, *chosen}
        chosen.append(name if name is not None else next((one for one in varied if one not in taken), None))
    for field, found in zip(("x", "y"), chosen, strict=True):
        if found is None:
            raise Invalid.of(
                field, f"the group varies {' and '.join(varied) or 'no setting'}; a heat map needs two settings"
            )
        if found not in varied:
            raise Invalid.of(field, f"{found!r} does not vary in the group; choose from {', '.join(varied) or 'none'}")
    if chosen[0] == chosen[1]:
        raise Invalid.of("y", f"is {chosen[1]!r}, the same as x; choose two settings")
    return str(chosen[0]), str(chosen[1])


def _members(
    runs: Sequence[Run], settings: Mapping[str, Mapping[str, Any]], axes: Sequence[str]
) -> tuple[list[Run], list[LeftOutView]]:
    """Runs with both settings, and the others with the reason."""
    members, left_out = [], []
    for run in runs:
        absent = [name for name in axes if name not in settings[run.id]]
        if absent:
            left_out.append(left_out_view(run, f"it has no value of {' and '.join(absent)} in the sweep"))
        else:
            members.append(run)
    return members, left_out
