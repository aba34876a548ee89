"""A launched run, and a trainer's calls about it, without a trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient
from httpx import Response

from gxpo_services.api.principals import hash_token, new_token
from gxpo_services.db.database import Database
from gxpo_services.ingest.reports import IngestView, receive
from gxpo_services.run_states import RunState
from gxpo_trainer.jsonl import plain
from support import queued_runs

KINDS = ("metrics", "samples", "evaluations", "events")
NOTHING = dict.fromkeys(KINDS, 0)


def launch(database: Database, run_id: str | None = None, number: int = 1, state: RunState = RunState.STARTING) -> str:
    """Make a launch of a run (a new one by default) the present one; "<run id> <its token>"."""
    secret = new_token("run")
    run_id = run_id or queued_runs.add_run(database)
    queued_runs.change(
        database,
        run_id,
        state=state,
        launch=number,
        last_batch=0,
        run_token_sha256=hash_token(secret),
        lease_owner="tests",
        lease_token=number,
        started_at=None,
    )
    return f"{run_id} {secret}"


def body(number: int | None, attempt: int = 1, **parts: Any) -> dict[str, Any]:
    """A call's content; `offsets` are of no line unless given."""
    return {
        "attempt": attempt,
        "batch": number,
        "offsets": NOTHING | parts.pop("offsets", {}),
        **{kind: plain(parts.get(kind, [])) for kind in KINDS},
        "identity": parts.get("identity"),
        "outcome": parts.get("outcome"),
    }


def post(client: TestClient, launched: str, content: dict[str, Any] | bytes) -> Response:
    """Send a call with the run's own token."""
    run_id, secret = launched.split()
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    return client.post(f"/api/v1/runs/{run_id}/ingest", content=data, headers={"Authorization": f"Bearer {secret}"})


def send(database: Database, launched: str, content: dict[str, Any]) -> IngestView:
    """The same without HTTP."""
    run_id, secret = launched.split()
    return receive(database, run_id, secret, json.dumps(content).encode())


def metric_row(step: int, attempt: int = 1, **values: float) -> dict[str, Any]:
    return {"attempt": attempt, "step": step, "time": 1.0, "metrics": values}


def sample_row(step: int, attempt: int = 1, **values: Any) -> dict[str, Any]:
    return {
        "attempt": attempt,
        "step": step,
        "time": 1.5,
        "prompt_id": "p1",
        "group": 0,
        "sample": 0,
        "prompt": "1+1?",
        "response": "it is \\boxed{2}",
        "extracted": "2",
        "gold": "2",
        "verdict": "correct",
        "detail": "",
        "reward": 1.0,
        "length": 7,
        "truncated": False,
        "weights_version": 0,
        **values,
    }


EPISODE: dict[str, Any] = {
    "turns": [
        {"speaker": "policy", "text": "<calc>1+1</calc>", "reward": None},
        {"speaker": "environment", "text": "2", "reward": 0.5},
        {"speaker": "policy", "text": "it is \\boxed{2}", "reward": None},
    ],
    "end": "done",
    "end_detail": "",
    "sampled_length": 11,
}
"""What a row of samples.jsonl has besides, in a run with an environment."""


def evaluation_row(step: int, attempt: int = 1, benchmark: str = "easy", **values: Any) -> dict[str, Any]:
    head = {"attempt": attempt, "step": step, "time": 2.0, "benchmark": benchmark}
    return {**head, "scores": {"pass@1": 0.5}, "per_problem": [0.0, 1.0], **values}


def event_row(kind: str, message: str = "", **fields: Any) -> dict[str, Any]:
    return {"time": 3.25, "kind": kind, "message": message, **fields}


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(plain(row)) + "\n" for row in rows), encoding="utf-8")
