"""`/studies`: several arms, each at its own best learning rate, on several seeds.

A study is a group of runs; what is missing is queued whenever a run has ended."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Response
from pydantic import BaseModel, Field, ValidationError
from sqlalchemy import and_, func, select
from sqlalchemy.orm import Session

from gxpo_services.api.dependencies import ReadSession, ServiceRoute, Settings, Viewer
from gxpo_services.api.errors import Conflict, FieldError, Invalid, NotFound, responses
from gxpo_services.api.fields import Body, GroupId, JsonNumber, Text, faults
from gxpo_services.api.idempotency import IsRepeated, Submission, answer, creating
from gxpo_services.api.principals import Principal, Role
from gxpo_services.db.tables import STUDY, Group, Run
from gxpo_services.run_states import TERMINAL, RunState
from gxpo_services.runs import service as runs
from gxpo_services.runs.configs import checked, invalid
from gxpo_services.runs.schemas import Notes, Priority, Tags
from gxpo_services.sweeps import groups
from gxpo_services.sweeps.grid import Planned
from gxpo_services.sweeps.groups import GroupView
from gxpo_trainer.config.messages import BadSettings, config_error
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.studies import definition

_COMPLETE = "complete"
"""Member of a group's spec: a study had all its results. Runs that are deleted later are not repeated."""


class StudyRequest(Body):
    """A study file (docs/studies.md)."""

    toml: Annotated[Text, Field(max_length=200_000)] = Field(description="Content of the file.")
    tags: Tags = Field([], description="Tags of every run.")
    notes: Notes = Field("", description="Notes of every run.")
    priority: Priority = Field(0, description="Higher ones start first.")


class ArmView(BaseModel):
    """An arm of a study."""

    name: str
    label: str
    learning_rate: JsonNumber | None = Field(description="Its best learning rate; null until the arm is tuned.")
    settings: str | None = Field(description="The other settings that tuning chose, `a.b=c` with spaces between.")
    seeds_done: list[int] = Field(description="Reported seeds that are done.")


class StudyCost(BaseModel):
    """Upper bounds: a ladder ends where an arm's accuracy falls, a search where its space does."""

    runs: int
    backward_passes: int


class StudyView(BaseModel):
    """A study and how far it is. Its runs are those of the group."""

    group: GroupView
    title: str
    baseline: str = Field(description="Label of the arm that the others are compared with.")
    seeds: list[int]
    cost: StudyCost
    runs_done: int
    due: int = Field(description="Runs that the scheduler queues next.")
    complete: bool
    failed: list[str] = Field(
        description="Ids of ended runs without a result, for which the study waits: retry failed ones, delete others."
    )
    arms: list[ArmView]
    study: dict[str, Any] = Field(description="The file, with its defaults.")


def ended_runs(session: Session) -> dict[int, tuple[int, float | None]]:
    """Number of the group of each study → its ended runs, and when the last of them ended; 0 and None without any."""
    query = (
        select(Group.number, func.count(Run.number), func.max(Run.ended_at))
        .outerjoin(Run, and_(Run.group_number == Group.number, Run.state.in_(list(TERMINAL))))
        .where(Group.kind == STUDY)
        .group_by(Group.number)
    )
    return {number: (count, last) for number, count, last in session.execute(query)}


def queue_missing(session: Session, group: Group) -> int:
    """Queue the runs of a study that can start now and were never queued; returns their number.

    The caller holds the queue's lock, so that two schedulers do not queue the same run, and has locked the group, so
    that the study is not cancelled meanwhile.
    """
    if _queues_no_more(group):
        return 0
    study = study_of(group)
    keys = _keys(session, group)
    pending = definition.pending(study, _results(keys))
    if not pending:
        group.spec = {**group.spec, _COMPLETE: True}
    missing = _due(pending, keys)
    principal = Principal(group.spec["created_by_id"], group.created_by, Role.SUBMITTER)
    planned = [Planned(definition.run_config(study, key), asdict(key)) for key in missing]
    groups.queue_runs(session, principal, group, planned, group.spec)
    return len(missing)


def _queues_no_more(group: Group) -> bool:
    return bool(group.spec.get(groups.CANCELLED) or group.spec.get(_COMPLETE))


def _due(pending: Iterable[definition.RunKey], keys: dict[Run, definition.RunKey]) -> list[definition.RunKey]:
    """Runs that were never queued, of those that can start now."""
    queued = set(keys.values())
    return [key for key in pending if key not in queued]


def study_of(group: Group) -> definition.Study:
    """Raises Conflict for a study that this version of gxpo no longer accepts."""
    stored = group.spec["study"]
    try:
        if isinstance(stored, str):
            return definition.Study.model_validate_json(stored)
        return definition.Study.model_validate(stored)  # of a version that stored an object
    except ValidationError as error:
        reason = config_error(error, "the study", definition.Study)
        raise Conflict(f"study {group.id} is of another version of gxpo: {reason}; submit it again") from None


def _keys(session: Session, group: Group) -> dict[Run, definition.RunKey]:
    """All runs of a study in order of creation, with what they are in it."""
    members = session.scalars(select(Run).where(Run.group_number == group.number).order_by(Run.number))
    return {run: definition.RunKey(**run.group_values) for run in members if run.group_values}


def _results(keys: dict[Run, definition.RunKey]) -> dict[definition.RunKey, definition.RunResult]:
    """Diverged runs, and succeeded ones with a score; a retry that succeeds stands for the run of the same key."""
    results: dict[definition.RunKey, definition.RunResult] = {}
    for run, key in keys.items():
        diverged = run.state == RunState.FAILED and run.reason == "diverged"
        if diverged or (run.state == RunState.SUCCEEDED and run.score is not None):
            results[key] = definition.RunResult(run.score or 0.0, diverged)
    return results


def _checked(
    body: StudyRequest, repeated: IsRepeated, server: Settings
) -> tuple[StudyRequest, definition.Study | None]:
    """A request and its study. Resolved before `Submission`: it may take seconds, in which SQLite's writer is free."""
    return body, None if repeated else _study(body, server)


def _study(body: StudyRequest, server: Settings) -> definition.Study:
    """The study, if every arm's config is accepted by trainer and server. Raises Invalid."""
    try:
        file = tomllib.loads(body.toml.removeprefix("\ufeff"))
        if bad := faults(file):
            raise invalid([FieldError(field=f"toml.{path}".rstrip("."), message=text) for path, text in bad])
        study = definition.Study.model_validate(file)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise Invalid.of("toml", f"is not valid TOML: {error}") from None
    except ValidationError as error:
        wrong = config_error(error, "the study", definition.Study).settings
        raise invalid([FieldError(field=f"toml.{path}".rstrip("."), message=text) for path, text in wrong]) from None
    for arm in study.arms:
        try:
            for key in definition.extremes(study, arm):
                if not math.isfinite(key.learning_rate):
                    raise Invalid.of("learning_rate", f"is {key.learning_rate}; lower its factor or the ladder's rates")
                values = definition.run_config(study, key).model_dump(mode="json")
                if bad := faults(values):  # an override is one text in the file
                    raise Invalid.of(*bad[0])
                checked(values, server)
        except (BadSettings, ConfigError, Invalid) as error:
            raise Invalid.of("toml", f"arms.{arm}: {error}") from None
    return study


def _view(session: Session, group: Group) -> StudyView:
    study = study_of(group)
    keys = _keys(session, group)
    results = _results(keys)
    pending = definition.pending(study, results)
    most_runs, most_passes = definition.largest_cost(study)
    tuned = {name: definition.best_point(study, name, results) for name in study.arms}
    settled = {*results, *(key for run, key in keys.items() if run.state not in TERMINAL)}
    return StudyView(
        group=groups.view_of(session, group),
        title=study.title,
        baseline=study.arms[study.baseline].label,
        seeds=list(study.seeds),
        cost=StudyCost(runs=most_runs, backward_passes=most_passes),
        runs_done=len(results),
        due=0 if _queues_no_more(group) else len(_due(pending, keys)),
        complete=not pending or bool(group.spec.get(_COMPLETE)),
        failed=[run.id for run, key in keys.items() if key not in settled],
        arms=[
            ArmView(
                name=name,
                label=arm.label,
                learning_rate=point.learning_rate if (point := tuned[name]) else None,
                settings=point.settings if point else None,
                seeds_done=sorted(key.seed for key in results if key.stage == "report" and key.arm == name),
            )
            for name, arm in study.arms.items()
        ],
        study=study.model_dump(mode="json"),
    )


router = APIRouter(route_class=ServiceRoute, tags=["studies"], responses=responses(401, 422, 503))


_CREATED = creating(StudyView, "study", "Created.", "The study that this key created before.")


@router.post("/studies", summary="Submit a study", **_CREATED)
def submit_study(
    checked_study: Annotated[tuple[StudyRequest, definition.Study | None], Depends(_checked)], by: Submission
) -> Response:
    """Queue the runs that can start now; the scheduler queues the next ones when a run has ended.

    The answer states the cost as an upper bound. Compare the reported runs with
    `/compare?groups=`.
    """
    body, study = checked_study
    group_id, earlier = by.claim(STUDY, body, Group)
    group = earlier
    if group is None:
        if study is None:  # its key has just expired
            study = _study(body, by.settings)
        runs.check_priority(by.principal, body.priority)
        runs.check_queue(by.session, by.settings, by.principal, len(definition.pending(study, {})))
        # As a text: PostgreSQL does not keep the order of JSON objects, by which arms run and points are numbered.
        spec = body.model_dump(exclude={"toml"}) | {"study": study.model_dump_json()}
        spec["created_by_id"] = by.principal.token_id
        group = groups.new_group(by.session, by.principal, group_id, study.name, STUDY, spec)
        queue_missing(by.session, group)
    return by.created(_view(by.session, group), earlier is None, "get_study", group_id=group_id)


@router.get("/studies/{group_id}", summary="A study", response_model=StudyView, responses=responses(404, 409))
def get_study(group_id: GroupId, _: Viewer, session: ReadSession) -> Response:
    """How far the study is: best learning rates, seeds done, and failed runs that it waits for."""
    group = session.scalar(select(Group).where(Group.id == group_id, Group.kind == STUDY))
    if group is None:
        raise NotFound(f"there is no study {group_id}")
    return answer(_view(session, group))
