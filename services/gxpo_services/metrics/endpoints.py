"""`/runs/{run_id}/metrics`, `/metrics`: curves."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, Field, StringConstraints
from sqlalchemy.orm import Session

from gxpo_services.api.answers import plain_answer
from gxpo_services.api.dependencies import ReadSession, ServiceRoute, Viewer
from gxpo_services.api.errors import Invalid, responses
from gxpo_services.api.fields import Id, RunId, Text
from gxpo_services.metrics import service
from gxpo_services.metrics.schemas import Axis, ManyMetricsView, MetricsView
from gxpo_services.metrics.series import Shape

MOST_POINTS = 2_000_000
"""Points that one response may have: as JSON about 60 MB, and several times as much while it is made."""
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
    after: int | None = Field(None, ge=-1, le=2**31 - 1, description="Only points after this step.")
    max_points: int = Field(
        1000,
        ge=4,
        le=20_000,
        description="Maximum number of points per series; minima, maxima and both ends are kept. "
        "Runs × names × max_points may not exceed 2,000,000.",
    )
    joined: bool = Field(
        False,
        description="Thin all series of a run to the same, evenly spaced steps instead, and add their sums: for values "
        "that are added, subtracted or drawn as a band.",
    )
    smoothing: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Weight of an exponential average over all steps, before thinning; 0 for none. Metrics of the gate "
        "are never smoothed.",
    )


class ManySeriesQuery(SeriesQuery):
    runs: list[Id] = Field(min_length=1, max_length=200, description="Ids of runs, as repeated parameters.")


@router.get("/runs/{run_id}/metrics/names", summary="Metric names of a run", responses=responses(404))
def metric_names(run_id: RunId, _: Viewer, session: ReadSession) -> list[str]:
    """Sorted names of the metrics of a run."""
    return service.names(session, run_id)


@router.get("/runs/{run_id}/metrics", summary="Metrics of a run", response_model=MetricsView, responses=responses(404))
def run_metrics(run_id: RunId, query: Annotated[SeriesQuery, Query()], _: Viewer, session: ReadSession) -> Response:
    """Values over steps or costs, one per step, of the effective history. For a live chart pass as `after` one step
    before the latest one received, and request everything when `revision` has changed."""
    return plain_answer(_curves(session, [run_id], query)[run_id])


@router.get("/metrics", summary="Metrics of several runs", response_model=ManyMetricsView, responses=responses(404))
def many_metrics(query: Annotated[ManySeriesQuery, Query()], _: Viewer, session: ReadSession) -> Response:
    """The metrics of several runs in one response."""
    return plain_answer({"runs": _curves(session, query.runs, query)})


def _curves(session: Session, runs: list[str], query: SeriesQuery) -> dict[str, dict[str, Any]]:
    names = service.split_names(query.names)
    num_runs, num_names = len(set(runs)), len(set(names))
    if num_runs * num_names * query.max_points > MOST_POINTS:
        raise Invalid(
            f"runs ({num_runs}) × names ({num_names}) × max_points ({query.max_points}) exceed {MOST_POINTS} points; "
            "lower max_points, or request fewer runs or names"
        )
    shape = Shape(query.max_points, query.after, query.joined, query.smoothing)
    return service.curves(session, runs, names, query.x, shape)
