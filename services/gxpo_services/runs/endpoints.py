"""`/runs`: submit, list, change and control runs."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, BackgroundTasks, Depends, Query, Response
from sqlalchemy import select
from sqlalchemy.orm import Session

from gxpo_services.api.dependencies import (
    DatabaseDep,
    ReadSession,
    ServiceRoute,
    Settings,
    Submitter,
    Viewer,
    WriteSession,
    find,
)
from gxpo_services.api.errors import Conflict, FieldError, Invalid, Problem, ProblemDetails, responses
from gxpo_services.api.fields import RunId
from gxpo_services.api.idempotency import WITH_ETAG, IfMatch, IsRepeated, Submission, answer, check_match, creating
from gxpo_services.api.principals import Role
from gxpo_services.db.tables import STUDY, Group, Run
from gxpo_services.outputs import files
from gxpo_services.run_states import TERMINAL, Action, RunState
from gxpo_services.runs import listing, schemas, service
from gxpo_services.runs.configs import checked, invalid, overridden, settings_of, stored
from gxpo_services.runs.plan import expected_cost, planned
from gxpo_services.settings import ServiceSettings
from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.io import to_toml

router = APIRouter(route_class=ServiceRoute, prefix="/runs", tags=["runs"], responses=responses(401, 422, 503))

_MADE = creating(schemas.RunDetail, "run", "The run is queued.", "The run that this key created before.", 404)
_MOST_EQUAL_RUNS = 10


def _config(body: schemas.RunRequest, server: ServiceSettings) -> RunConfig | list[FieldError]:
    """The config of a request, or what is wrong with it."""
    try:
        config = checked(settings_of(body), server)
    except Invalid as error:
        return error.errors
    return config if body.name is None else config.model_copy(update={"name": body.name})


_Request = tuple[schemas.RunRequest, RunConfig | list[FieldError] | None]


def _checked(body: schemas.RunRequest, repeated: IsRepeated, settings: Settings) -> _Request:
    """Resolved before `Submission`: reading a run's files takes time, in which SQLite's writer stays free."""
    return body, None if repeated else _config(body, settings)


@router.post("", summary="Submit a run", **_MADE)
def submit_run(request: Annotated[_Request, Depends(_checked)], by: Submission) -> Response:
    """Queue a run. A retry with the same `Idempotency-Key` returns the run created before (200)."""
    body, config = request
    run_id, earlier = by.claim("submit", body, Run)
    if earlier is not None:
        return _created(by, earlier, is_new=False)
    if config is None:  # its key has just expired
        config = _config(body, by.settings)
    config, group = _prepared(by.session, config, body.group)
    service.check_priority(by.principal, body.priority)
    service.check_queue(by.session, by.settings, by.principal)
    parent = (find(by.session, Run, body.clone_of), "clone") if body.clone_of else None
    run = service.new_run(
        config, by.principal, run_id=run_id, notes=body.notes, priority=body.priority, group=group, parent=parent
    )
    return _add(by, run, body.tags, "cloned" if parent else "submitted")


@router.post("/validate", summary="Check a run without submitting it", response_model=schemas.RunValidation)
def validate_run(body: schemas.RunRequest, _: Submitter, settings: Settings, session: ReadSession) -> Response:
    """All invalid settings, the cost in backward passes, the complete config, and earlier runs with the same config."""
    try:
        config, _group = _prepared(session, _config(body, settings), body.group)
    except Invalid as error:
        wrong = {"valid": False, "errors": error.errors, "cost": None, "config": None, "toml": None, "equal_runs": []}
        return answer(schemas.RunValidation.model_validate(wrong))
    same = select(Run.number).where(Run.config_sha256 == config.sha256())
    equal_runs = session.scalars(same.order_by(Run.number.desc()).limit(_MOST_EQUAL_RUNS)).all()
    plan, problem = planned(config, settings)
    validation = schemas.RunValidation(
        valid=True,
        errors=[],
        cost=expected_cost(config),
        config=stored(config),
        toml=to_toml(config),
        equal_runs=service.views(session, equal_runs),
        plan=plan,
        plan_problem=problem,
    )
    return answer(validation)


def _prepared(
    session: Session, config: RunConfig | list[FieldError], group_id: str | None
) -> tuple[RunConfig, Group | None]:
    """Config and group of a request. Raises Invalid with every invalid member."""
    errors = config if isinstance(config, list) else []
    group = None
    try:
        group = _group(session, group_id)
    except Invalid as error:
        errors = [*errors, *error.errors]
    if isinstance(config, list) or errors:
        raise invalid(errors)
    return config, group


def _group(session: Session, group_id: str | None) -> Group | None:
    if group_id is None:
        return None
    group = session.scalar(select(Group).where(Group.id == group_id))
    if group is None:
        raise Invalid.of("group", f"there is no group {group_id}; omit it or create one first")
    if group.kind == STUDY:
        raise Invalid.of("group", f"{group_id} is a study, which queues its own runs; omit it or name another group")
    return group


def _add(by: Submission, run: Run, tags: list[str], kind: str) -> Response:
    """Queue a run. kind: of the event. Raises NotFound for a group deleted meanwhile."""
    if run.group is not None:
        find(by.session, Group, run.group.id, lock=True)
    source = f" from {run.parent_id}" if run.parent_id else ""
    service.queue(by.session, by.principal, [run], tags, kind, f"{kind}{source}", parent=run.parent_id)
    return _created(by, run, is_new=True)


def _created(by: Submission, run: Run, *, is_new: bool) -> Response:
    return by.created(service.detail(by.session, run), is_new, "get_run", run_id=run.id)


@router.get("", summary="List runs", response_model=schemas.RunPage)
def list_runs(query: Annotated[schemas.ListQuery, Query()], _: Viewer, session: ReadSession) -> Response:
    """Filtered, sorted by a column or a metric, with keyset pages: new runs do not shift them."""
    return answer(listing.list_runs(session, query))


@router.get("/{run_id}", summary="A run", response_model=schemas.RunDetail, responses=WITH_ETAG | responses(404))
def get_run(run_id: RunId, _: Viewer, session: ReadSession) -> Response:
    """State, progress, config and cost of one run."""
    run = service.detail(session, find(session, Run, run_id))
    return answer(run, ETag=schemas.version(run))


@router.patch(
    "/{run_id}",
    summary="Change a run's name, tags, notes, priority",
    response_model=schemas.RunDetail,
    responses=WITH_ETAG | responses(404, 412),
)
def patch_run(
    run_id: RunId, body: schemas.RunPatch, principal: Submitter, session: WriteSession, if_match: IfMatch = None
) -> Response:
    """Omitted members keep their values, null resets to the default. With `If-Match` the change is made only if nobody
    has edited the run since. The config of a run is immutable; clone the run with overrides instead."""
    run = find(session, Run, run_id, lock=True)
    if if_match is not None:
        check_match(if_match, schemas.version(service.detail(session, run)), f"run {run_id}")
    service.patch(session, run, body, principal)
    changed = service.detail(session, run)
    return answer(changed, ETag=schemas.version(changed))


async def _remove_files(settings: Settings, database: DatabaseDep, background: BackgroundTasks) -> None:
    background.add_task(files.remove_deleted, settings.artifacts, database)


FilesRemoved = Depends(_remove_files)
"""Dependency of a route that deletes runs: their folders are removed after the commit."""


@router.delete(
    "/{run_id}",
    status_code=204,
    summary="Delete a run that has ended",
    responses=responses(404, 409),
    dependencies=[FilesRemoved],
)
def delete_run(run_id: RunId, principal: Submitter, session: WriteSession) -> None:
    """Removes its record, metrics, samples, log and checkpoints. Allowed for the submitting token and for admins."""
    service.delete(session, find(session, Run, run_id, lock=True), principal)


@router.post(
    "/actions", summary="One action on many runs", response_model=schemas.BulkAnswer, dependencies=[FilesRemoved]
)
def act_on_runs(body: schemas.BulkRequest, principal: Submitter, session: WriteSession) -> Response:
    """Cancel, pause, resume, archive, unarchive or delete runs. The answer says of each run what became of it: one that
    refuses the action does not stop the others."""
    items = {}
    for run_id in sorted(set(body.runs)):
        state, problem = None, None
        try:
            run = find(session, Run, run_id, lock=True)
            state = RunState(run.state)
            if body.action == "delete":
                service.delete(session, run, principal)
                state = None
            elif body.action == "archive" or body.action == "unarchive":
                service.patch(session, run, schemas.RunPatch(archived=body.action == "archive"), principal)
            else:
                service.act(session, run, body.action, actor=principal.actor)
                state = RunState(run.state)
        except Problem as error:
            problem = ProblemDetails(type=error.type, title=error.title, status=error.status, detail=error.detail)
        items[run_id] = schemas.BulkItem(run=run_id, state=state, problem=problem)
    return answer(schemas.BulkAnswer(items=[items[run_id] for run_id in dict.fromkeys(body.runs)]))


def _add_action(action: Action, summary: str, words: str) -> None:
    @router.post(
        f"/{{run_id}}/{action}",
        name=f"{action}_run",
        summary=summary,
        description=words,
        response_model=schemas.RunDetail,
        responses=responses(404, 409),
    )
    def act(run_id: RunId, principal: Submitter, session: WriteSession) -> Response:
        run = find(session, Run, run_id, lock=True)
        service.act(session, run, action, actor=principal.actor)
        return answer(service.detail(session, run))


_CANCEL = "A queued or paused run is cancelled immediately; a running one stops at the end of its step."
_add_action("cancel", "Cancel a run", _CANCEL)
_add_action("pause", "Pause a run", "The trainer writes a checkpoint at the end of its step and frees its resources.")
_add_action("resume", "Resume a paused run", "The run is queued again and resumes from its checkpoint.")


def _retried(run_id: RunId, repeated: IsRepeated, settings: Settings, database: DatabaseDep) -> RunConfig | None:
    return _cloned(run_id, repeated, settings, database)


def _cloned(
    run_id: RunId,
    repeated: IsRepeated,
    settings: Settings,
    database: DatabaseDep,
    body: schemas.CloneRequest | None = None,
) -> RunConfig | None:
    """The config of a copy, resolved as in `_checked`; None where there is none to check."""
    if repeated:
        return None
    with database.reading() as session:
        original = session.scalar(select(Run).where(Run.id == run_id))
        config = None if original is None else original.config
    overrides = () if body is None else body.overrides
    return None if config is None else checked(overridden(config, overrides, "overrides"), settings)


@router.post("/{run_id}/clone", summary="Submit a copy of a run", **_MADE)
def clone_run(
    run_id: RunId,
    config: Annotated[RunConfig | None, Depends(_cloned)],
    by: Submission,
    body: schemas.CloneRequest | None = None,
) -> Response:
    """A new run with the same config plus overrides; `parent_id` names the original."""
    return _copy(by, run_id, config, body or schemas.CloneRequest(), "clone")


@router.post("/{run_id}/retry", summary="Retry a failed or cancelled run", **_MADE)
def retry_run(run_id: RunId, config: Annotated[RunConfig | None, Depends(_retried)], by: Submission) -> Response:
    """A new run with the same config, in the same group; `parent_id` names the original."""
    return _copy(by, run_id, config, schemas.CloneRequest(), "retry")


def _copy(
    by: Submission,
    original_id: str,
    config: RunConfig | None,
    request: schemas.CloneRequest,
    kind: Literal["clone", "retry"],
) -> Response:
    run_id, earlier = by.claim(f"{kind} {original_id}", request, Run)
    if earlier is not None:
        return _created(by, earlier, is_new=False)
    original = find(by.session, Run, original_id)
    if kind == "retry" and original.state not in schemas.RETRIED:
        fix = "clone it" if original.state in TERMINAL else "cancel it first, or clone it"
        raise Conflict(f"run {original_id} is {original.state}; retry is for failed and cancelled runs: {fix}")
    if config is None:  # its key has just expired
        config = checked(overridden(original.config, request.overrides, "overrides"), by.settings)
    if request.priority is not None:
        service.check_priority(by.principal, request.priority)
    service.check_queue(by.session, by.settings, by.principal)
    copied = original.priority if by.principal.role >= Role.ADMIN else min(original.priority, 0)
    name = request.name or (config.name if config.name != original.config["name"] else original.name)
    run = service.new_run(
        config.model_copy(update={"name": name}),
        by.principal,
        run_id=run_id,
        notes=original.notes if request.notes is None else request.notes,
        priority=copied if request.priority is None else request.priority,
        parent=(original, kind),
        group=original.group if kind == "retry" else _group(by.session, request.group),
        group_values=original.group_values if kind == "retry" else None,
    )
    tags = [tag.tag for tag in original.tags] if request.tags is None else request.tags
    return _add(by, run, tags, {"clone": "cloned", "retry": "retried"}[kind])
