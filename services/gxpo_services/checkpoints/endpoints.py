"""`/runs/{run_id}/checkpoints`: list checkpoints, download a policy."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Header, Path
from fastapi.responses import StreamingResponse

from gxpo_services.api.dependencies import ServiceRoute, Settings
from gxpo_services.api.errors import Conflict, NotFound, Problem, responses
from gxpo_services.api.existing_run import ExistingRun
from gxpo_services.api.fields import MAX_STEP
from gxpo_services.api.ranges import requested_range
from gxpo_services.artifacts.run_files import RunFiles
from gxpo_services.checkpoints import files
from gxpo_services.checkpoints.schemas import CheckpointsView, CheckpointView

router = APIRouter(
    route_class=ServiceRoute, prefix="/runs/{run_id}", tags=["samples"], responses=responses(401, 404, 422, 503)
)

_ZIP: dict[str, Any] = {"content": {"application/zip": {"schema": {"type": "string", "format": "binary"}}}}


@router.get("/checkpoints", summary="Checkpoints")
def checkpoints(run_id: ExistingRun, settings: Settings) -> CheckpointsView:
    """Checkpoints on disk; the trainer keeps the latest and the best."""
    found = files.checkpoints(RunFiles(settings.artifacts, run_id))
    best = files.best(found)
    items = [CheckpointView(**asdict(one), best=one is best, newest=one is found[-1]) for one in found]
    return CheckpointsView(items=items)


@router.get(
    "/checkpoints/{step}/download",
    summary="A checkpoint's policy",
    response_class=StreamingResponse,
    responses={
        200: _ZIP,
        206: {"description": "The part that Range names.", **_ZIP},
        **responses(409, 416),
    },
)
def download_checkpoint(
    run_id: ExistingRun,
    step: Annotated[int, Path(ge=0, le=MAX_STEP)],
    settings: Settings,
    range_: Annotated[str | None, Header(alias="Range", max_length=200, description="One range of bytes.")] = None,
    if_range: Annotated[str | None, Header(max_length=200, description="ETag of the earlier part.")] = None,
) -> StreamingResponse:
    """A zip archive of the policy's folder, loadable by transformers and vLLM. With `Range` an interrupted download
    continues."""
    try:
        opened = files.open_policy(RunFiles(settings.artifacts, run_id), step)
    except FileNotFoundError:
        raise NotFound(f"run {run_id} has no checkpoint at step {step}") from None
    except files.TooManyFiles as error:
        raise Conflict(str(error)) from None
    archive = files.PolicyArchive(opened)
    try:
        part = requested_range(range_, archive.size) if if_range in (None, archive.etag) else None
    except Problem:
        archive.close()
        raise
    begin, end = part or (0, archive.size)
    headers = {
        "Content-Disposition": f'attachment; filename="{run_id}-step-{step}.zip"',
        "Content-Length": str(end - begin),
        "Accept-Ranges": "bytes",
        "ETag": archive.etag,
    }
    if part is not None:
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{archive.size}"
    status = 200 if part is None else 206
    return StreamingResponse(archive.pieces(begin, end), status, headers, "application/zip")
