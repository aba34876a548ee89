"""Studies as groups of runs: queue what is missing, whenever a run has ended."""

from __future__ import annotations

import math
import time
import tomllib
from collections.abc import Iterator
from dataclasses import asdict

from pydantic import ValidationError
from sqlalchemy.orm import Session

from gxpo_services.access.principals import Principal, Role
from gxpo_services.api import idempotency
from gxpo_services.api.errors import Conflict, Gone, Invalid, NotFound
from gxpo_services.api.ids import new_id
from gxpo_services.configs.checks import checked
from gxpo_services.db.tables.runs import STUDY, Group, Run
from gxpo_services.events import repository as events
from gxpo_services.groups import repository as groups
from gxpo_services.groups.service import CANCELLED, view_of
from gxpo_services.run_states import TERMINAL, RunState
from gxpo_services.runs import limits
from gxpo_services.runs import repository as runs_repository
from gxpo_services.runs import service as runs
from gxpo_services.settings import ServiceSettings
from gxpo_services.studies import repository
from gxpo_services.studies.schemas import ArmView, StudyCost, StudyRequest, StudyView
from gxpo_trainer.config.messages import BadSettings, config_error
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.studies.definition import Study
from gxpo_trainer.studies.expansion import RunKey, RunResult, best_rate, largest_cost, pending, run_config


def submit(
    session: Session, server: ServiceSettings, principal: Principal, request: StudyRequest, key: str | None
) -> tuple[StudyView, bool]:
    """Queue the first runs of a study; returns it and whether it is new. Raises Invalid, Conflict, Gone."""
    study = _checked(request.toml, server)
    group_id = new_id("g")
    owner = idempotency.claim(session, principal, key, STUDY, request, group_id)
    if owner != group_id:
        group = runs_repository.find_group(session, owner)
        if group is None:
            raise Gone(f"study {owner}, created with this Idempotency-Key, no longer exists; use a new key")
        return _view(session, group), False
    limits.check_priority(principal, request.priority)
    limits.check_queue(session, server, principal, len(pending(study, {})))
    spec = request.model_dump(exclude={"toml"}) | {"study": study.model_dump(mode="json")}
    group = Group(
        id=group_id,
        name=study.name,
        kind=STUDY,
        spec=spec | {"created_by_id": principal.token_id},
        created_at=time.time(),
        created_by=principal.name,
    )
    groups.add(session, group)
    queue_missing(session, group)
    return _view(session, group), True


def get(session: Session, group_id: str) -> StudyView:
    """Raises NotFound for anything that is not a study, and Conflict for one of a version with other settings."""
    group = runs_repository.find_group(session, group_id)
    if group is None or group.kind != STUDY:
        raise NotFound(f"there is no study {group_id}")
    return _view(session, group)


def queue_missing(session: Session, group: Group) -> int:
    """Queue the runs of a study that can start now and were never queued; returns their number.

    The caller holds the queue's lock, so that two schedulers do not queue the same run.
    """
    if group.spec.get(CANCELLED):
        return 0
    study = study_of(group)
    found = repository.runs_of(session, group)
    queued = {key_of(run) for run in found}
    principal = Principal(group.spec["created_by_id"], group.created_by, Role.SUBMITTER)
    made = []
    for key in pending(study, _results(found)):
        if key not in queued:
            run = runs.new_run(
                run_config(study, key),
                principal,
                notes=group.spec["notes"],
                priority=group.spec["priority"],
                group=group,
                group_values=asdict(key),
            )
            runs.set_tags(run, group.spec["tags"])
            made.append(run)
    runs_repository.add(session, made)
    for run in made:
        message = f"submitted by study {group.name!r}"
        events.record(session, run.number, principal.actor, "submitted", message, group=group.id)
    session.flush()
    return len(made)


def study_of(group: Group) -> Study:
    """Raises Conflict for a study that this version of gxpo no longer accepts."""
    try:
        return Study.model_validate(group.spec["study"])
    except ValidationError as error:
        reason = config_error(error, "the study", Study)
        raise Conflict(
            f"study {group.id} was submitted to another version of gxpo: {reason}; submit it again"
        ) from None


def key_of(run: Run) -> RunKey:
    return RunKey(**(run.group_values or {}))


def _results(found: list[Run]) -> dict[RunKey, RunResult]:
    """Succeeded and diverged runs; a retry that succeeds stands for the failed run of the same key."""
    results: dict[RunKey, RunResult] = {}
    for run in found:
        diverged = run.state == RunState.FAILED and run.reason == "diverged"
        if diverged or run.state == RunState.SUCCEEDED:
            results[key_of(run)] = RunResult(run.score or 0.0, diverged)
    return results


def _checked(toml: str, server: ServiceSettings) -> Study:
    """The study, if every arm's config is accepted by trainer and server. Raises Invalid."""
    try:
        study = Study.model_validate(tomllib.loads(toml))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise Invalid.of("toml", f"is not valid TOML: {error}") from None
    except ValidationError as error:
        raise Invalid.of("toml", str(config_error(error, "the study", Study))) from None
    # It needs the folders of runs, which only `gxpo study run` has.
    study = study.model_copy(update={"extrapolation": None})
    for arm in study.arms:
        try:
            for key in _extremes(study, arm):
                if not math.isfinite(key.learning_rate):
                    raise Invalid.of("learning_rate", f"is {key.learning_rate}; lower its factor or the ladder's rates")
                checked(run_config(study, key).model_dump(mode="json"), server)
        except (BadSettings, ConfigError, Invalid) as error:
            raise Invalid.of("toml", f"arms.{arm}: {error}") from None
    return study


def _extremes(study: Study, arm: str) -> Iterator[RunKey]:
    """Runs of an arm at the ends of its learning rates and seeds, whose valid values are intervals."""
    rates, source = study.ladder.learning_rates, study.arms[arm].learning_rate_of
    factor = 1.0 if source is None else study.arms[arm].learning_rate_factor
    for extreme in (min, max):
        yield RunKey("report", arm, extreme(rates) * factor, extreme(study.seeds))
        if source is None:
            yield RunKey("ladder", arm, extreme(rates), extreme(study.ladder.seeds))


def _view(session: Session, group: Group) -> StudyView:
    study = study_of(group)
    found = repository.runs_of(session, group)
    results = _results(found)
    most_runs, most_passes = largest_cost(study)
    settled = {*results, *(key_of(run) for run in found if run.state not in TERMINAL)}
    return StudyView(
        group=view_of(session, group),
        title=study.title,
        baseline=study.arms[study.baseline].label,
        seeds=list(study.seeds),
        cost=StudyCost(runs=most_runs, backward_passes=most_passes),
        runs_done=len(results),
        complete=not pending(study, results),
        failed=[run.id for run in found if key_of(run) not in settled],
        arms=[
            ArmView(
                name=name,
                label=arm.label,
                learning_rate=best_rate(study, name, results),
                seeds_done=sorted(key.seed for key in results if key.stage == "report" and key.arm == name),
            )
            for name, arm in study.arms.items()
        ],
        study=study.model_dump(mode="json"),
    )
