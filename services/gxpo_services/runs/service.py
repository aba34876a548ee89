"""Operations on runs that several endpoints, groups, ingest and schedulers share; and what a token may queue."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import sqlalchemy as sql
from sqlalchemy import bindparam, func, select
from sqlalchemy.orm import Session, lazyload

from gxpo_services.api.errors import Conflict, Forbidden, LimitReached, NotFound
from gxpo_services.api.fields import new_id
from gxpo_services.api.principals import Principal, Role, hash_token
from gxpo_services.db.database import note_change
from gxpo_services.db.tables import Group, Run, RunDocument, RunTag
from gxpo_services.outputs import events, samples
from gxpo_services.outputs.files import RUN_DELETED
from gxpo_services.run_states import TERMINAL, Action, IllegalTransition, RunState, requested_state
from gxpo_services.runs import listing, schemas
from gxpo_services.runs.configs import stored
from gxpo_services.runs.lifecycle import move
from gxpo_services.runs.plan import resources
from gxpo_services.runs.schemas import RunDetail, RunPatch, RunView
from gxpo_services.settings import ServiceSettings
from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.rules import run_label


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
        step_budget=config.last_step,
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


# Made once: making a statement takes longer than its rows.
_LOCK_RUN = (
    select(Run)
    .where(Run.id == bindparam("run"))
    .options(lazyload(Run.tags), lazyload(Run.group), lazyload(Run.document))
    .with_for_update(of=Run)
)
_LOCK_OWN = _LOCK_RUN.where(Run.run_token_sha256 == bindparam("token"))


def lock(session: Session, run_id: str, token: str | None = None) -> Run | None:
    """The run, locked until the transaction ends, without its related rows. token: that its launch must have."""
    if token is None:
        return session.scalar(_LOCK_RUN, {"run": run_id})
    return session.scalar(_LOCK_OWN, {"run": run_id, "token": hash_token(token)})


def set_tags(run: Run, tags: Iterable[str]) -> None:
    """Replace a run's tags, and its searchable text: in Unicode folded case, the same on both databases."""
    run.tags = [RunTag(tag=tag) for tag in sorted(set(tags))]
    words = [run.name, run.notes or "", run.id, run.model, *(tag.tag for tag in run.tags)]
    run.search_text = "\n".join(words).casefold()


def queue(
    session: Session,
    principal: Principal,
    queued: Sequence[Run],
    tags: Collection[str],
    kind: str,
    message: str,
    **fields: Any,
) -> None:
    """Add new runs with these tags; kind, message, fields: of the event of each."""
    for run in queued:
        set_tags(run, tags)
    session.add_all(queued)
    session.flush()
    for run in queued:
        events.record(session, run.number, principal.actor, kind, message, **fields)


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


# The caller has locked the run that is changed. Several runs are locked in the order of their ids: of two requests with
# the same runs in orders of their own, each could wait for the other.


def patch(session: Session, run: Run, request: RunPatch, principal: Principal) -> None:
    """Edit name, tags, notes, priority or archived. Raises Forbidden for a priority."""
    defaults = {"name": run.config["name"], "tags": [], "notes": "", "archived": False, "priority": 0}
    named = request.model_dump(exclude_unset=True)
    changes = {name: defaults[name] if value is None else value for name, value in named.items()}
    if changes.get("priority", run.priority) != run.priority:
        check_priority(principal, changes["priority"])
    for name in changes.keys() - {"tags"}:
        setattr(run, name, changes[name])
    if changes:
        set_tags(run, changes.get("tags", [tag.tag for tag in run.tags]))
        run.updated_at = time.time()
        events.record(session, run.number, principal.actor, "edited", f"changed {', '.join(changes)}", **changes)


_MESSAGES: dict[Action, str] = {
    "cancel": "cancel requested",
    "pause": "pause requested",
    "resume": "resumed: queued again from its checkpoint",
}


def act(session: Session, run: Run, action: Action, *, actor: str) -> None:
    """Cancel, pause or resume a run. Idempotent. Raises Conflict."""
    try:
        wanted = requested_state(RunState(run.state), action)
    except IllegalTransition as error:
        raise Conflict(f"run {run.id}: {error}", state=run.state) from None
    if wanted is not None:
        move(session, run, wanted, actor=actor, message=_MESSAGES[action])


_SAMPLES_AT_ONCE = 50_000


def delete(session: Session, run: Run, principal: Principal) -> None:
    """Delete the rows of an ended run; files.remove_deleted removes its folder after the commit.

    Raises Forbidden for another token's run unless the principal is an admin; Conflict before its end.
    """
    if run.created_by_id != principal.token_id and principal.role < Role.ADMIN:
        raise Forbidden(f"run {run.id} was submitted by {run.created_by!r}; only that token or an admin may delete it")
    if run.state not in TERMINAL:
        raise Conflict(f"run {run.id} is {run.state}; cancel it and wait until it has ended")
    # Before the run's own events are gone: SQLite reuses the numbers above the largest one that is left.
    note_change(session)
    events.record(session, None, principal.actor, RUN_DELETED, f"run {run.name!r} was deleted", run=run.id)
    # One statement for all of them could take longer than PostgreSQL's time-out.
    while samples.delete_some(session, run.number, _SAMPLES_AT_ONCE):
        pass
    session.execute(sql.delete(Run).where(Run.number == run.number).execution_options(synchronize_session=False))
    session.expunge(run)


_LOCK = 0x67787562  # "gxub"


def check_priority(principal: Principal, priority: int) -> None:
    """Raise Forbidden for a priority above normal, unless the principal is an admin."""
    if priority > 0 and principal.role < Role.ADMIN:
        raise Forbidden(f"priority {priority} is above 0, which only an admin may set")


def check_queue(session: Session, server: ServiceSettings, principal: Principal, more: int = 1) -> None:
    """Raise LimitReached unless the token may have `more` further queued runs.

    On PostgreSQL, submissions of one token are serialized until their transactions end; SQLite has one writer anyway.
    """
    if session.get_bind().dialect.name == "postgresql":
        session.execute(select(func.pg_advisory_xact_lock(_LOCK, func.hashtext(principal.token_id))))
    mine = (Run.state == RunState.QUEUED, Run.created_by_id == principal.token_id)
    queued = session.scalar(select(func.count()).where(*mine)) or 0
    most = server.max_queued_per_user
    if queued + more > most:
        raise LimitReached(
            f"token {principal.name!r} has {queued} queued runs; with {more} more it would exceed "
            f"GXPO_MAX_QUEUED_PER_USER = {most}; wait until some have started, or cancel them"
        )
