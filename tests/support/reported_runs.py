"""Runs that have reported, put into the database the way the API and a trainer would have done it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import select

from gxpo_services.api.dependencies import find
from gxpo_services.api.fields import new_id
from gxpo_services.api.principals import Principal, Role
from gxpo_services.db.database import Database
from gxpo_services.db.tables import Group, Run
from gxpo_services.runs import service
from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.io import build
from gxpo_trainer.reporting.identity import run_identity
from support import reporting

PRINCIPAL = Principal("t1", "tests", Role.SUBMITTER)


def config(rule: Mapping[str, Any], seed: int = 0, name: str = "run", **settings: Any) -> RunConfig:
    learner = {"rule": dict(rule), "optimizer": {"learning_rate": settings.pop("rate", 1e-5)}}
    return build({"name": name, "seed": seed, "learner": learner, **settings})


def add_group(database: Database, name: str = "sweep", kind: str = "sweep", **spec: Any) -> str:
    group = new_id("g")
    with database.writing() as session:
        session.add(Group(id=group, name=name, kind=kind, spec=spec, created_at=1.0, created_by="tests"))
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


def finish(database: Database, run_id: str, accuracies: list[float]) -> None:
    """A submitted run brought to its end: one step, one pass and 6 s between two evaluations, of four problems each."""
    with database.reading() as session:
        run = find(session, Run, run_id)
        identity = run_identity(RunConfig.model_validate(run.config), policy_sha256="policy")
    metrics, evaluations = [], []
    for step, accuracy in enumerate(accuracies):
        costs = {"backward_passes_total": float(step), "training_s": 6.0 * step, "tokens_total": 100.0 * step}
        if step > 0:
            names = ("update/backward_passes_total", "time/training_s", "rollout/tokens_total")
            spent = dict(zip(names, costs.values(), strict=True))
            metrics.append(reporting.metric_row(step, **spent, **{"reward/mean": 0.25}))
        per_problem = {"per_problem": [accuracy] * 4, "problem_ids": list("abcd"), "num_problems": 4}
        values = {"scores": {"pass@1": accuracy}, **per_problem, **costs}
        evaluations.append(reporting.evaluation_row(step, benchmark="word_problems", **values))
    outcome = {"attempt": 1, "outcome": "succeeded", "ended_by": "steps", "reason": None, "message": "", "time": 9.0}
    content = reporting.body(1, identity=identity, metrics=metrics, evaluations=evaluations, outcome=outcome)
    reporting.send(database, reporting.launch(database, run_id), content)


@contextmanager
def trainer(database: Database, accuracies: Callable[[Run], list[float]]) -> Iterator[None]:
    """A thread that ends each run once it is submitted."""
    stop = threading.Event()

    def report() -> None:
        done: set[str] = set()
        while not stop.wait(0.05):
            with database.reading() as session:
                submitted = [run for run in session.scalars(select(Run)) if run.id not in done]
            for run in submitted:
                finish(database, run.id, accuracies(run))
                done.add(run.id)

    thread = threading.Thread(target=report)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
