"""What of a run may be otherwise when it goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gxpo_trainer.config import RunConfig
from gxpo_trainer.errors import CheckpointError
from gxpo_trainer.training.checkpoints import Checkpoint
from gxpo_trainer.training.resume import check_same_run

FIRST: dict[str, Any] = {"name": "first", "budget": {"steps": 2}, "learner": {"rule": {"name": "gxpo", "k": 3}}}


@pytest.fixture
def earlier(tmp_path: Path) -> Checkpoint:
    """A checkpoint of a run of FIRST, whose identity lies in the folder."""
    identity = {"config": RunConfig.model_validate(FIRST).model_dump(mode="json")}
    (tmp_path / "run.json").write_text(json.dumps(identity), encoding="utf-8")
    return Checkpoint(tmp_path / "checkpoints" / "step-00000002", 2, {})


@pytest.mark.parametrize(
    "change",
    [
        {"budget": {"steps": 4}},
        {"budget": {"steps": None, "backward_passes": 9}},
        {"name": "second"},
        {"evaluation": {"every_steps": 7}},
        {"checkpoint": {"every_steps": 1}},
        {"placement": {"learner_threads": 1}},
    ],
)
def test_what_no_step_computes_with_may_change(tmp_path: Path, earlier: Checkpoint, change: dict[str, Any]) -> None:
    check_same_run(earlier, RunConfig.model_validate({**FIRST, **change}), tmp_path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"learner": {"rule": {"name": "gxpo", "k": 7}}}, r"learner\.rule\.k = 3, this run has 7"),
        ({"seed": 1}, r"seed = 0, this run has 1"),
        ({"rollout": {"max_new_tokens": 41}}, r"rollout\.max_new_tokens"),
        ({"verifier": {"rewards": [{"name": "format"}]}}, r"verifier\.rewards"),
    ],
)
def test_what_a_step_computes_with_may_not(
    tmp_path: Path, earlier: Checkpoint, change: dict[str, Any], named: str
) -> None:
    with pytest.raises(CheckpointError, match=named):
        check_same_run(earlier, RunConfig.model_validate({**FIRST, **change}), tmp_path)
