"""`/groups` and `/sweeps`: groups of runs. Times are seconds since 1970."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Response
from pydantic import BaseModel, Field
from sqlalchemy import Select, func, select, update
from sqlalchemy.orm import Session

from gxpo_services.api.dependencies import (
    ReadSession,
    ServiceRoute,
    Settings,
    Submitter,
    Viewer,
    WriteSession,
    find,
)
from gxpo_services.api.errors import FieldError, Forbidden, Invalid, responses
from gxpo_services.api.fields import Body, GroupId, Page, PageQuery, Word, decode_cursor, encode_cursor
from gxpo_services.api.idempotency import (
    WITH_ETAG,
    IfMatch,
    IsRepeated,
    Submission,
    answer,
    check_match,
    creating,
    etag,
)
from gxpo_services.api.principals import Principal, Role
from gxpo_services.db.tables import SETTING_ORDER, Group, Run
from gxpo_services.outputs import events
from gxpo_services.run_states import TERMINAL, RunState
from gxpo_services.runs import service as runs
from gxpo_services.runs.endpoints import FilesRemoved
from gxpo_services.runs.plan import ExpectedCostView, expected_cost
from gxpo_services.runs.schemas import RunView
from gxpo_services.sweeps.grid import PRESETS, Planned, SweepPresetView, SweepRequest, plan
from gxpo_trainer.config.rules import run_label
from gxpo_trainer.jsonl import plain


class GroupRequest(Body):
    """An empty group, for runs that are submitted individually."""

    name: Word = Field(description="Display name.", examples=["GRPO, SFPO and GXPO"])


class SweepCost(ExpectedCostView):
    """Maximum cost of all runs of a sweep."""

    runs: int
    per_step_words: str = Field(description="Cost per step of each rule.")


class PlannedRun(BaseModel):
    """A run of a planned sweep."""

    name: str
    rule: str
    rule_label: str
    seed: int
    group_values: dict[str, Any] = Field(description="Its settings in the sweep, by dotted path.")
    backward_passes: int | None
    config_sha256: str


class SweepPlan(BaseModel):
    """Result of validating a sweep."""

    valid: bool
    errors: list[FieldError]
    cost: SweepCost | None = Field(description="Null when the sweep is invalid.")
    runs: list[PlannedRun]


class GroupView(BaseModel):
    """A group in a list."""

    id: str = Field(examples=["g01jd5cv3q80000000000"])
    name: str
    kind: str = Field(description="sweep, study, or group for runs submitted individually.")
    created_at: float
    created_by: str
    num_runs: int
    by_state: dict[RunState, int] = Field(description="Number of runs by state.")


class GroupDetail(GroupView):
    """A group with its runs."""

    spec: dict[str, Any] = Field(
        description="The request that created it; of a sweep also its cost and its settings' order."
    )
    runs: list[RunView] = Field(description="In order of creation, at most 1000.")


class GroupPage(Page[GroupView]):
    """A page of the list of groups, newest first."""


class GroupPatch(Body):
    """Changes of a group."""

    name: Word = Field(description="Display name. Names of its runs stay.")


class SweepAnswer(BaseModel):
    """A submitted sweep."""

    group: GroupView
    runs: list[RunView]
    cost: SweepCost


def new_group(
    session: Session, principal: Principal, group_id: str, name: str, kind: str, spec: dict[str, Any]
) -> Group:
    """Insert a group. spec: the request that created it."""
    group = Group(id=group_id, name=name, kind=kind, spec=spec, created_at=time.time(), created_by=principal.name)
    session.add(group)
    session.flush()
    return group


def queue_runs(
    session: Session, principal: Principal, group: Group, planned: Iterable[Planned], request: Mapping[str, Any]
) -> None:
    """Queue the runs of a sweep or study. request: their tags, notes and priority."""
    about = {"notes": request["notes"], "priority": request["priority"], "group": group}
    queued = [runs.new_run(item.config, principal, group_values=plain(item.values), **about) for item in planned]
    message = f"submitted by {group.kind} {group.name!r}"
    runs.queue(session, principal, queued, request["tags"], "submitted", message, group=group.id)


_MOST_RUNS = 1000
"""Runs of a group in one answer."""
_ORDER = "-groups"
CANCELLED = "cancelled"
_COST = "cost"
"""Member of a group's spec: a study queues no further runs."""
router = APIRouter(route_class=ServiceRoute, tags=["groups"], responses=responses(401, 422, 503))

_CREATED = ("group", "Created.", "The resource that this key created before.")


def _planned(body: SweepRequest, repeated: IsRepeated, settings: Settings) -> tuple[SweepRequest, list[Planned] | None]:
    """A sweep and its runs. Resolved before `Submission`: it may take seconds, in which SQLite's writer stays free."""
    return body, None if repeated else plan(body, settings)


@router.post("/sweeps", summary="Submit a sweep", **creating(SweepAnswer, *_CREATED))
def submit_sweep(
    sweep: Annotated[tuple[SweepRequest, list[Planned] | None], Depends(_planned)], by: Submission
) -> Response:
    """Queue every combination of the grid with every seed as one group, atomically."""
    body, planned = sweep
    group_id, earlier = by.claim("sweep", body, Group)
    group = earlier
    if group is None:
        if planned is None:  # its key has just expired
            planned = plan(body, by.settings)
        runs.check_priority(by.principal, body.priority)
        runs.check_queue(by.session, by.settings, by.principal, len(planned))
        order = dict.fromkeys(name for run in planned for name in run.values)
        spec = plain(body.model_dump()) | {SETTING_ORDER: list(order), _COST: _cost(planned).model_dump()}
        group = new_group(by.session, by.principal, group_id, body.name, "sweep", spec)
        queue_runs(by.session, by.principal, group, planned, spec)
    elif _COST not in group.spec:  # of a version that did not store it
        group.spec = {**group.spec, _COST: _cost(plan(body, by.settings)).model_dump()}
    cost = SweepCost.model_validate(group.spec[_COST])
    view = SweepAnswer(group=view_of(by.session, group), runs=_members(by.session, group), cost=cost)
    return by.created(view, earlier is None, "get_group", group_id=group_id)


@router.post("/sweeps/validate", summary="Check a sweep without submitting it")
def validate_sweep(body: SweepRequest, _: Submitter, settings: Settings) -> SweepPlan:
    """All invalid settings, or the runs of the sweep and their cost in backward passes."""
    try:
        planned = plan(body, settings)
    except Invalid as error:
        return SweepPlan(valid=False, errors=error.errors, cost=None, runs=[])
    planned_runs = [
        PlannedRun(
            name=config.name,
            rule=config.learner.rule.name,
            rule_label=run_label(config.learner.rule.model_dump()),
            seed=config.seed,
            group_values=plain(values),
            backward_passes=expected_cost(config).backward_passes,
            config_sha256=config.sha256(),
        )
        for config, values in planned
    ]
    return SweepPlan(valid=True, errors=[], cost=_cost(planned), runs=planned_runs)


@router.get("/sweeps/presets", summary="Sweep presets")
def list_sweep_presets(_: Viewer) -> list[SweepPresetView]:
    """The paper's ablations, and a comparison of the rules with a learning-rate control."""
    return list(PRESETS.values())


@router.get("/groups", summary="List groups", response_model=GroupPage)
def list_groups(page: Annotated[PageQuery, Query()], _: Viewer, session: ReadSession) -> Response:
    """Newest first, with run counts by state."""
    query = select(Group).order_by(Group.number.desc()).limit(page.limit + 1)
    if page.cursor is not None:
        query = query.where(Group.number < decode_cursor(page.cursor, _ORDER, "float")[1])
    groups = session.scalars(query).all()
    more = encode_cursor(_ORDER, None, groups[page.limit - 1].number) if len(groups) > page.limit else None
    return answer(GroupPage(items=_views(session, groups[: page.limit]), next_cursor=more))


@router.post("/groups", summary="Create an empty group", **creating(GroupView, *_CREATED))
def create_group(body: GroupRequest, by: Submission) -> Response:
    """For runs that are submitted individually with its id."""
    group_id, earlier = by.claim("group", body, Group)
    group = earlier
    if group is None:
        group = new_group(by.session, by.principal, group_id, body.name, "group", body.model_dump())
        message = f"group {group.name!r}"
        events.record(by.session, None, by.principal.actor, "group_created", message, group=group_id)
    return by.created(view_of(by.session, group), earlier is None, "get_group", group_id=group_id)


@router.get(
    "/groups/{group_id}",
    summary="A group with its runs",
    response_model=GroupDetail,
    responses=WITH_ETAG | responses(404),
)
def get_group(group_id: GroupId, _: Viewer, session: ReadSession) -> Response:
    """The group with the request that created it and its runs."""
    group = find(session, Group, group_id)
    detail = view_of(session, group).model_dump() | {"spec": group.spec, "runs": _members(session, group)}
    return answer(GroupDetail.model_validate(detail), ETag=etag({"name": group.name}))


@router.patch(
    "/groups/{group_id}",
    summary="Rename a group",
    response_model=GroupView,
    responses=WITH_ETAG | responses(404, 412),
)
def rename_group(
    group_id: GroupId, body: GroupPatch, principal: Submitter, session: WriteSession, if_match: IfMatch = None
) -> Response:
    """With `If-Match` the group is renamed only if nobody has renamed it since."""
    group = find(session, Group, group_id, lock=True)
    check_match(if_match, etag({"name": group.name}), f"group {group_id}")
    if body.name != group.name:
        message = f"group {group.name!r} was renamed to {body.name!r}"
        events.record(session, None, principal.actor, "group_renamed", message, group=group_id)
        group.name = body.name
    session.flush()
    return answer(view_of(session, group), ETag=etag({"name": group.name}))


@router.post(
    "/groups/{group_id}/cancel",
    summary="Cancel all runs of a group",
    response_model=GroupView,
    responses=responses(404),
)
def cancel_group(group_id: GroupId, principal: Submitter, session: WriteSession) -> Response:
    """Every run that has not ended is cancelled; a study queues no further runs."""
    group = find(session, Group, group_id, lock=True)
    if not group.spec.get(CANCELLED):
        group.spec = {**group.spec, CANCELLED: True}
        message = f"group {group.name!r} was cancelled"
        events.record(session, None, principal.actor, "group_cancelled", message, group=group_id)
    for run in session.scalars(_locked(group).where(Run.state.not_in(sorted(TERMINAL)))).all():
        runs.act(session, run, "cancel", actor=principal.actor)
    return answer(view_of(session, group))


@router.delete(
    "/groups/{group_id}",
    status_code=204,
    summary="Delete a group",
    responses=responses(404, 409),
    dependencies=[FilesRemoved],
)
def delete_group(
    group_id: GroupId,
    principal: Submitter,
    session: WriteSession,
    members: Annotated[
        Literal["keep", "delete"],
        Query(alias="runs", description="keep: they stay without a group. delete: all must have ended."),
    ] = "keep",
) -> None:
    """Allowed for tokens of the name that made the group, and for admins. Its runs are kept unless `runs=delete`."""
    group = find(session, Group, group_id, lock=True)
    if group.created_by != principal.name and principal.role < Role.ADMIN:
        raise Forbidden(f"group {group_id} was made by {group.created_by!r}; only that token or an admin may delete it")
    for run in session.scalars(_locked(group)).all():
        if members == "delete":
            runs.delete(session, run, principal)
    kept = update(Run).where(Run.group_number == group.number).values(group_number=None)
    session.execute(kept.execution_options(synchronize_session=False))
    session.delete(group)
    session.flush()
    events.record(session, None, principal.actor, "group_deleted", f"group {group.name!r} was deleted", group=group_id)


def _locked(group: Group) -> Select[Run]:
    """Runs of a group, locked in the order of their ids as by all requests about several runs."""
    query = select(Run).where(Run.group_number == group.number).order_by(Run.id)
    return query.with_for_update(of=Run)


def _members(session: Session, group: Group) -> list[RunView]:
    """In order of creation."""
    query = select(Run.number).where(Run.group_number == group.number).order_by(Run.number).limit(_MOST_RUNS)
    return runs.views(session, session.scalars(query).all())


def view_of(session: Session, group: Group) -> GroupView:
    """A group as lists show it."""
    return _views(session, [group])[0]


def _views(session: Session, groups: Sequence[Group]) -> list[GroupView]:
    counts: dict[int, dict[RunState, int]] = {group.number: {} for group in groups}
    query = select(Run.group_number, Run.state, func.count()).where(Run.group_number.in_(list(counts)))
    for number, state, count in session.execute(query.group_by(Run.group_number, Run.state)):
        if number is not None:
            counts[number][RunState(state)] = count
    return [
        GroupView(
            **{name: getattr(group, name) for name in ("id", "name", "kind", "created_at", "created_by")},
            num_runs=sum(counts[group.number].values()),
            by_state=counts[group.number],
        )
        for group in groups
    ]


def _cost(planned: Sequence[Planned]) -> SweepCost:
    costs = [expected_cost(config) for config, _ in planned]
    steps, passes = [cost.steps for cost in costs], [cost.backward_passes for cost in costs]
    return SweepCost(
        runs=len(costs),
        steps=None if None in steps else sum(filter(None, steps)),
        backward_passes=None if None in passes else sum(filter(None, passes)),
        per_step_words="; ".join(dict.fromkeys(cost.per_step_words for cost in costs)),
    )
