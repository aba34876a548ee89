"""`/runs/{run_id}/checkpoints`: list checkpoints, download a policy."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path
from fastapi.responses import StreamingResponse

from gxpo_services.api.dependencies import ServiceRoute, Settings
from gxpo_services.api.errors import responses
from gxpo_services.api.existing_run import ExistingRun
from gxpo_services.api.fields import MAX_STEP
from gxpo_services.checkpoints import service
from gxpo_services.checkpoints.files import zipped
from gxpo_services.checkpoints.schemas import CheckpointsView

router = APIRouter(
    route_class=ServiceRoute, prefix="/runs/{run_id}", tags=["samples"], responses=responses(401, 404, 422, 503)
)


@router.get("/checkpoints", summary="Checkpoints")
def checkpoints(run_id: ExistingRun, settings: Settings) -> CheckpointsView:
    """Checkpoints on disk; the trainer keeps the latest and the best."""
    return service.list_checkpoints(settings, run_id)


@router.get(
    "/checkpoints/{step}/download",
    summary="A checkpoint's policy",
    response_class=StreamingResponse,
    responses={
        200: {"content": {"application/zip": {"schema": {"type": "string", "format": "binary"}}}},
        **responses(409),
    },
)
def download_checkpoint(
    run_id: ExistingRun, step: Annotated[int, Path(ge=0, le=MAX_STEP)], settings: Settings
) -> StreamingResponse:
    """A zip archive of the policy's folder, loadable by transformers and vLLM."""
    files = service.open_policy(settings, run_id, step)
    headers = {"Content-Disposition": f'attachment; filename="{run_id}-step-{step}.zip"'}
    return StreamingResponse(zipped(files), media_type="application/zip", headers=headers)
