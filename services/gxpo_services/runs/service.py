"""Operations on runs: submit, list, edit, control, clone, retry, delete; and one action on many runs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import select
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.orm import Session

from gxpo_services.api import idempotency
from gxpo_services.api.errors import (
    Conflict,
    FieldError,
    Forbidden,
    Gone,
    Invalid,
    NotFound,
    Problem,
    ProblemDetails,
    Unavailable,
)
from gxpo_services.api.fields import Position, decode_cursor, encode_cursor, new_id
from gxpo_services.api.idempotency import check_match
from gxpo_services.api.principals import Principal, Role
from gxpo_services.db.tables import STUDY, Group, Run, RunDocument, RunTag
from gxpo_services.outputs import events, files
from gxpo_services.outputs.metrics import last_values
from gxpo_services.run_states import TERMINAL, Action, IllegalTransition, RunState, requested_state
from gxpo_services.runs import listing, repository, schemas
from gxpo_services.runs.configs import checked, invalid, overridden, setting, settings_of, stored
from gxpo_services.runs.lifecycle import StateChanged, move
from gxpo_services.runs.plan import expected_cost, planned, resources
from gxpo_services.runs.schemas import (
    BulkAction,
    BulkAnswer,
    BulkItem,
    BulkRequest,
    CloneRequest,
    ExpectedCostView,
    ListQuery,
    RunDetail,
    RunPatch,
    RunRequest,
    RunValidation,
    RunView,
)
from gxpo_services.settings import ServiceSettings
from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.io import to_toml
from gxpo_trainer.config.rules import run_label

_MOST_EQUAL_RUNS = 10
_ATTEMPTS = 10
"""Attempts of a compare-and-set under concurrent changes; each failure means that another change succeeded."""


def submit(
    session: Session, server: ServiceSettings, principal: Principal, request: RunRequest, key: str | None
) -> tuple[RunDetail, bool]:
    """Submit a run; returns it and whether it is new. Raises Invalid, Conflict (key), Gone (its run was deleted)."""
    run_id = new_id("r")
    owner = idempotency.claim(session, principal, key, "submit", request, run_id)
    if owner != run_id:
        return _repeated(session, owner), False
    config, group = _prepared(session, server, request)
    repository.check_priority(principal, request.priority)
    repository.check_queue(session, server, principal)
    run = new_run(config, principal, run_id=run_id, notes=request.notes, priority=request.priority, group=group)
    return _add(session, run, request.tags, principal, "submitted"), True


def validate(session: Session, server: ServiceSettings, request: RunRequest) -> RunValidation:
    """Validate a request without submitting it."""
    try:
        config, _ = _prepared(session, server, request)
    except Invalid as error:
        return RunValidation(valid=False, errors=error.errors, cost=None, config=None, toml=None, equal_runs=[])
    cost = expected_cost(config)
    same = select(Run.number).where(Run.config_sha256 == config.sha256())
    equal_runs = session.scalars(same.order_by(Run.number.desc()).limit(_MOST_EQUAL_RUNS)).all()
    plan, problem = planned(config, server)
    return RunValidation(
        valid=True,
        errors=[],
        cost=ExpectedCostView(steps=cost.steps, backward_passes=cost.backward_passes, per_step_words=cost.words),
        config=stored(config),
        toml=to_toml(config),
        equal_runs=views(session, equal_runs),
        plan=plan,
        plan_problem=problem,
    )


def _prepared(session: Session, server: ServiceSettings, request: RunRequest) -> tuple[RunConfig, Group | None]:
    """Config and group of a request. Raises Invalid with every invalid member."""
    errors: list[FieldError] = []
    config = group = None
    try:
        config = checked(settings_of(request), server)
    except Invalid as error:
        errors += error.errors
    try:
        group = _group(session, request.group)
    except Invalid as error:
        errors += error.errors
    if config is None or errors:
        raise invalid(errors)
    return (config if request.name is None else config.model_copy(update={"name": request.name})), group


def _group(session: Session, group_id: str | None) -> Group | None:
    if group_id is None:
        return None
    group = session.scalar(select(Group).where(Group.id == group_id))
    if group is None:
        raise Invalid.of("group", f"there is no group {group_id}; omit it or create one first")
    if group.kind == STUDY:
        raise Invalid.of("group", f"{group_id} is a study, which queues its own runs; omit it or name another group")
    return group


def new_run(
    config: RunConfig,
    principal: Principal,
    *,
    run_id: str | None = None,
    notes: str = "",
    priority: int = 0,
    group: Group | None = None,
    group_values: dict[str, Any] | None = None,
    parent: tuple[Run, str] | None = None,
) -> Run:
    """A queued run, not yet in the database. parent: the original, and "clone" or "retry"."""
    now = time.time()
    cpus, gpus = resources(config)
    body, budget = stored(config), config.budget
    return Run(
        id=run_id or new_id("r", now),
        name=config.name,
        notes=notes,
        priority=priority,
        group=group,
        group_values=group_values,
        parent_id=parent[0].id if parent else None,
        parent_kind=parent[1] if parent else None,
        document=RunDocument(config=body),
        config_sha256=config.sha256(),
        rule=config.learner.rule.name,
        rule_label=run_label(body["learner"]["rule"]),
        step_budget=budget.steps,
        backward_passes_budget=budget.backward_passes,
        tokens_budget=budget.tokens,
        hours_budget=budget.hours,
        model=config.model.path,
        seed=config.seed,
        cpus=cpus,
        gpus=gpus,
        created_by=principal.name,
        created_by_id=principal.token_id,
        state=RunState.QUEUED,
        created_at=now,
        updated_at=now,
        queued_at=now,
    )


def set_tags(run: Run, tags: Iterable[str]) -> None:
    """Replace a run's tags."""
    wanted = set(tags)
    run.tags[:] = [tag for tag in run.tags if tag.tag in wanted]
    present = {tag.tag for tag in run.tags}
    run.tags += [RunTag(tag=tag) for tag in sorted(wanted - present)]


def _add(session: Session, run: Run, tags: Iterable[str], principal: Principal, kind: str) -> RunDetail:
    set_tags(run, tags)
    repository.add(session, [run])
    source = f" from {run.parent_id}" if run.parent_id else ""
    events.record(session, run.number, principal.actor, kind, f"{kind}{source}", parent=run.parent_id)
    return detail(session, run)


def _repeated(session: Session, run_id: str) -> RunDetail:
    run = repository.find(session, run_id)
    if run is None:
        raise Gone(f"run {run_id}, created with this Idempotency-Key, was deleted; use a new key")
    return detail(session, run)


def find(session: Session, run_id: str, *, lock: bool = False) -> Run:
    """Raises NotFound."""
    run = repository.find(session, run_id, lock=lock)
    if run is None:
        raise NotFound(f"there is no run {run_id}")
    return run


def views(session: Session, numbers: Sequence[int]) -> list[RunView]:
    """Runs as lists have them, without those deleted meanwhile."""
    rows = listing.list_rows(session, numbers)
    return [RunView.model_validate(schemas.with_progress(row)) for row in rows]


def detail(session: Session, run: Run) -> RunDetail:
    """Raises NotFound for a run deleted meanwhile."""
    rows = listing.list_rows(session, [run.number])
    if not rows:
        raise NotFound(f"there is no run {run.id}")
    return schemas.detail(rows[0], run.document)


def list_runs(session: Session, query: ListQuery) -> dict[str, Any]:
    """A page of the list, as RunPage in JSON. Raises Invalid for an unknown order or a cursor of another order."""
    order = _order(query)
    after = decode_cursor(query.cursor, order.word, order.kind) if query.cursor is not None else None
    page, total = listing.page(session, query, order, after, query.limit + 1)
    sort_values = dict(page[: query.limit])
    numbers = list(sort_values)
    values = last_values(session, numbers, query.with_metric) if query.with_metric else {}
    configs: dict[int, dict[str, Any]] = {}
    if query.with_setting:
        documents = select(RunDocument.run_number, RunDocument.config).where(RunDocument.run_number.in_(numbers))
        configs = dict(session.execute(documents).all())
    items = []
    for row in listing.list_rows(session, numbers):
        number = row["number"]
        metrics = {name: values.get(number, {}).get(name) for name in query.with_metric}
        if order.metric is not None:
            value = sort_values[number]
            assert not isinstance(value, str)
            metrics[order.metric] = value
        settings = {path: setting(configs.get(number, {}), path) for path in query.with_setting}
        items.append(schemas.listed(row, metrics, settings))
    next_cursor = None
    if len(page) > query.limit:
        number, value = page[query.limit - 1]
        next_cursor = encode_cursor(order.word, Position(value, number))
    return {"items": items, "next_cursor": next_cursor, "total": total}


def _order(query: ListQuery) -> listing.Order:
    descending = query.order == "desc"
    if query.sort.startswith("metric:") and len(query.sort) > len("metric:"):
        word = {"best": "highest"}.get(query.metric_at, query.metric_at)
        at: Any = int(word) if word.isdigit() else word
        return listing.Order(None, query.sort.removeprefix("metric:"), at, descending)
    if query.sort not in listing.COLUMNS:
        raise Invalid.of("sort", f"must be metric:<name> or one of {', '.join(listing.COLUMNS)}")
    return listing.Order(query.sort, None, "last", descending)


def patch(session: Session, run_id: str, request: RunPatch, if_match: str | None, principal: Principal) -> RunDetail:
    """Edit name, tags, notes, priority or archived. Raises NotFound, PreconditionFailed; Forbidden for a priority."""
    run = find(session, run_id, lock=True)
    if if_match is not None:
        check_match(if_match, schemas.version(detail(session, run)), f"run {run_id}")
    defaults = {"name": run.config["name"], "tags": [], "notes": "", "archived": False, "priority": 0}
    named = request.model_dump(exclude_unset=True)
    changes = {name: defaults[name] if value is None else value for name, value in named.items()}
    if changes.get("priority", run.priority) != run.priority:
        repository.check_priority(principal, changes["priority"])
    for name, value in changes.items():
        if name == "tags":
            set_tags(run, value)
        else:
            setattr(run, name, value)
    if changes:
        run.search_text = repository.search_text(run)
        run.updated_at = time.time()
        events.record(session, run.number, principal.actor, "edited", f"changed {', '.join(changes)}", **changes)
    session.flush()
    return detail(session, run)


_MESSAGES: dict[Action, str] = {
    "cancel": "cancel requested",
    "pause": "pause requested",
    "resume": "resumed: queued again from its checkpoint",
}


def act(session: Session, run_id: str, action: Action, *, actor: str) -> RunDetail:
    """Cancel, pause or resume a run. Idempotent. Raises NotFound, Conflict."""
    run = find(session, run_id)
    for _ in range(_ATTEMPTS):
        try:
            wanted = requested_state(RunState(run.state), action)
        except IllegalTransition as error:
            raise Conflict(f"run {run_id}: {error}", state=run.state) from None
        if wanted is None:
            return detail(session, run)
        try:
            move(session, run, wanted, actor=actor, message=_MESSAGES[action])
        except (StateChanged, InvalidRequestError):  # the latter when it was deleted
            run = find(session, run_id)  # lost a race: decide again from the new state
            continue
        return detail(session, run)
    raise Conflict(f"run {run_id} keeps changing its state; retry", state=run.state)


def clone(
    session: Session,
    server: ServiceSettings,
    principal: Principal,
    run_id: str,
    request: CloneRequest,
    key: str | None,
) -> tuple[RunDetail, bool]:
    """Clone a run with overrides; returns the clone and whether it is new."""
    new = new_id("r")
    owner = idempotency.claim(session, principal, key, f"clone {run_id}", request, new)
    if owner != new:
        return _repeated(session, owner), False
    original = find(session, run_id)
    config = checked(overridden(original.config, request.overrides, "overrides"), server)
    if request.priority is not None:
        repository.check_priority(principal, request.priority)
    repository.check_queue(session, server, principal)
    copied = repository.allowed_priority(principal, original.priority)
    name = request.name or (config.name if config.name != original.config["name"] else original.name)
    run = new_run(
        config.model_copy(update={"name": name}),
        principal,
        run_id=new,
        notes=original.notes if request.notes is None else request.notes,
        priority=copied if request.priority is None else request.priority,
        group=_group(session, request.group),
        parent=(original, "clone"),
    )
    tags = [tag.tag for tag in original.tags] if request.tags is None else request.tags
    return _add(session, run, tags, principal, "cloned"), True


def retry(
    session: Session, server: ServiceSettings, principal: Principal, run_id: str, key: str | None
) -> tuple[RunDetail, bool]:
    """Retry a failed or cancelled run as a new run in its group. Raises Conflict for other states."""
    new = new_id("r")
    owner = idempotency.claim(session, principal, key, f"retry {run_id}", CloneRequest(), new)
    if owner != new:
        return _repeated(session, owner), False
    original = find(session, run_id)
    if original.state not in schemas.RETRIED:
        fix = "clone it" if original.state in TERMINAL else "cancel it first, or clone it"
        raise Conflict(f"run {run_id} is {original.state}; retry is for failed and cancelled runs: {fix}")
    config = checked(original.config, server).model_copy(update={"name": original.name})
    repository.check_queue(session, server, principal)
    run = new_run(
        config,
        principal,
        run_id=new,
        notes=original.notes,
        priority=repository.allowed_priority(principal, original.priority),
        group=original.group,
        group_values=original.group_values,
        parent=(original, "retry"),
    )
    return _add(session, run, [tag.tag for tag in original.tags], principal, "retried"), True


def delete(session: Session, root: Path, principal: Principal, run_id: str) -> None:
    """Delete an ended run: its rows and, after the commit, its folder.

    Raises NotFound; Forbidden for another token's run unless the principal is an admin; Conflict for a run that has not
    ended.
    """
    run = find(session, run_id, lock=True)
    if run.created_by_id != principal.token_id and principal.role < Role.ADMIN:
        raise Forbidden(f"run {run_id} was submitted by {run.created_by!r}; only that token or an admin may delete it")
    if run.state not in TERMINAL:
        raise Conflict(f"run {run_id} is {run.state}; cancel it and wait until it has ended")
    try:
        files.set_aside(session, root, run.id)
    except OSError as error:
        raise Unavailable(f"cannot remove the folder of run {run_id}: {error.strerror}") from error
    # Before the run's own events are gone: SQLite reuses the numbers above the largest one that is left.
    events.record(session, None, principal.actor, "run_deleted", f"run {run.name!r} was deleted", run=run_id)
    if not repository.remove_ended(session, run):
        raise Conflict(f"run {run_id} is {run.state} now; retry")


def act_on_all(session: Session, root: Path, principal: Principal, request: BulkRequest) -> BulkAnswer:
    """Apply an action to each run; a run that refuses it does not stop the others."""
    items = []
    for run_id in dict.fromkeys(request.runs):
        problem = None
        try:
            state = _act(session, root, principal, run_id, request.action)
        except Problem as error:
            run = repository.find(session, run_id)
            state = None if run is None else RunState(run.state)
            problem = ProblemDetails(type=error.type, title=error.title, status=error.status, detail=error.detail)
        items.append(BulkItem(run=run_id, state=state, problem=problem))
    return BulkAnswer(items=items)


def _act(session: Session, root: Path, principal: Principal, run_id: str, action: BulkAction) -> RunState | None:
    """State of the run afterwards; None for a deleted one. Raises Problem."""
    if action == "delete":
        delete(session, root, principal, run_id)
        return None
    if action == "archive" or action == "unarchive":
        return patch(session, run_id, RunPatch(archived=action == "archive"), None, principal).state
    return act(session, run_id, action, actor=principal.actor).state
