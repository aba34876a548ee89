"""`/runs/{run_id}/metrics` and `/metrics`: curves of runs with axis, smoothing and thinning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, Field, StringConstraints
from sqlalchemy import select
from sqlalchemy.orm import Session

from gxpo_services.api.dependencies import ReadSession, ServiceRoute, Viewer, run_number
from gxpo_services.api.errors import Invalid, NotFound, responses
from gxpo_services.api.fields import MAX_STEP, Id, JsonNumber, RunId, Text
from gxpo_services.api.idempotency import plain_answer
from gxpo_services.db.tables import Run
from gxpo_services.outputs import metrics as stored
from gxpo_services.outputs.metrics import BACKWARD_PASSES, NEVER_SMOOTHED, RECORD, TOKENS, TRAINING_S, Records


def thin(values: npt.NDArray[np.float64], max_points: int) -> npt.NDArray[np.intp]:
    """Ascending indices of the values to keep, at most `max_points` (≥ 4).

    Keeps the first and the last point, and the minimum and maximum of each of the equal buckets between them. NaN is
    ignored; a bucket of only NaN keeps one point, so that the gap stays visible.
    """
    length = len(values)
    if length <= max_points:
        return np.arange(length)
    inner = values[1:-1]
    width = -(-len(inner) // ((max_points - 2) // 2))
    buckets = -(-len(inner) // width)
    padded = np.full(buckets * width, np.nan)
    padded[: len(inner)] = inner
    grid = padded.reshape(buckets, width)
    gaps = np.isnan(grid)
    begin = np.arange(buckets) * width
    lowest = begin + np.where(gaps, np.inf, grid).argmin(axis=1)
    highest = begin + np.where(gaps, -np.inf, grid).argmax(axis=1)
    pairs = np.stack([np.minimum(lowest, highest), np.maximum(lowest, highest)], axis=1)
    twice = pairs[:, 0] == pairs[:, 1]
    kept = pairs.ravel()[~np.stack([np.zeros_like(twice), twice], axis=1).ravel()] + 1
    return np.concatenate([[0], kept, [length - 1]])


def spread(length: int, max_points: int) -> npt.NDArray[np.intp]:
    """Ascending indices of at most `max_points` (≥ 2) of `length` points: evenly spaced, with both ends."""
    return np.linspace(0, length - 1, min(length, max_points)).round().astype(np.intp)


Json = dict[str, Any]
Floats = npt.NDArray[np.float64]
Steps = npt.NDArray[np.int32]


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

    def thinned(self, max_points: int) -> Json:
        """SeriesView of at most `max_points` points, with a band if points are left out."""
        if len(self.steps) <= max_points:
            return self.at(np.arange(len(self.steps)))
        return self.at(thin(self.values, max_points)) | {"band": self.band(max_points // 2)}

    def band(self, most: int) -> Json:
        """BandView of at most `most` buckets of equal numbers of steps; NaN for a bucket without a finite value."""
        begin = np.arange(0, len(self.values), -(-len(self.values) // most))
        middle = (begin + np.append(begin[1:], len(self.values)) - 1) // 2
        finite = np.isfinite(self.values)
        count = np.add.reduceat(finite, begin, dtype=np.float64)
        count[count == 0] = np.nan
        return {
            "x": self.places[middle].tolist(),
            "steps": self.steps[middle].tolist(),
            "mean": (np.add.reduceat(np.where(finite, self.values, 0.0), begin) / count).tolist(),
            "low": np.fmin.reduceat(np.where(finite, self.values, np.nan), begin).tolist(),
            "high": np.fmax.reduceat(np.where(finite, self.values, np.nan), begin).tolist(),
        }


def series_of(histories: Mapping[str, Records], query: SeriesQuery, costs: Records | None) -> dict[str, Json]:
    """SeriesView of each metric, in the same order; NaN and the infinities are floats yet.

    costs: the history of the axis, unless it is the step.
    """
    lines = {name: _line(name, records, query, costs) for name, records in histories.items()}
    if not query.joined:
        return {name: line.thinned(query.max_points) for name, line in lines.items()}
    steps = np.unique(np.concatenate([line.steps for line in lines.values()]))
    steps = steps[spread(len(steps), query.max_points)]
    return {
        name: line.at(np.flatnonzero(np.isin(line.steps, steps, assume_unique=True)))
        | {"sum": float(finite.sum()), "count": len(finite)}
        for name, line in lines.items()
        for finite in [histories[name]["value"][np.isfinite(histories[name]["value"])]]
    }


def _line(name: str, records: Records, query: SeriesQuery, costs: Records | None) -> _Line:
    steps, values = records["step"], records["value"]
    if query.smoothing > 0 and not name.startswith(NEVER_SMOOTHED):
        values = smooth(values, query.smoothing)
    places: npt.NDArray[Any] = costs_at(steps, costs) if query.x != "step" else steps
    chosen = np.isfinite(places)
    if query.after is not None:
        chosen &= steps > query.after
    if query.from_ is not None:
        chosen &= places >= query.from_
    if query.to is not None:
        chosen &= places <= query.to
    return _Line(steps[chosen], places[chosen], values[chosen])


def smooth(values: Floats, weight: float) -> Floats:
    """m₀ = a₀, mᵢ = weight·mᵢ₋₁ + (1 − weight)·aᵢ; values that are not finite are kept and skipped."""
    averaged, finite = values.copy(), np.isfinite(values)
    averaged[finite] = [*accumulate(values[finite].tolist(), lambda last, new: weight * last + (1 - weight) * new)]
    return averaged


def costs_at(steps: Steps, costs: Records | None) -> Floats:
    """Cumulative cost at each step: the last total at or before it, 0 at step 0, NaN where unknown."""
    unknown = np.where(steps == 0, 0.0, np.nan)
    if costs is None or len(costs) == 0:
        return unknown
    index = np.searchsorted(costs["step"], steps, side="right") - 1
    return np.where(index >= 0, costs["value"][np.maximum(index, 0)], unknown)


Axis = Literal["step", "backward_passes", "time", "tokens"]


class BandView(BaseModel):
    """A thinned series as equal buckets of steps; lists of equal lengths, with `NaN` for a bucket without a value."""

    x: list[float] = Field(description="Position of each bucket's middle.", examples=[[4, 12]])
    steps: list[int] = Field(description="Step of each bucket's middle.", examples=[[4, 12]])
    mean: list[JsonNumber] = Field(description="Means of the finite values.", examples=[[0.25, 0.3]])
    low: list[JsonNumber] = Field(description="Minima.", examples=[[0.1, 0.2]])
    high: list[JsonNumber] = Field(description="Maxima.", examples=[[0.5, 0.4]])


class SeriesView(BaseModel):
    """Series of a metric; the three lists have equal lengths, in order of steps."""

    x: list[float] = Field(description="Position on the requested axis.", examples=[[1, 2, 3]])
    y: list[JsonNumber] = Field(description="Values.", examples=[[0.25, 0.31, "NaN"]])
    steps: list[int] = Field(description="Steps of the points.", examples=[[1, 2, 3]])
    downsampled: bool = Field(description="Whether it was thinned: to minima and maxima, with `joined` to even steps.")
    band: BandView | None = Field(None, description="To draw a series that was thinned without `joined`.")
    sum: float | None = Field(None, description="Sum of finite values, also of steps up to `after`; with `joined`.")
    count: int | None = Field(None, description="Number of these values; only with `joined`.")


class MetricsView(BaseModel):
    """Metrics of a run, of the effective history: a later attempt replaces the steps it repeats."""

    x: Axis
    run: str = Field(description="Id of the run.")
    last_step: int = Field(description="Latest step of the run; it may still get more metrics, e.g. of an evaluation.")
    attempt: int = Field(description="Latest attempt.")
    revision: int = Field(description="Increases when a new attempt rewrites history; then request everything.")
    series: dict[str, SeriesView] = Field(description="Series by metric; empty without values.")


class ManyMetricsView(BaseModel):
    """Metrics of several runs."""

    runs: dict[str, MetricsView] = Field(description="By id of the run.")


MOST_POINTS = 2_000_000
"""Points that one response may have: as JSON about 60 MB, and several times as much while it is made."""
MOST_CURVES = 2_000
_AXES: dict[Axis, str] = {"backward_passes": BACKWARD_PASSES, "time": TRAINING_S, "tokens": TOKENS}
_NO_RECORDS = np.empty(0, dtype=RECORD)


def curves(session: Session, run_ids: Sequence[str], query: SeriesQuery) -> dict[str, Json]:
    """MetricsView of each run; NaN and the infinities are floats yet. Raises NotFound, Invalid for too many points."""
    run_ids = list(dict.fromkeys(run_ids))
    metrics = list(dict.fromkeys(name for part in query.names for name in part.split(",") if name))
    if not metrics:
        raise Invalid.of("names", "is empty; name at least one metric")
    asked = f"{len(run_ids)} runs × {len(metrics)} metrics"
    if len(run_ids) * len(metrics) * query.max_points > MOST_POINTS:
        fix = "lower max_points, or request fewer runs or names"
        raise Invalid(f"{asked} × max_points ({query.max_points}) exceed {MOST_POINTS} points; {fix}")
    if len(run_ids) * len(metrics) > MOST_CURVES:
        raise Invalid(f"{asked} exceed {MOST_CURVES} series; request fewer")
    columns = (Run.id, Run.number, Run.step, Run.attempt)
    heads = {row.id: row for row in session.execute(select(*columns).where(Run.id.in_(run_ids)))}
    if missing := next((run_id for run_id in run_ids if run_id not in heads), None):
        raise NotFound(f"there is no run {missing}")
    firsts = stored.first_steps(session, [head.number for head in heads.values()])
    numbers = stored.find_numbers(session, metrics)
    axis = stored.find_numbers(session, [_AXES[query.x]]) if query.x != "step" else {}
    # Sums and averages of points after `after` depend on earlier ones.
    all_steps = query.after is None or query.joined or query.smoothing > 0
    # The whole axis: the last cost at or before a point may precede `after`.
    whole = {*numbers.values(), *axis.values()} if all_steps else set(axis.values())
    read = stored.histories(session, whole, firsts) if whole else {}
    values = read if all_steps else stored.histories(session, list(numbers.values()), firsts, after=query.after)
    costs = {run: records for (run, name), records in read.items() if name in axis.values()}
    answer: dict[str, Json] = {}
    for run_id in run_ids:
        head = heads[run_id]
        histories = {name: values.get((head.number, numbers.get(name, -1)), _NO_RECORDS) for name in metrics}
        answer[run_id] = {
            "x": query.x,
            "run": run_id,
            "last_step": head.step,
            "attempt": head.attempt,
            # Every attempt but the first one replaces some history.
            "revision": len(firsts[head.number]),
            "series": series_of(histories, query, costs.get(head.number)),
        }
    return answer


router = APIRouter(route_class=ServiceRoute, tags=["metrics"], responses=responses(401, 422, 503))


class SeriesQuery(BaseModel):
    """Which series, and how many points of them."""

    names: list[Annotated[Text, StringConstraints(max_length=20_000)]] = Field(
        min_length=1,
        max_length=500,
        description="Metrics, as repeated parameters or comma-separated.",
        examples=[["reward/mean", "gate/z"]],
    )
    x: Axis = Field("step", description="The x-axis: steps, or cumulative backward passes, seconds or tokens.")
    after: int | None = Field(None, ge=-1, le=MAX_STEP, description="Only points after this step.")
    from_: float | None = Field(None, alias="from", description="Only points from this position of the axis on.")
    to: float | None = Field(None, description="Only points up to this position.")
    max_points: int = Field(1000, ge=4, le=20_000, description="Points per series; minima, maxima and ends are kept.")
    joined: bool = Field(False, description="Thin all series of a run to the same, even steps instead, and add sums.")
    smoothing: float = Field(
        0.0, ge=0, lt=1, description="Weight of an exponential average, not of the gate, passes or evaluations."
    )


class ManySeriesQuery(SeriesQuery):
    runs: list[Id] = Field(min_length=1, max_length=200, description="Ids of runs, as repeated parameters.")


@router.get("/runs/{run_id}/metrics/names", summary="Metric names of a run", responses=responses(404))
def metric_names(run_id: RunId, _: Viewer, session: ReadSession) -> list[str]:
    """Sorted names of the metrics of a run."""
    return stored.names_of(session, run_number(session, run_id))


@router.get("/runs/{run_id}/metrics", summary="Metrics of a run", response_model=MetricsView, responses=responses(404))
def run_metrics(run_id: RunId, query: Annotated[SeriesQuery, Query()], _: Viewer, session: ReadSession) -> Response:
    """Values over steps or costs, one per step, of the effective history. For a live chart pass as `after` one step
    before the latest one received, and request everything when `revision` has changed."""
    return plain_answer(curves(session, [run_id], query)[run_id])


@router.get("/metrics", summary="Metrics of several runs", response_model=ManyMetricsView, responses=responses(404))
def many_metrics(query: Annotated[ManySeriesQuery, Query()], _: Viewer, session: ReadSession) -> Response:
    """The metrics of several runs in one response."""
    return plain_answer({"runs": curves(session, query.runs, query)})
