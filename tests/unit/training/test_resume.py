"""Which settings may differ when a run is resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gxpo_trainer.config import RunConfig
from gxpo_trainer.errors import CheckpointError
from gxpo_trainer.learner.models import STARTER_FOLDER
from gxpo_trainer.training.checkpoints import Checkpoint, check_same_model, check_same_run

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
        {"timeouts": {"sampling_s": 7200.0}},
    ],
)
def test_what_no_step_computes_with_may_change(tmp_path: Path, earlier: Checkpoint, change: dict[str, Any]) -> None:
    check_same_run(earlier, RunConfig.model_validate({**FIRST, **change}), tmp_path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"learner": {"rule": {"name": "gxpo", "k": 7}}}, r"learner\.rule\.k = 3, this run has 7"),
        ({"seed": 1}, r"seed = 0, this run has 1"),
        (
            {"model": {"path": "org/other"}},
            r"model\.path = 'starter', this run has 'org/other'; resume",
        ),
        ({"rollout": {"max_new_tokens": 41}}, r"rollout\.max_new_tokens"),
        ({"rollout": {"max_num_seqs": 8, "temperature": 0.9}}, r"rollout\.temperature"),
        ({"learner": {**FIRST["learner"], "packing": "padded"}}, r"learner\.packing"),
        ({"verifier": {"rewards": [{"name": "format"}]}}, r"verifier\.rewards"),
    ],
)
def test_what_a_step_computes_with_may_not(
    tmp_path: Path, earlier: Checkpoint, change: dict[str, Any], named: str
) -> None:
    with pytest.raises(CheckpointError, match=named):
        check_same_run(earlier, RunConfig.model_validate({**FIRST, **change}), tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"gradient_checkpointing": True}},
        {"learner": {**FIRST["learner"], "token_budget": 64}},
        {"rollout": {"max_num_seqs": 8}},
        {"rollout": {"gpu_memory_utilization": 0.3}},
        {"rollout": {"cpu_kv_cache_gib": 2}},
        {"rollout": {"logprob_gap_mean_limit": 0.1}},
        {"rollout": {"logprob_gap_max_limit": 9.0}},
    ],
)
def test_what_messages_say_to_change_may_change(tmp_path: Path, earlier: Checkpoint, change: dict[str, Any]) -> None:
    """Memory settings and limits: the sums of a step are the same up to rounding."""
    check_same_run(earlier, RunConfig.model_validate({**FIRST, **change}), tmp_path)


@pytest.mark.parametrize(
    "change",
    [{"learner": {**FIRST["learner"], "zero_stage": 3}}, {"placement": {"learner_ranks": 2}}],
)
def test_stage_and_ranks_may_change_because_a_checkpoint_is_resharded(
    tmp_path: Path, earlier: Checkpoint, change: dict[str, Any]
) -> None:
    check_same_run(earlier, RunConfig.model_validate({**FIRST, **change}), tmp_path)


def test_a_setting_that_is_newer_than_the_run_has_its_default(tmp_path: Path, earlier: Checkpoint) -> None:
    identity = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    del identity["config"]["environment"], identity["config"]["rollout"]["async_depth"]
    (tmp_path / "run.json").write_text(json.dumps(identity), encoding="utf-8")
    check_same_run(earlier, RunConfig.model_validate(FIRST), tmp_path)
    changed = RunConfig.model_validate({**FIRST, "environment": {"name": "calculator"}})
    with pytest.raises(CheckpointError, match=r"environment\.name = 'single_turn', this run has 'calculator'"):
        check_same_run(earlier, changed, tmp_path)


def checkpointed(tmp_path: Path, shapes: dict[str, tuple[int, ...]]) -> Checkpoint:
    checkpoint = Checkpoint(tmp_path / "checkpoints" / "step-00000002", 2, {})
    checkpoint.policy.mkdir(parents=True)
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, checkpoint.policy / "model.safetensors")
    return checkpoint


@pytest.fixture
def starter() -> dict[str, tuple[int, ...]]:
    """Names and shapes in the files of the starter policy."""
    return {name: tuple(tensor.shape) for name, tensor in load_file(STARTER_FOLDER / "model.safetensors").items()}


def test_a_checkpoint_of_the_runs_model_is_accepted(
    tmp_path: Path, earlier: Checkpoint, starter: dict[str, tuple[int, ...]]
) -> None:
    check_same_model(checkpointed(tmp_path, starter), RunConfig(), tmp_path, "a" * 64)


@pytest.mark.parametrize(
    ("name", "shape", "found"),
    [
        ("model.norm.weight", (64,), r"it has \(64,\) for model.norm.weight, that of model.path \(128,\)"),
        ("model.extra.weight", (3,), r"it has \(3,\) for model.extra.weight, that of model.path nothing"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    tmp_path: Path, earlier: Checkpoint, starter: dict[str, tuple[int, ...]], name: str, shape: Any, found: str
) -> None:
    checkpoint = checkpointed(tmp_path, {**starter, name: shape})
    with pytest.raises(CheckpointError, match=rf"of another model: {found}; set model.path \(now 'starter'\)"):
        check_same_model(checkpoint, RunConfig(), tmp_path, "a" * 64)


def test_a_run_is_not_continued_with_other_weights_of_the_same_shapes(
    tmp_path: Path, earlier: Checkpoint, starter: dict[str, tuple[int, ...]]
) -> None:
    identity = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    (tmp_path / "run.json").write_text(json.dumps({**identity, "policy_sha256": "b" * 64}), encoding="utf-8")
    checkpoint = checkpointed(tmp_path, starter)
    check_same_model(checkpoint, RunConfig(), tmp_path, "b" * 64)
    with pytest.raises(CheckpointError, match=r"began with another model: .* hash bbbbbbbbbbbb, .* aaaaaaaaaaaa; set"):
        check_same_model(checkpoint, RunConfig(), tmp_path, "a" * 64)
