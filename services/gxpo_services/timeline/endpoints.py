"""`/runs/{run_id}/timeline`: what each process did in the last steps."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from gxpo_services.api.dependencies import ServiceRoute, Settings
from gxpo_services.api.errors import responses
from gxpo_services.api.existing_run import ExistingRun
from gxpo_services.artifacts.run_files import RunFiles
from gxpo_services.timeline.schemas import TimelineView
from gxpo_services.timeline.timeline_file import last_steps

router = APIRouter(
    route_class=ServiceRoute, prefix="/runs/{run_id}", tags=["samples"], responses=responses(401, 404, 422, 503)
)


@router.get("/timeline", summary="Timeline of the last steps")
def timeline(
    run_id: ExistingRun,
    settings: Settings,
    steps: Annotated[int, Query(ge=1, le=50, description="Maximum number of steps.")] = 4,
) -> TimelineView:
    """Sampling, verifying, updating and syncing of engines, verifier and learner, as the trainer recorded them."""
    return TimelineView(items=last_steps(RunFiles(settings.artifacts, run_id), steps))
