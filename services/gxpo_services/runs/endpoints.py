"""`/runs`: submit, list and control runs."""

from __future__ import annotations

from typing import Annotated, Any

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
from gxpo_services.api.fields import RunId
from gxpo_services.api.idempotency import ETAG_HEADER, IfMatch, Submission, answer, creation_responses, plain_answer
from gxpo_services.outputs import files
from gxpo_services.run_states import Action
from gxpo_services.runs import schemas, service
from gxpo_services.runs.schemas import (
    BulkAnswer,
    BulkRequest,
    CloneRequest,
    ListQuery,
    RunDetail,
    RunPage,
    RunPatch,
    RunRequest,
    RunValidation,
)

router = APIRouter(route_class=ServiceRoute, prefix="/runs", tags=["runs"], responses=responses(401, 403, 422, 503))

_WITH_ETAG: dict[int | str, Any] = {200: {"headers": ETAG_HEADER}}
_MADE = creation_responses(RunDetail, "run", "The run is queued.", "The run that this key created before.")


@router.post("", status_code=201, summary="Submit a run", response_model=RunDetail, responses=_MADE)
def submit_run(body: RunRequest, by: Submission) -> Response:
    """Queue a run. A retry with the same `Idempotency-Key` returns the run created before (200)."""
    return _created(by, service.submit(by.session, by.settings, by.principal, body, by.key))


@router.post(
    "/validate",
    summary="Check a run without submitting it",
    response_model=RunValidation,
    responses=responses(400, 413),
)
def validate_run(body: RunRequest, _: Submitter, settings: Settings, session: ReadSession) -> Response:
    """All invalid settings, the cost in backward passes, the complete config, and earlier runs with the same config."""
    return answer(service.validate(session, settings, body))


@router.get("", summary="List runs", response_model=RunPage)
def list_runs(query: Annotated[ListQuery, Query()], _: Viewer, session: ReadSession) -> Response:
    """Filtered, sorted by a column or a metric, with keyset pages: new runs do not shift them."""
    return plain_answer(service.list_runs(session, query))


@router.get("/{run_id}", summary="A run", response_model=RunDetail, responses=_WITH_ETAG | responses(404))
def get_run(run_id: RunId, _: Viewer, session: ReadSession) -> Response:
    """State, progress, config and cost of one run."""
    run = service.detail(session, service.find(session, run_id))
    return answer(run, ETag=schemas.version(run))


@router.patch(
    "/{run_id}",
    summary="Change a run's name, tags, notes, priority",
    response_model=RunDetail,
    responses=_WITH_ETAG | responses(400, 404, 412, 413),
)
def patch_run(
    run_id: RunId, body: RunPatch, principal: Submitter, session: WriteSession, if_match: IfMatch = None
) -> Response:
    """Omitted members keep their values, null resets to the default. With `If-Match` the change is made only if nobody
    has edited the run since. The config of a run is immutable; clone the run with overrides instead."""
    changed = service.patch(session, run_id, body, if_match, principal)
    return answer(changed, ETag=schemas.version(changed))


@router.delete("/{run_id}", status_code=204, summary="Delete a run that has ended", responses=responses(404, 409))
def delete_run(
    run_id: RunId,
    principal: Submitter,
    settings: Settings,
    session: WriteSession,
    database: DatabaseDep,
    background: BackgroundTasks,
) -> None:
    """Removes its record, metrics, samples, log and checkpoints. Allowed for the submitting token and for admins."""
    service.delete(session, settings.artifacts, principal, run_id)
    background.add_task(files.empty_trash, settings.artifacts, database)


@router.post("/actions", summary="One action on many runs", response_model=BulkAnswer, responses=responses(400, 413))
def act_on_runs(
    body: BulkRequest,
    principal: Submitter,
    settings: Settings,
    session: WriteSession,
    database: DatabaseDep,
    background: BackgroundTasks,
) -> Response:
    """Cancel, pause, resume, archive, unarchive or delete runs. The answer says of each run what became of it: one that
    refuses the action does not stop the others."""
    done = service.act_on_all(session, settings.artifacts, principal, body)
    background.add_task(files.empty_trash, settings.artifacts, database)
    return answer(done)


def _add_action(action: Action, summary: str, words: str) -> None:
    @router.post(
        f"/{{run_id}}/{action}",
        name=f"{action}_run",
        summary=summary,
        description=words,
        response_model=RunDetail,
        responses=responses(404, 409),
    )
    def act(run_id: RunId, principal: Submitter, session: WriteSession) -> Response:
        return answer(service.act(session, run_id, action, actor=principal.actor))


_add_action(
    "cancel",
    "Cancel a run",
    "A queued or paused run is cancelled immediately; a running one stops at the end of its step.",
)
_add_action(
    "pause",
    "Pause a run",
    "The trainer writes a checkpoint at the end of its step, exits and frees its resources.",
)
_add_action("resume", "Resume a paused run", "The run is queued again and resumes from its checkpoint.")


@router.post(
    "/{run_id}/clone",
    status_code=201,
    summary="Submit a copy of a run",
    response_model=RunDetail,
    responses=_MADE | responses(404),
)
def clone_run(run_id: RunId, by: Submission, body: CloneRequest | None = None) -> Response:
    """A new run with the same config plus overrides; `parent_id` names the original."""
    made = service.clone(by.session, by.settings, by.principal, run_id, body or CloneRequest(), by.key)
    return _created(by, made)


@router.post(
    "/{run_id}/retry",
    status_code=201,
    summary="Retry a failed or cancelled run",
    response_model=RunDetail,
    responses=_MADE | responses(404),
)
def retry_run(run_id: RunId, by: Submission) -> Response:
    """A new run with the same config, in the same group; `parent_id` names the original."""
    return _created(by, service.retry(by.session, by.settings, by.principal, run_id, by.key))


def _created(by: Submission, made: tuple[RunDetail, bool]) -> Response:
    run, is_new = made
    return by.created(run, is_new, "get_run", run_id=run.id)
