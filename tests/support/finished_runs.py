"""A submitted run brought to its end over the ingest call, with evaluations of given accuracies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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
    steps = range(len(accuracies))
    content = reporting.body(
        1,
        identity=identity,
        metrics=[_metrics(step) for step in steps if step > 0],
        evaluations=[_evaluation(step, accuracy) for step, accuracy in enumerate(accuracies)],
        outcome={"attempt": 1, "outcome": "succeeded", "ended_by": "steps", "reason": None, "message": "", "time": 9.0},
    )
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


def _metrics(step: int) -> dict[str, Any]:
    values = {"update/backward_passes_total": float(step), "time/training_s": 6.0 * step, "reward/mean": 0.25}
    return {
        "attempt": 1,
        "step": step,
        "time": 1000.0 + step,
        "metrics": values | {"rollout/tokens_total": 100.0 * step},
    }


def _evaluation(step: int, accuracy: float) -> dict[str, Any]:
    return {
        "attempt": 1,
        "step": step,
        "time": 1000.0 + step,
        "benchmark": "word_problems",
        "scores": {"pass@1": accuracy},
        "per_problem": [accuracy] * 4,
        "problem_ids": ["a", "b", "c", "d"],
        "num_problems": 4,
        "backward_passes_total": float(step),
        "training_s": 6.0 * step,
        "tokens_total": 100.0 * step,
    }
