"""Series of one run from its histories: axis, smoothing and thinning. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gxpo_services.metrics.blocks import Records
from gxpo_services.metrics.downsample import spread, thin
from gxpo_services.metrics.names import NEVER_SMOOTHED

Json = dict[str, Any]
Floats = npt.NDArray[np.float64]
Steps = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Shape:
    """How series are smoothed and thinned.

    after: only later steps. joined: the same steps for all series, and sums. smoothing: weight in [0, 1), 0 for none.
    """

    max_points: int
    after: int | None = None
    joined: bool = False
    smoothing: float = 0.0

    @property
    def needs_all_steps(self) -> bool:
        """Whether points after `after` depend on earlier ones."""
        return self.joined or self.smoothing > 0


@dataclass(frozen=True, slots=True)
class _Line:
    """Points before thinning; arrays of equal lengths."""

    steps: Steps
    places: npt.NDArray[Any]
    values: Floats

    def at(self, kept: npt.NDArray[np.intp]) -> Json:
        """SeriesView of the points at these indices."""
        return {
            "x": self.places[kept].tolist(),
            "y": self.values[kept].tolist(),
            "steps": self.steps[kept].tolist(),
            "downsampled": len(kept) < len(self.steps),
        }


def series_of(
    histories: Mapping[str, Records], shape: Shape, costs: Records | None, *, over_costs: bool
) -> dict[str, Json]:
    """SeriesView of each metric, in the same order; NaN and the infinities are floats yet.

    costs: the history of the axis with `over_costs`; without it the axis is the step.
    """
    lines = {name: _line(name, records, shape, costs, over_costs) for name, records in histories.items()}
    if not shape.joined:
        return {name: line.at(thin(line.values, shape.max_points)) for name, line in lines.items()}
    steps = np.unique(np.concatenate([line.steps for line in lines.values()]))
    steps = steps[spread(len(steps), shape.max_points)]
    return {
        name: line.at(np.flatnonzero(np.isin(line.steps, steps, assume_unique=True))) | _sum(histories[name])
        for name, line in lines.items()
    }


def _line(name: str, records: Records, shape: Shape, costs: Records | None, over_costs: bool) -> _Line:
    steps, values = records["step"], records["value"]
    if shape.smoothing > 0 and not name.startswith(NEVER_SMOOTHED):
        values = smooth(values, shape.smoothing)
    places: npt.NDArray[Any] = costs_at(steps, costs) if over_costs else steps
    chosen = np.isfinite(places)
    if shape.after is not None:
        chosen &= steps > shape.after
    return _Line(steps[chosen], places[chosen], values[chosen])


def _sum(records: Records) -> Json:
    values = records["value"]
    values = values[np.isfinite(values)]
    return {"sum": float(values.sum()), "count": len(values)}


def smooth(values: Floats, weight: float) -> Floats:
    """m₀ = a₀, mᵢ = weight·mᵢ₋₁ + (1 − weight)·aᵢ; values that are not finite are kept and skipped."""
    averaged: list[float] = []
    last: float | None = None
    for value in values.tolist():
        if not math.isfinite(value):
            averaged.append(value)
            continue
        last = value if last is None else weight * last + (1 - weight) * value
        averaged.append(last)
    return np.array(averaged, dtype=np.float64)


def costs_at(steps: Steps, costs: Records | None) -> Floats:
    """Cumulative cost at each step: the last total at or before it, 0 at step 0, NaN where unknown."""
    found = np.where(steps == 0, 0.0, np.nan)
    if costs is None or len(costs) == 0:
        return found
    if np.array_equal(costs["step"], steps):
        return costs["value"].copy()
    index = np.searchsorted(costs["step"], steps, side="right") - 1
    return np.where(index >= 0, costs["value"][np.maximum(index, 0)], found)
