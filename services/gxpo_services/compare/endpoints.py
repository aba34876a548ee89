"""`/compare`, `/groups/{id}/heatmap` and `/export`.

Comparisons and heat maps are computed in another process. In the service's own they held up every short answer, because
its threads share one interpreter lock: while two viewers compared, a page of runs took nine times as long on SQLite and
three times as long on PostgreSQL. The process starts with the first comparison (1.4 s, 150 MB), is used again for the
next ones, and ends with the service."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, TypeVar

from anyio import BrokenWorkerProcess, to_process
from fastapi import APIRouter, Header, Query, Response
from fastapi.responses import StreamingResponse

from gxpo_services.api.dependencies import DatabaseDep, Heavy, ServiceRoute, Settings, Viewer, held_slot
from gxpo_services.api.errors import Unavailable, responses
from gxpo_services.api.fields import GroupId
from gxpo_services.compare import service
from gxpo_services.compare.export import MEDIA_TYPES, export
from gxpo_services.compare.loading import select_runs, split_ids
from gxpo_services.compare.schemas import CompareQuery, ComparisonView, ExportQuery, HeatMapQuery, HeatMapView
from gxpo_services.db.database import Database
from gxpo_services.settings import ServiceSettings

router = APIRouter(route_class=ServiceRoute, tags=["comparisons"], responses=responses(401, 404, 422, 503))

_TEXT = {"schema": {"type": "string"}}
_FILES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The file, or a zip of files; Content-Disposition names it.",
        "content": {
            MEDIA_TYPES["csv"].partition(";")[0]: _TEXT,
            MEDIA_TYPES["jsonl"]: _TEXT,
            "application/zip": {"schema": {"type": "string", "format": "binary"}},
        },
    }
}
_UNCHANGED: dict[int | str, dict[str, Any]] = {304: {"description": "The comparison of If-None-Match still holds."}}
Result = TypeVar("Result")
_database = cache(Database)  # of the process that compares


async def in_worker(function: Callable[..., Result], settings: ServiceSettings, *arguments: Any) -> Result:
    """Result or exception of a function of a session and the arguments, from the other process.

    Raises Unavailable when that is killed meanwhile.
    """
    database = settings.url, settings.database_timeout_s
    try:
        return await to_process.run_sync(_with_session, function, database, *arguments, cancellable=True)
    except BrokenWorkerProcess as error:
        raise Unavailable("the process that compares runs was killed, perhaps for its memory; retry") from error


def _with_session(function: Callable[..., Result], database: tuple[str, float], *arguments: Any) -> Result:
    with _database(*database).reading() as session:
        return function(session, *arguments)


@router.get(
    "/compare",
    summary="Compare runs",
    response_model=ComparisonView,
    responses=responses(429) | _UNCHANGED,
    dependencies=[Heavy],
)
async def compare_runs(
    query: Annotated[CompareQuery, Query()],
    _: Viewer,
    settings: Settings,
    if_none_match: Annotated[str | None, Header(max_length=100, description="ETag of the comparison you have.")] = None,
) -> Response:
    """Runs are grouped by config, ignoring name and seed, and each configuration is compared with the baseline.

    Curves over steps, backward passes, hours and tokens; the cost to match the baseline's peak; accuracy at equal
    budgets; confidence intervals over seeds and over problems; differing conditions; and what the evidence supports.
    A run without evaluations is listed in `left_out` with the reason.
    """
    body = await in_worker(service.compare_as_json, settings, query)
    headers = {"ETag": f'"{hashlib.sha256(body).hexdigest()[:32]}"'}
    if if_none_match == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type="application/json")


@router.get(
    "/groups/{group_id}/heatmap",
    summary="A sweep over two settings",
    responses=responses(429),
    dependencies=[Heavy],
)
async def group_heat_map(
    group_id: GroupId, query: Annotated[HeatMapQuery, Query()], _: Viewer, settings: Settings
) -> HeatMapView:
    """The mean over seeds for each combination of two varied settings."""
    return await in_worker(service.group_heat_map, settings, group_id, query)


@router.get(
    "/export",
    summary="Metrics and evaluations as files",
    response_class=StreamingResponse,
    responses=_FILES | responses(429),
    dependencies=[held_slot("export_slots")],
)
def export_runs(query: Annotated[ExportQuery, Query()], _: Viewer, database: DatabaseDep) -> StreamingResponse:
    """Everything that runs reported, in open formats.

    metrics: one row per value (run, name, attempt, step, metric, value). evaluations: one row per score; as jsonl the
    full records including the scores of each problem. runs: one row per run, with its config. samples, if asked
    for: one row per response; turns are a list in jsonl and JSON text otherwise. NaN and the infinities are the strings
    NaN, Infinity, -Infinity.
    """
    run_ids, group_ids = split_ids(query.runs, "runs"), split_ids(query.groups, "groups")
    with database.reading() as session:
        runs = select_runs(session, run_ids, group_ids)
    name, media_type, pieces = export(database, runs, query.format, query.parts)
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return StreamingResponse(pieces, media_type=media_type, headers=headers)
