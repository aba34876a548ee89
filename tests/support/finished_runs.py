"""A submitted run brought to its end over the ingest call, with evaluations of given accuracies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
from sqlalchemy import select

from gxpo_services.db.database import Database
from gxpo_services.db.tables import Run
from gxpo_services.runs import service
from gxpo_trainer.config import RunConfig
from gxpo_trainer.reporting.identity import run_identity
from support import reporting


def finish(url: str, database: Database, run_id: str, accuracies: list[float]) -> None:
    """One step, one pass and 6 s between two evaluations, of four problems each."""
    with database.reading() as session:
        run = service.find(session, run_id)
        identity = run_identity(RunConfig.model_validate(run.config), policy_sha256="policy")
    _, secret = reporting.launch(database, run_id).split()
    metrics, evaluations = [], []
    for step, accuracy in enumerate(accuracies):
        costs = {"backward_passes_total": float(step), "training_s": 6.0 * step, "tokens_total": 100.0 * step}
        if step > 0:
            names = ("update/backward_passes_total", "time/training_s", "rollout/tokens_total")
            values = dict(zip(names, costs.values(), strict=True))
            metrics.append(reporting.metric_row(step, **values, **{"reward/mean": 0.25}))
        per_problem = {"per_problem": [accuracy] * 4, "problem_ids": list("abcd"), "num_problems": 4}
        scores = {"pass@1": accuracy}
        evaluations.append(
            reporting.evaluation_row(step, benchmark="word_problems", scores=scores, **per_problem, **costs)
        )
    outcome = {"attempt": 1, "outcome": "succeeded", "ended_by": "steps", "reason": None, "message": "", "time": 9.0}
    content = reporting.body(1, identity=identity, metrics=metrics, evaluations=evaluations, outcome=outcome)
    answer = httpx.post(
        f"{url}/api/v1/runs/{run_id}/ingest", json=content, headers={"Authorization": f"Bearer {secret}"}
    )
    assert answer.status_code == 200, answer.text


@contextmanager
def trainer(url: str, database: Database, accuracies: Callable[[Run], list[float]]) -> Iterator[None]:
    """A thread that ends each run once it is submitted."""
    stop = threading.Event()

    def report() -> None:
        done: set[str] = set()
        while not stop.wait(0.05):
            with database.reading() as session:
                submitted = [run for run in session.scalars(select(Run)) if run.id not in done]
            for run in submitted:
                finish(url, database, run.id, accuracies(run))
                done.add(run.id)

    thread = threading.Thread(target=report)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
