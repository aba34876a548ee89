"""Operations on groups and sweeps."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from gxpo_services.api import idempotency
from gxpo_services.api.errors import Conflict, Forbidden, Gone, Invalid, NotFound
from gxpo_services.api.fields import Position, decode_cursor, encode_cursor, new_id
from gxpo_services.api.idempotency import check_match, etag
from gxpo_services.api.principals import Principal, Role
from gxpo_services.db.tables import Group, Run, RunDocument
from gxpo_services.outputs import events
from gxpo_services.run_states import TERMINAL, RunState
from gxpo_services.runs import service as runs
from gxpo_services.runs.plan import expected_cost
from gxpo_services.settings import ServiceSettings
from gxpo_services.sweeps.grid import Planned, plan
from gxpo_services.sweeps.schemas import (
    GroupDetail,
    GroupPage,
    GroupRequest,
    GroupView,
    PlannedRun,
    SweepAnswer,
    SweepCost,
    SweepPlan,
    SweepRequest,
)
from gxpo_trainer.compare.rows import rule_label
from gxpo_trainer.config import RunConfig
from gxpo_trainer.jsonl import plain


def find(session: Session, group_id: str, *, lock: bool = False) -> Group:
    """A group by its public id. lock: SELECT … FOR UPDATE. Raises NotFound."""
    query = select(Group).where(Group.id == group_id)
    group = session.scalar(query.with_for_update().execution_options(populate_existing=True) if lock else query)
    if group is None:
        raise NotFound(f"there is no group {group_id}")
    return group


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
    queued = []
    for item in planned:
        run = runs.new_run(
            item.config,
            principal,
            notes=request["notes"],
            priority=request["priority"],
            group=group,
            group_values=plain(item.values),
        )
        runs.set_tags(run, request["tags"])
        queued.append(run)
    runs.add(session, queued)
    for run in queued:
        message = f"submitted by {group.kind} {group.name!r}"
        events.record(session, run.number, principal.actor, "submitted", message, group=group.id)
    session.flush()


_MOST_RUNS = 1000
"""Runs of a group in one answer."""
_ORDER = "-groups"
CANCELLED = "cancelled"
"""Member of a group's spec: a study queues no further runs."""


def make_group(
    session: Session, principal: Principal, request: GroupRequest, key: str | None
) -> tuple[GroupView, bool]:
    """Create an empty group; returns it and whether it is new."""
    group_id = new_id("g")
    owner = idempotency.claim(session, principal, key, "group", request, group_id)
    if owner != group_id:
        return view_of(session, repeated(session, owner)), False
    group = new_group(session, principal, group_id, request.name, "group", request.model_dump())
    events.record(session, None, principal.actor, "group_created", f"group {group.name!r}", group=group.id)
    return view_of(session, group), True


def sweep(
    session: Session, server: ServiceSettings, principal: Principal, request: SweepRequest, key: str | None
) -> tuple[SweepAnswer, bool]:
    """Queue all runs of a sweep as a group; returns it and whether it is new. Raises Invalid, Conflict, Gone."""
    planned = plan(request, server)  # before the transaction starts: it may take a second
    group_id = new_id("g")
    owner = idempotency.claim(session, principal, key, "sweep", request, group_id)
    if owner != group_id:
        return _answer(session, repeated(session, owner)), False
    runs.check_priority(principal, request.priority)
    runs.check_queue(session, server, principal, len(planned))
    spec = plain(request.model_dump())
    group = new_group(session, principal, group_id, request.name, "sweep", spec)
    queue_runs(session, principal, group, planned, spec)
    return _answer(session, group), True


def validate(server: ServiceSettings, request: SweepRequest) -> SweepPlan:
    """Validate a sweep and compute its cost without submitting it."""
    try:
        planned = plan(request, server)
    except Invalid as error:
        return SweepPlan(valid=False, errors=error.errors, cost=None, runs=[])
    planned_runs = [
        PlannedRun(
            name=item.config.name,
            rule=item.config.learner.rule.name,
            rule_label=rule_label(item.config.model_dump()),
            seed=item.config.seed,
            group_values=plain(item.values),
            backward_passes=expected_cost(item.config).backward_passes,
            config_sha256=item.config.sha256(),
        )
        for item in planned
    ]
    return SweepPlan(valid=True, errors=[], cost=_cost([item.config for item in planned]), runs=planned_runs)


def list_groups(session: Session, cursor: str | None, limit: int) -> GroupPage:
    """Newest first. Raises Invalid for a cursor of another list."""
    query = select(Group).order_by(Group.number.desc()).limit(limit + 1)
    if cursor is not None:
        query = query.where(Group.number < decode_cursor(cursor, _ORDER, "float").number)
    groups = session.scalars(query).all()
    more = encode_cursor(_ORDER, Position(None, groups[limit - 1].number)) if len(groups) > limit else None
    return GroupPage(items=_views(session, groups[:limit]), next_cursor=more)


def get_group(session: Session, group_id: str) -> GroupDetail:
    """Raises NotFound."""
    group = find(session, group_id)
    members = runs.views(session, _run_numbers(session, group))
    return GroupDetail(**view_of(session, group).model_dump(), spec=group.spec, runs=members)


def version(group: GroupView) -> str:
    """Entity tag of what people edit of a group."""
    return etag({"name": group.name})


def rename(session: Session, group_id: str, name: str, if_match: str | None, *, actor: str) -> GroupView:
    """Raises NotFound, PreconditionFailed."""
    group = find(session, group_id, lock=True)
    check_match(if_match, etag({"name": group.name}), f"group {group_id}")
    if name != group.name:
        message = f"group {group.name!r} was renamed to {name!r}"
        events.record(session, None, actor, "group_renamed", message, group=group_id)
        group.name = name
    session.flush()
    return view_of(session, group)


def cancel(session: Session, group_id: str, *, actor: str) -> GroupView:
    """Cancel every run of a group that has not ended; a study queues no further runs. Idempotent. Raises NotFound."""
    group = find(session, group_id, lock=True)
    if not group.spec.get(CANCELLED):
        group.spec = {**group.spec, CANCELLED: True}
        events.record(session, None, actor, "group_cancelled", f"group {group.name!r} was cancelled", group=group_id)
    unended = select(Run.id).where(Run.group_number == group.number, Run.state.not_in(sorted(TERMINAL)))
    for run_id in session.scalars(unended.order_by(Run.number)).all():
        # A run that ends meanwhile needs no request.
        with suppress(Conflict, NotFound):
            runs.act(session, run_id, "cancel", actor=actor)
    session.flush()
    return view_of(session, group)


def delete_with_runs(session: Session, root: Path, principal: Principal, group_id: str, *, with_runs: bool) -> None:
    """Delete a group. Its runs stay without a group, or are deleted with it.

    Raises NotFound; Forbidden unless the principal's token made the group or is an admin's; what deleting a run raises.
    """
    group = find(session, group_id, lock=True)
    if group.created_by != principal.name and principal.role < Role.ADMIN:
        raise Forbidden(f"group {group_id} was made by {group.created_by!r}; only that token or an admin may delete it")
    if with_runs:
        members = select(Run.id).where(Run.group_number == group.number).order_by(Run.number)
        for run_id in session.scalars(members).all():
            runs.delete(session, root, principal, run_id)
    session.flush()
    kept = update(Run).where(Run.group_number == group.number).values(group_number=None)
    session.execute(kept.execution_options(synchronize_session=False))
    session.delete(group)
    session.flush()
    events.record(session, None, principal.actor, "group_deleted", f"group {group.name!r} was deleted", group=group_id)


def repeated(session: Session, group_id: str, kind: str = "group") -> Group:
    """The group that an earlier request with the same idempotency key created. Raises Gone when it was deleted."""
    group = session.scalar(select(Group).where(Group.id == group_id))
    if group is None:
        raise Gone(f"{kind} {group_id}, created with this Idempotency-Key, no longer exists; use a new key")
    return group


def _run_numbers(session: Session, group: Group) -> Sequence[int]:
    """In order of creation."""
    query = select(Run.number).where(Run.group_number == group.number).order_by(Run.number).limit(_MOST_RUNS)
    return session.scalars(query).all()


def _answer(session: Session, group: Group) -> SweepAnswer:
    numbers = _run_numbers(session, group)
    documents = select(RunDocument.config).where(RunDocument.run_number.in_(numbers)).order_by(RunDocument.run_number)
    cost = _cost([RunConfig.model_validate(config) for config in session.scalars(documents)])
    return SweepAnswer(group=view_of(session, group), runs=runs.views(session, numbers), cost=cost)


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


def _cost(configs: Sequence[RunConfig]) -> SweepCost:
    costs = [expected_cost(config) for config in configs]
    steps = [cost.steps for cost in costs if cost.steps is not None]
    passes = [cost.backward_passes for cost in costs if cost.backward_passes is not None]
    return SweepCost(
        runs=len(costs),
        steps=sum(steps) if len(steps) == len(costs) else None,
        backward_passes=sum(passes) if len(passes) == len(costs) else None,
        per_step_words="; ".join(dict.fromkeys(cost.words for cost in costs)),
    )
