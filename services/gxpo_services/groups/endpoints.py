"""`/groups` and `/sweeps`: groups of runs."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel

from gxpo_services.api.answers import answer
from gxpo_services.api.dependencies import ReadSession, ServiceRoute, Settings, Submitter, Viewer, WriteSession
from gxpo_services.api.errors import responses
from gxpo_services.api.fields import GroupId, Text
from gxpo_services.api.idempotency import IdempotencyHeader
from gxpo_services.groups import service
from gxpo_services.groups.presets import preset_views
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

_LOCATION = {"Location": {"description": "URL of the group.", "schema": {"type": "string"}}}
_MADE: dict[int | str, dict[str, Any]] = {
    201: {"description": "Created.", "headers": _LOCATION},
    **responses(400, 409, 410, 413),
}
_BEFORE = "The resource that this key created before."


@router.post(
    "/sweeps",
    status_code=201,
    summary="Submit a sweep",
    response_model=SweepAnswer,
    responses=_MADE | {200: {"model": SweepAnswer, "description": _BEFORE, "headers": _LOCATION}},
)
def submit_sweep(
    body: SweepRequest,
    principal: Submitter,
    settings: Settings,
    session: WriteSession,
    request: Request,
    key: IdempotencyHeader = None,
) -> Response:
    """Queue every combination of the grid with every seed as one group, atomically."""
    made, is_new = service.sweep(session, settings, principal, body, key)
    return _made(made, made.group.id, is_new, request)


@router.post("/sweeps/validate", summary="Check a sweep without submitting it", responses=responses(400, 413))
def validate_sweep(body: SweepRequest, _: Submitter, settings: Settings) -> SweepPlan:
    """All invalid settings, or the runs of the sweep and their cost in backward passes."""
    return service.validate(settings, body)


@router.get("/sweeps/presets", summary="Sweep presets")
def list_sweep_presets(_: Viewer) -> list[SweepPresetView]:
    """The paper's ablations, and a comparison of the rules with a learning-rate control."""
    return preset_views()


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
    responses=_MADE | {200: {"model": GroupView, "description": _BEFORE, "headers": _LOCATION}},
)
def create_group(
    body: GroupRequest,
    principal: Submitter,
    session: WriteSession,
    request: Request,
    key: IdempotencyHeader = None,
) -> Response:
    """For runs that are submitted individually with its id."""
    group, is_new = service.make_group(session, principal, body, key)
    return _made(group, group.id, is_new, request)


@router.get("/groups/{group_id}", summary="A group with its runs", response_model=GroupDetail, responses=responses(404))
def get_group(group_id: GroupId, _: Viewer, session: ReadSession) -> Response:
    """The group with the request that created it and its runs."""
    return answer(service.get_group(session, group_id))


def _made(body: BaseModel, group_id: str, is_new: bool, request: Request) -> Response:
    return answer(body, 201 if is_new else 200, location=request.url_for("get_group", group_id=group_id).path)
