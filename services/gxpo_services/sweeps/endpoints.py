"""`/groups` and `/sweeps`: groups of runs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, BackgroundTasks, Query, Response

from gxpo_services.api.dependencies import (
    DatabaseDep,
    ReadSession,
    ServiceRoute,
    Settings,
    Submitter,
    Viewer,
    WriteSession,
)
from gxpo_services.api.errors import responses
from gxpo_services.api.fields import GroupId, Text
from gxpo_services.api.idempotency import ETAG_HEADER, IfMatch, Submission, answer, creation_responses
from gxpo_services.outputs import files
from gxpo_services.sweeps import service
from gxpo_services.sweeps.grid import PRESETS
from gxpo_services.sweeps.schemas import (
    GroupDetail,
    GroupPage,
    GroupPatch,
    GroupRequest,
    GroupView,
    SweepAnswer,
    SweepPlan,
    SweepPresetView,
    SweepRequest,
)

router = APIRouter(route_class=ServiceRoute, tags=["groups"], responses=responses(401, 403, 422, 503))

_WITH_ETAG: dict[int | str, Any] = {200: {"headers": ETAG_HEADER}}
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


@router.get(
    "/groups/{group_id}",
    summary="A group with its runs",
    response_model=GroupDetail,
    responses=_WITH_ETAG | responses(404),
)
def get_group(group_id: GroupId, _: Viewer, session: ReadSession) -> Response:
    """The group with the request that created it and its runs."""
    group = service.get_group(session, group_id)
    return answer(group, ETag=service.version(group))


@router.patch(
    "/groups/{group_id}",
    summary="Rename a group",
    response_model=GroupView,
    responses=_WITH_ETAG | responses(400, 404, 412, 413),
)
def rename_group(
    group_id: GroupId, body: GroupPatch, principal: Submitter, session: WriteSession, if_match: IfMatch = None
) -> Response:
    """With `If-Match` the group is renamed only if nobody has renamed it since."""
    changed = service.rename(session, group_id, body.name, if_match, actor=principal.actor)
    return answer(changed, ETag=service.version(changed))


@router.post(
    "/groups/{group_id}/cancel",
    summary="Cancel all runs of a group",
    response_model=GroupView,
    responses=responses(404),
)
def cancel_group(group_id: GroupId, principal: Submitter, session: WriteSession) -> Response:
    """Every run that has not ended is cancelled; a study queues no further runs."""
    return answer(service.cancel(session, group_id, actor=principal.actor))


@router.delete("/groups/{group_id}", status_code=204, summary="Delete a group", responses=responses(404, 409))
def delete_group(
    group_id: GroupId,
    principal: Submitter,
    settings: Settings,
    session: WriteSession,
    database: DatabaseDep,
    background: BackgroundTasks,
    runs: Annotated[
        Literal["keep", "delete"], Query(description="keep: they stay without a group. delete: all must have ended.")
    ] = "keep",
) -> None:
    """Allowed for tokens of the name that made the group, and for admins. Its runs are kept unless `runs=delete`."""
    service.delete_with_runs(session, settings.artifacts, principal, group_id, with_runs=runs == "delete")
    background.add_task(files.empty_trash, settings.artifacts, database)
