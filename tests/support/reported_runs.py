"""Runs that have reported, put into the database the way the API and a trainer would have done it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import select

from gxpo_services.api.fields import new_id
from gxpo_services.api.principals import Principal, Role
from gxpo_services.db.database import Database
from gxpo_services.db.tables import Group
from gxpo_services.runs import service
from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.io import build
from support import reporting

PRINCIPAL = Principal("t1", "tests", Role.SUBMITTER)


def config(rule: Mapping[str, Any], seed: int = 0, name: str = "run", **settings: Any) -> RunConfig:
    learner = {"rule": dict(rule), "optimizer": {"learning_rate": settings.pop("rate", 1e-5)}}
    return build({"name": name, "seed": seed, "learner": learner, **settings})


def add_group(database: Database, name: str = "sweep") -> str:
    group = new_id("g")
    with database.writing() as session:
        session.add(Group(id=group, name=name, kind="sweep", spec={}, created_at=1.0, created_by="tests"))
    return group


def add_run(
    database: Database, made: RunConfig, *, group: str | None = None, values: Mapping[str, Any] | None = None
) -> str:
    """A queued run; its id."""
    with database.writing() as session:
        owner = session.scalars(select(Group).where(Group.id == group)).one() if group else None
        run = service.new_run(made, PRINCIPAL, group=owner, group_values=dict(values) if values is not None else None)
        session.add(run)
        return run.id


def report(
    database: Database,
    run_id: str,
    *,
    metrics: Sequence[dict[str, Any]] = (),
    evaluations: Sequence[dict[str, Any]] = (),
    samples: Sequence[dict[str, Any]] = (),
    identity: Mapping[str, Any] | None = None,
) -> None:
    """Everything its trainer reports, in one call."""
    launched = reporting.launch(database, run_id)
    parts = {"metrics": list(metrics), "evaluations": list(evaluations), "samples": list(samples)}
    reporting.send(database, launched, reporting.body(1, identity=identity, **parts))


def evaluated_run(
    database: Database,
    made: RunConfig,
    scores: Mapping[int, Sequence[float]],
    *,
    passes: int = 1,
    step_s: float = 36.0,
    shutoff: int | None = None,
    benchmarks: Sequence[str] = ("easy",),
    group: str | None = None,
    values: Mapping[str, Any] | None = None,
    **fields: Any,
) -> str:
    """A run whose evaluations hold the given per-problem scores; each step takes `passes` passes and `step_s`."""
    run_id = add_run(database, made, group=group, values=values)
    evaluations = []
    for step, per_problem in scores.items():
        mean = sum(per_problem) / len(per_problem)
        for benchmark in benchmarks:
            record = {
                "scores": {"pass@1": mean, "pass@1/ci_low": mean - 0.1, "pass@1/ci_high": mean + 0.1},
                "per_problem": list(per_problem),
                "problem_ids": [f"p{number}" for number in range(len(per_problem))],
                "backward_passes_total": step * passes,
                "training_s": step_s * step,
                "tokens_total": 100 * step,
                "num_problems": len(per_problem),
                "samples_per_prompt": 4,
                "data_sha256": "held-out",
                **fields,
            }
            evaluations.append(reporting.evaluation_row(step, benchmark=benchmark, **record))
    metrics = []
    for step in range(1, max(scores) + 1):
        names: dict[str, float] = {"reward/mean": 0.1 * step, "update/backward_passes_total": step * passes}
        if shutoff is not None and step <= shutoff:
            names |= {"gate/z": 0.9 if step == shutoff else -0.1 * step, "gate/threshold": 0.5}
        if shutoff is not None and step >= shutoff:
            names["gate/shutoff_step"] = shutoff
        metrics.append(reporting.metric_row(step, **names))
    identity = {"config": made.model_dump(mode="json"), "policy_sha256": "policy", "hardware": {"cpu": "x"}}
    report(database, run_id, metrics=metrics, evaluations=evaluations, identity=identity)
    return run_id
