"""Operations on groups and sweeps.

SQL of groups.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from sqlalchemy import delete, func, select, update
from sqlalchemy.orm import Session

from gxpo_services.api import fields, idempotency
from gxpo_services.api.errors import Conflict, Forbidden, Gone, Invalid, NotFound
from gxpo_services.api.fields import new_id
from gxpo_services.api.idempotency import check_match, etag
from gxpo_services.api.principals import Principal, Role
from gxpo_services.db.tables import Group, Run, RunDocument
from gxpo_services.outputs import events
from gxpo_services.run_states import TERMINAL, RunState
from gxpo_services.runs import repository as limits
from gxpo_services.runs import repository as runs_repository
from gxpo_services.runs import service as runs
from gxpo_services.runs.configs import restored
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


def add(session: Session, group: Group) -> None:
    session.add(group)
    session.flush()


def newest(session: Session, before: int | None, limit: int) -> list[Group]:
    """Groups, newest first; before: only those with a smaller number."""
    query = select(Group).order_by(Group.number.desc()).limit(limit)
    return list(session.scalars(query if before is None else query.where(Group.number < before)))


def numbers_of(session: Session, group: Group, limit: int) -> list[int]:
    """Numbers of a group's runs in order of creation."""
    query = select(Run.number).where(Run.group_number == group.number).order_by(Run.number).limit(limit)
    return list(session.scalars(query))


def configs_of(session: Session, run_numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Configs of runs, by their numbers ascending."""
    query = select(RunDocument.config).where(RunDocument.run_number.in_(run_numbers)).order_by(RunDocument.run_number)
    return list(session.scalars(query))


def count_by_state(session: Session, groups: Sequence[Group]) -> dict[int, dict[RunState, int]]:
    """group number → state → runs."""
    found: dict[int, dict[RunState, int]] = {group.number: {} for group in groups}
    query = (
        select(Run.group_number, Run.state, func.count())
        .where(Run.group_number.in_(list(found)))
        .group_by(Run.group_number, Run.state)
    )
    for number, state, count in session.execute(query):
        if number is not None:
            found[number][RunState(state)] = count
    return found


def find(session: Session, group_id: str, *, lock: bool = False) -> Group | None:
    """A group by its public id. lock: SELECT … FOR UPDATE."""
    query = select(Group).where(Group.id == group_id)
    return session.scalar(query.with_for_update().execution_options(populate_existing=True) if lock else query)


def ids_of(session: Session, group: Group) -> list[str]:
    """Ids of all runs of a group in order of creation."""
    return list(session.scalars(select(Run.id).where(Run.group_number == group.number).order_by(Run.number)))


def unended(session: Session, group: Group) -> list[str]:
    """Ids of the runs of a group that have not ended."""
    query = select(Run.id).where(Run.group_number == group.number, Run.state.not_in(sorted(TERMINAL)))
    return list(session.scalars(query.order_by(Run.number)))


def remove(session: Session, group: Group) -> None:
    """Delete a group; runs that it still has stay without one."""
    session.flush()
    left = update(Run).where(Run.group_number == group.number).values(group_number=None)
    session.execute(left.execution_options(synchronize_session=False))
    session.execute(delete(Group).where(Group.number == group.number).execution_options(synchronize_session=False))
    session.expunge(group)


_SHOWN_RUNS = 1000
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
        return _views(session, [_repeated(session, owner)])[0], False
    group = _new_group(group_id, "group", request, principal)
    add(session, group)
    events.record(session, None, principal.actor, "group_created", f"group {group.name!r}", group=group.id)
    return _views(session, [group])[0], True


def sweep(
    session: Session, server: ServiceSettings, principal: Principal, request: SweepRequest, key: str | None
) -> tuple[SweepAnswer, bool]:
    """Queue all runs of a sweep as a group; returns it and whether it is new. Raises Invalid, Conflict, Gone."""
    planned = plan(request, server)  # before the transaction starts: it may take a second
    group_id = new_id("g")
    owner = idempotency.claim(session, principal, key, "sweep", request, group_id)
    if owner != group_id:
        return _answer(session, _repeated(session, owner)), False
    limits.check_priority(principal, request.priority)
    limits.check_queue(session, server, principal, len(planned))
    group = _new_group(group_id, "sweep", request, principal)
    add(session, group)
    made = []
    for item in planned:
        run = runs.new_run(
            item.config,
            principal,
            notes=request.notes,
            priority=request.priority,
            group=group,
            group_values=plain(item.values),
        )
        runs.set_tags(run, request.tags)
        made.append(run)
    runs_repository.add(session, made)
    for run in made:
        message = f"submitted by sweep {group.name!r}"
        events.record(session, run.number, principal.actor, "submitted", message, group=group.id)
    session.flush()
    return _answer(session, group), True


def validate(server: ServiceSettings, request: SweepRequest) -> SweepPlan:
    """Validate a sweep and compute its cost without submitting it."""
    try:
        planned = plan(request, server)
    except Invalid as error:
        return SweepPlan(valid=False, errors=error.errors, cost=None, runs=[])
    return SweepPlan(
        valid=True, errors=[], cost=_cost([item.config for item in planned]), runs=[_planned(item) for item in planned]
    )


def list_groups(session: Session, cursor: str | None, limit: int) -> GroupPage:
    """Newest first. Raises Invalid for a cursor of another list."""
    before = None if cursor is None else fields.decode(cursor, _ORDER, "float").number
    found = newest(session, before, limit + 1)
    shown = found[:limit]
    more = fields.encode(_ORDER, fields.Position(None, shown[-1].number)) if len(found) > limit else None
    return GroupPage(items=_views(session, shown), next_cursor=more)


def get_group(session: Session, group_id: str) -> GroupDetail:
    """Raises NotFound."""
    group = _found(session, group_id)
    shown = runs.shown(session, numbers_of(session, group, _SHOWN_RUNS))
    return GroupDetail(**_views(session, [group])[0].model_dump(), spec=group.spec, runs=shown)


def version(group: GroupView) -> str:
    """Entity tag of what people edit of a group."""
    return etag({"name": group.name})


def rename(session: Session, group_id: str, name: str, if_match: str | None, *, actor: str) -> GroupView:
    """Raises NotFound, PreconditionFailed."""
    group = _found(session, group_id, lock=True)
    check_match(if_match, etag({"name": group.name}), f"group {group_id}")
    if name != group.name:
        message = f"group {group.name!r} was renamed to {name!r}"
        events.record(session, None, actor, "group_renamed", message, group=group_id)
        group.name = name
    session.flush()
    return view_of(session, group)


def cancel(session: Session, group_id: str, *, actor: str) -> GroupView:
    """Cancel every run of a group that has not ended; a study queues no further runs. Idempotent. Raises NotFound."""
    group = _found(session, group_id, lock=True)
    if not group.spec.get(CANCELLED):
        group.spec = {**group.spec, CANCELLED: True}
        events.record(session, None, actor, "group_cancelled", f"group {group.name!r} was cancelled", group=group_id)
    for run_id in unended(session, group):
        # A run that ends meanwhile needs no request.
        with suppress(Conflict, NotFound):
            runs.act(session, run_id, "cancel", actor=actor)
    session.flush()
    return view_of(session, group)


def delete_with_runs(session: Session, root: Path, principal: Principal, group_id: str, *, with_runs: bool) -> None:
    """Delete a group. Its runs stay without a group, or are deleted with it.

    Raises NotFound; Forbidden unless the principal's token made the group or is an admin's; what deleting a run raises.
    """
    group = _found(session, group_id, lock=True)
    if group.created_by != principal.name and principal.role < Role.ADMIN:
        raise Forbidden(f"group {group_id} was made by {group.created_by!r}; only that token or an admin may delete it")
    if with_runs:
        for run_id in ids_of(session, group):
            runs.delete(session, root, principal, run_id)
    remove(session, group)
    events.record(session, None, principal.actor, "group_deleted", f"group {group.name!r} was deleted", group=group_id)


def _found(session: Session, group_id: str, *, lock: bool = False) -> Group:
    group = find(session, group_id, lock=lock)
    if group is None:
        raise NotFound(f"there is no group {group_id}")
    return group


def _new_group(group_id: str, kind: str, request: GroupRequest | SweepRequest, principal: Principal) -> Group:
    return Group(
        id=group_id,
        name=request.name,
        kind=kind,
        spec=plain(request.model_dump()),
        created_at=time.time(),
        created_by=principal.name,
    )


def _repeated(session: Session, group_id: str) -> Group:
    group = runs_repository.find_group(session, group_id)
    if group is None:
        raise Gone(f"group {group_id}, created with this Idempotency-Key, no longer exists; use a new key")
    return group


def _answer(session: Session, group: Group) -> SweepAnswer:
    found = numbers_of(session, group, _SHOWN_RUNS)
    cost = _cost([restored(config) for config in configs_of(session, found)])
    return SweepAnswer(group=_views(session, [group])[0], runs=runs.shown(session, found), cost=cost)


def view_of(session: Session, group: Group) -> GroupView:
    """A group as lists show it."""
    return _views(session, [group])[0]


def _views(session: Session, groups: Sequence[Group]) -> list[GroupView]:
    counts = count_by_state(session, groups)
    shown = ("id", "name", "kind", "created_at", "created_by")
    return [
        GroupView(
            **{name: getattr(group, name) for name in shown},
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


def _planned(item: Planned) -> PlannedRun:
    return PlannedRun(
        name=item.config.name,
        rule=item.config.learner.rule.name,
        rule_label=rule_label(item.config.model_dump()),
        seed=item.config.seed,
        group_values=plain(item.values),
        backward_passes=expected_cost(item.config).backward_passes,
        config_sha256=item.config.sha256(),
    )
