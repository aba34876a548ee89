"""`/groups` and `/sweeps`: groups of runs."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response

from gxpo_services.api.answers import answer
from gxpo_services.api.dependencies import ReadSession, ServiceRoute, Settings, Submitter, Viewer
from gxpo_services.api.errors import responses
from gxpo_services.api.fields import GroupId, Text
from gxpo_services.api.submission import Submission, creation_responses
from gxpo_services.groups import service
from gxpo_services.groups.presets import PRESETS
from gxpo_services.groups.schemas import (
    GroupDetail,
    GroupPage,
    GroupRequest,
    GroupView,
    SweepAnswer,
    SweepPlan,
    SweepPresetView,
    SweepRequest,
)

router = APIRouter(route_class=ServiceRoute, tags=["groups"], responses=responses(401, 403, 422, 503))

_CREATED = ("group", "Created.", "The resource that this key created before.")


@router.post(
    "/sweeps",
    status_code=201,
    summary="Submit a sweep",
    response_model=SweepAnswer,
    responses=creation_responses(SweepAnswer, *_CREATED),
)
def submit_sweep(body: SweepRequest, by: Submission) -> Response:
    """Queue every combination of the grid with every seed as one group, atomically."""
    made, is_new = service.sweep(by.session, by.settings, by.principal, body, by.key)
    return by.created(made, is_new, "get_group", group_id=made.group.id)


@router.post("/sweeps/validate", summary="Check a sweep without submitting it", responses=responses(400, 413))
def validate_sweep(body: SweepRequest, _: Submitter, settings: Settings) -> SweepPlan:
    """All invalid settings, or the runs of the sweep and their cost in backward passes."""
    return service.validate(settings, body)


@router.get("/sweeps/presets", summary="Sweep presets")
def list_sweep_presets(_: Viewer) -> list[SweepPresetView]:
    """The paper's ablations, and a comparison of the rules with a learning-rate control."""
    return list(PRESETS.values())


@router.get("/groups", summary="List groups", response_model=GroupPage)
def list_groups(
    _: Viewer,
    session: ReadSession,
    limit: Annotated[int, Query(ge=1, le=200, description="Page size.")] = 50,
    cursor: Annotated[Text | None, Query(max_length=2000, description="`next_cursor` of the previous page.")] = None,
) -> Response:
    """Newest first, with run counts by state."""
    return answer(service.list_groups(session, cursor, limit))


@router.post(
    "/groups",
    status_code=201,
    summary="Create an empty group",
    response_model=GroupView,
    responses=creation_responses(GroupView, *_CREATED),
)
def create_group(body: GroupRequest, by: Submission) -> Response:
    """For runs that are submitted individually with its id."""
    group, is_new = service.make_group(by.session, by.principal, body, by.key)
    return by.created(group, is_new, "get_group", group_id=group.id)


@router.get("/groups/{group_id}", summary="A group with its runs", response_model=GroupDetail, responses=responses(404))
def get_group(group_id: GroupId, _: Viewer, session: ReadSession) -> Response:
    """The group with the request that created it and its runs."""
    return answer(service.get_group(session, group_id))
