"""Runs in a service's database as they would be after some months, for its benchmarks."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import insert, text

from gxpo_services.api.fields import new_id
from gxpo_services.db.database import Database
from gxpo_services.db.tables import EvaluationRow, Run, RunDocument, RunSearch, RunTag
from gxpo_services.ingest import reports as ingest
from gxpo_services.ingest.batches import Batch, MetricRow
from gxpo_services.outputs import samples
from gxpo_services.run_states import RunState
from gxpo_services.runs import service
from gxpo_services.runs.configs import stored
from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.io import load_preset


def add_runs(
    database: Database, count: int, *, state: RunState | None, config: dict[str, Any] | None = None, **values: Any
) -> list[str]:
    """Runs as they would be after some months; `state` None: of all kinds."""
    config = stored(RunConfig.model_validate(config) if config else load_preset("demo"))
    chance = random.Random(count)
    rows = []
    for number in range(count):
        created = time.time() - chance.random() * 1e7
        score = chance.random() if chance.random() < 0.8 else None
        rows.append(
            {
                "id": new_id("r", created),
                "name": f"run {number}",
                "config_sha256": f"{number:064x}",
                "rule": chance.choice(["grpo", "sfpo", "gxpo"]),
                "rule_label": "GXPO K=5",
                "model": "starter",
                "seed": number,
                "step_budget": 40,
                "cpus": 2.0,
                "gpus": 0.0,
                "created_by": "bench",
                "created_by_id": "t0",
                "state": state or chance.choice(list(RunState)),
                "created_at": created,
                "updated_at": created,
                "queued_at": created,
                "score": score,
                "score_best": score,
                **values,
            }
        )
    tags = [(f"t{number % 10}", f"night {number % 7}") for number in range(count)]
    texts = ["\n".join([row["name"], row["id"], row["model"], *words]) for row, words in zip(rows, tags, strict=True)]
    with database.writing() as session:
        numbers = list(session.scalars(insert(Run).returning(Run.number, sort_by_parameter_order=True), rows))
        session.execute(insert(RunDocument), [{"run_number": number, "config": config} for number in numbers])
        searches = [{"run_number": number, "text": text} for number, text in zip(numbers, texts, strict=True)]
        session.execute(insert(RunSearch), searches)
        pairs = [(number, tag) for number, words in zip(numbers, tags, strict=True) for tag in words]
        session.execute(insert(RunTag), [{"run_number": number, "tag": tag} for number, tag in pairs])
    return [row["id"] for row in rows]


def add_evaluations(database: Database, run_id: str) -> None:
    """Evaluations of two benchmarks along a run."""
    chance = random.Random(run_id)
    with database.writing() as session:
        run = service.lock(session, run_id)
        assert run is not None
        rows = []
        for step in range(0, 200, 10):
            for benchmark in ("math", "arithmetic"):
                per_problem = [float(chance.random() < 0.3 + step / 500) for _ in range(300)]
                record = {
                    "attempt": 1,
                    "step": step,
                    "time": 1.0,
                    "benchmark": benchmark,
                    "scores": {"pass@1": sum(per_problem) / len(per_problem)},
                    "per_problem": per_problem,
                    "num_problems": len(per_problem),
                    "samples_per_prompt": 1,
                    "backward_passes_total": 3.0 * step,
                    "training_s": 60.0 * step,
                    "tokens_total": 1e5 * step,
                }
                columns = {"attempt": 1, "step": step, "benchmark": benchmark}
                rows.append({**columns, "record": record})
        samples.add_rows(session, EvaluationRow, run.number, rows)


def settle(database: Database) -> None:
    """What PostgreSQL does by itself within a minute: count the rows, without which its plans are guesses."""
    if not database.is_sqlite:
        with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("VACUUM ANALYZE"))


def add_metrics(database: Database, run_id: str, rows: Sequence[MetricRow]) -> None:
    with database.writing() as session:
        run = service.lock(session, run_id)
        assert run is not None
        ingest.apply_batch(
            session, run, Batch(run.launch, None, offsets={"metrics": 0}, rows={"metrics": rows}), "bench"
        )
