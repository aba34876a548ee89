"""`/compare`, `/groups/{id}/heatmap` and `/export`."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import StreamingResponse

from gxpo_services.api.dependencies import DatabaseDep, ReadSession, ServiceRoute, Viewer
from gxpo_services.api.errors import responses
from gxpo_services.api.fields import GroupId
from gxpo_services.comparisons import export as exports
from gxpo_services.comparisons import heat, service
from gxpo_services.comparisons.file_formats import MEDIA_TYPES
from gxpo_services.comparisons.loading import split_ids, wanted_runs
from gxpo_services.comparisons.memory import Memory
from gxpo_services.comparisons.schemas import CompareQuery, ComparisonView, ExportQuery, HeatMapQuery, HeatMapView

router = APIRouter(route_class=ServiceRoute, tags=["comparisons"], responses=responses(401, 403, 404, 422, 503))

_BYTES = {"schema": {"type": "string", "format": "binary"}}
_FILES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The file, or a zip of files; Content-Disposition names it.",
        "content": {kind.partition(";")[0]: _BYTES for kind in (*MEDIA_TYPES.values(), "application/zip")},
    }
}


async def _memory(request: Request) -> Memory:
    memory: Memory = request.app.state.comparisons
    return memory


@router.get("/compare", summary="Compare runs", response_model=ComparisonView)
def compare_runs(
    query: Annotated[CompareQuery, Query()],
    _: Viewer,
    session: ReadSession,
    memory: Annotated[Memory, Depends(_memory)],
) -> Response:
    """Runs are grouped by config apart from name and seed, and each such configuration is compared with the baseline.

    Curves over steps, backward passes, hours and tokens; the cost to match the baseline's peak; accuracy at equal
    budgets; intervals over seeds and over problems; what was not equal; and a sentence about what follows from it.
    A run without evaluations is listed in `left_out` with the reason.
    """
    return Response(service.compare_as_json(session, query, memory), media_type="application/json")


@router.get("/groups/{group_id}/heatmap", summary="A sweep over two settings")
def group_heat_map(
    group_id: GroupId, query: Annotated[HeatMapQuery, Query()], _: Viewer, session: ReadSession
) -> HeatMapView:
    """The mean over seeds for each pair of values of two settings that the group varies."""
    return heat.group_heat_map(session, group_id, query)


@router.get("/export", summary="Metrics and evaluations as files", response_class=StreamingResponse, responses=_FILES)
def export_runs(query: Annotated[ExportQuery, Query()], _: Viewer, database: DatabaseDep) -> StreamingResponse:
    """Everything that runs reported, without a lock-in.

    metrics: one row a value (run, name, attempt, step, metric, value). evaluations: one row a score; as jsonl the
    records whole, scores of every problem included. runs: what each is, with its config. In csv and jsonl NaN and
    the infinities are the words NaN, Infinity, -Infinity; in parquet they are floats.
    """
    ids = (split_ids(query.runs, "runs"), split_ids(query.groups, "groups"))
    with database.reading() as session:
        runs = wanted_runs(session, *ids)
    file = exports.export(database, runs, query.format, query.parts)
    disposition = f'attachment; filename="{file.name}"'
    return StreamingResponse(file.pieces, media_type=file.media_type, headers={"Content-Disposition": disposition})
