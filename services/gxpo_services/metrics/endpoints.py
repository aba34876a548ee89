"""`/runs/{run_id}/metrics`, `/metrics`: curves."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response
from pydantic import StringConstraints

from gxpo_services.api.answers import plain_answer
from gxpo_services.api.dependencies import ReadSession, ServiceRoute, Viewer
from gxpo_services.api.errors import responses
from gxpo_services.api.fields import Id, RunId, Text
from gxpo_services.metrics import service
from gxpo_services.metrics.schemas import Axis, ManyMetricsView, MetricsView

router = APIRouter(route_class=ServiceRoute, tags=["metrics"], responses=responses(401, 422, 503))

Names = Annotated[
    list[Annotated[Text, StringConstraints(max_length=20_000)]],
    Query(
        min_length=1,
        max_length=500,
        description="Metrics, as repeated parameters or comma-separated.",
        examples=[["reward/mean", "gate/z"]],
    ),
]
AxisQuery = Annotated[Axis, Query(description="The x-axis: steps, or cumulative backward passes, seconds or tokens.")]
After = Annotated[int | None, Query(ge=-1, le=2**31 - 1, description="Only points after this step.")]
MaxPoints = Annotated[
    int,
    Query(ge=4, le=20_000, description="Maximum number of points per series; minima, maxima and both ends are kept."),
]


@router.get("/runs/{run_id}/metrics/names", summary="Metric names of a run", responses=responses(404))
def metric_names(run_id: RunId, _: Viewer, session: ReadSession) -> list[str]:
    """Sorted names of the metrics of a run."""
    return service.names(session, run_id)


@router.get("/runs/{run_id}/metrics", summary="Metrics of a run", response_model=MetricsView, responses=responses(404))
def run_metrics(
    run_id: RunId,
    names: Names,
    _: Viewer,
    session: ReadSession,
    x: AxisQuery = "step",
    after: After = None,
    max_points: MaxPoints = 1000,
) -> Response:
    """Values over steps or costs, one per step, of the effective history. For a live chart pass as `after` one step
    before the latest one received, and request everything when `revision` has changed."""
    found = service.curves(session, [run_id], service.split_names(names), x, after=after, max_points=max_points)
    return plain_answer(found[run_id])


@router.get("/metrics", summary="Metrics of several runs", response_model=ManyMetricsView, responses=responses(404))
def many_metrics(
    runs: Annotated[list[Id], Query(min_length=1, max_length=200, description="Ids of runs, as repeated parameters.")],
    names: Names,
    _: Viewer,
    session: ReadSession,
    x: AxisQuery = "step",
    after: After = None,
    max_points: MaxPoints = 1000,
) -> Response:
    """The metrics of several runs in one response."""
    found = service.curves(session, runs, service.split_names(names), x, after=after, max_points=max_points)
    return plain_answer({"runs": found})
