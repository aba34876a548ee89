"""`/runs/{run_id}/checkpoints`: list checkpoints, download a policy."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Path
from fastapi.responses import StreamingResponse

from gxpo_services.api.dependencies import ServiceRoute, Settings
from gxpo_services.api.errors import Conflict, NotFound, responses
from gxpo_services.api.existing_run import ExistingRun
from gxpo_services.api.fields import MAX_STEP
from gxpo_services.artifacts.run_files import RunFiles
from gxpo_services.checkpoints import files
from gxpo_services.checkpoints.schemas import CheckpointsView, CheckpointView

router = APIRouter(
    route_class=ServiceRoute, prefix="/runs/{run_id}", tags=["samples"], responses=responses(401, 404, 422, 503)
)


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
        200: {"content": {"application/zip": {"schema": {"type": "string", "format": "binary"}}}},
        **responses(409),
    },
)
def download_checkpoint(
    run_id: ExistingRun, step: Annotated[int, Path(ge=0, le=MAX_STEP)], settings: Settings
) -> StreamingResponse:
    """A zip archive of the policy's folder, loadable by transformers and vLLM."""
    try:
        opened = files.open_policy(RunFiles(settings.artifacts, run_id), step)
    except FileNotFoundError:
        raise NotFound(f"run {run_id} has no checkpoint at step {step}") from None
    except files.TooManyFiles as error:
        raise Conflict(str(error)) from None
    headers = {"Content-Disposition": f'attachment; filename="{run_id}-step-{step}.zip"'}
    return StreamingResponse(files.zipped(opened), media_type="application/zip", headers=headers)
