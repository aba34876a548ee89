"""Whole runs with a real vLLM on GPUs: every rule on shared devices, resuming, and with two GPUs tensor parallelism,
several ranks and NCCL.

The starter policy fits beside its engine on any GPU, so the planner would never park it; tests of shared GPUs run both
ways.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ray_clusters import LOOPBACK, running_head

from gxpo_trainer.config import LoraConfig, RunConfig
from gxpo_trainer.config.io import to_toml
from gxpo_trainer.reporting.reading import read_metrics, read_samples

HAS_VLLM = importlib.util.find_spec("vllm") is not None
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
    pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed"),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two CUDA devices are needed")
RULES: list[dict[str, Any]] = [
    {"name": "grpo"},
    {"name": "sfpo", "k": 3},
    {"name": "gxpo", "k": 5},
    {"name": "epochs", "k": 3},
    {"name": "extragradient"},
]


@pytest.fixture(params=["resident", "alternating"])
def sharing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether learner and engines stay on a shared GPU together, or leave it to each other."""
    from gxpo_trainer.training import run

    monkeypatch.setattr(run, "check_memory", lambda *_: run.Fit(request.param == "resident"))
    return str(request.param)


def config(rule: dict[str, Any], steps: int, **placement: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"max_length": 192},
            "data": {"num_problems": 256},
            "rollout": {"prompts_per_step": 8, "samples_per_prompt": 4, "max_new_tokens": 40},
            "evaluation": {"every_steps": 0, "num_problems": 16, "samples_per_prompt": 2},
            "checkpoint": {"every_steps": 2},
            "learner": {"rule": rule, "precision": "bf16", "zero_stage": 2},
            "budget": {"steps": steps},
            "placement": {"device": "gpu", **placement},
        }
    )


def train(settings: RunConfig, out: Path, **options: Any) -> list[dict[str, Any]]:
    from gxpo_trainer.training.run import train_run

    assert train_run(settings, out, **options) == "steps"
    return steps(out)


def steps(out: Path) -> list[dict[str, Any]]:
    """Rows of the finished steps of a run."""
    if not out.is_dir():
        return []
    return [row for row in read_metrics(out) if "rollout/logprob_gap_mean" in row["metrics"]]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["name"])
def test_five_steps_on_one_shared_gpu(rule: dict[str, Any], sharing: str, tmp_path: Path) -> None:
    rows = train(config(rule, 5, colocate=True), tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert max(row["metrics"]["rollout/logprob_gap_mean"] for row in rows) < 0.05


def test_a_run_on_a_shared_gpu_resumes(sharing: str, tmp_path: Path) -> None:
    rule = {"name": "gxpo", "k": 5}
    train(config(rule, 2, colocate=True), tmp_path / "run")
    rows = train(config(rule, 4, colocate=True), tmp_path / "run", resume=True)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]


def test_a_killed_trainer_resumes_on_the_gpu_that_its_processes_held(tmp_path: Path) -> None:
    """kill -9 of the trainer after step 3 of 6; the checkpoint of step 2 is the last one, so step 3 may be repeated."""
    out = tmp_path / "run"
    with running_head(os.cpu_count() or 1, torch.cuda.device_count()) as address:
        file = tmp_path / "run.toml"
        file.write_text(to_toml(config(RULES[2], 6, colocate=True, ray_address=address)), encoding="utf-8")
        command = [sys.executable, "-m", "gxpo_trainer.cli", "train", str(file), "--out", str(out)]
        trainer = subprocess.Popen(command, env=os.environ | LOOPBACK)
        while trainer.poll() is None and len(steps(out)) < 3:
            time.sleep(0.05)
        trainer.kill()
        trainer.wait()
        assert 3 <= len(steps(out)) < 6
        subprocess.run([*command, "--resume"], env=os.environ | LOOPBACK, check=True)
    assert [row["step"] for row in steps(out)] == [1, 2, 3, 4, 5, 6]
    assert steps(out)[-1]["attempt"] == 2


@pytest.mark.parametrize("stage", [2, 3])
def test_adapters_on_one_shared_gpu(stage: int, sharing: str, tmp_path: Path) -> None:
    adapters = {"lora": LoraConfig(rank=8, alpha=16.0), "zero_stage": stage}
    rows = train(config({"name": "gxpo", "k": 5}, 3, colocate=True).updated(learner=adapters), tmp_path / "run")
    assert max(row["metrics"]["rollout/logprob_gap_mean"] for row in rows) < 0.05


@two_gpus
@pytest.mark.parametrize("engines", [{"samplers": 1, "tensor_parallel": 2}, {"samplers": 2}], ids=["split", "two"])
def test_two_ranks_share_their_gpus_with_engines(engines: dict[str, int], sharing: str, tmp_path: Path) -> None:
    """Each engine worker maps the buckets of the rank on its own GPU: the handles of both ranks are one location."""
    settings = config({"name": "gxpo", "k": 5}, 3, colocate=True, learner_ranks=2, **engines)
    rows = train(settings, tmp_path / "run")
    assert len(rows) == 3
    assert max(row["metrics"]["rollout/logprob_gap_mean"] for row in rows) < 0.05
    assert "weights are sent by cuda_ipc" in (tmp_path / "run" / "events.jsonl").read_text()


@two_gpus
@pytest.mark.parametrize("stage", [2, 3])
def test_two_ranks_that_share_the_columns_of_rows_have_the_engines_log_probabilities(
    stage: int, tmp_path: Path
) -> None:
    settings = config({"name": "gxpo", "k": 5}, 3, colocate=True, learner_ranks=2, samplers=2)
    rows = train(settings.updated(learner={"sequence_parallel": 2, "zero_stage": stage}), tmp_path / "run")
    assert max(row["metrics"]["rollout/logprob_gap_mean"] for row in rows) < 0.05


@two_gpus
def test_deterministic_samples_do_not_depend_on_the_number_of_engines(tmp_path: Path) -> None:
    """Of the first step: later ones differ by the rounding of sums over ranks."""
    sampled = []
    for number in (1, 2):
        settings = config({"name": "grpo"}, 1, colocate=True, learner_ranks=number, samplers=number)
        train(settings.updated(rollout={"deterministic": True}), tmp_path / str(number))
        samples = read_samples(tmp_path / str(number))
        sampled.append(sorted((row["prompt_id"], row["sample"], row["response"]) for row in samples))
    assert sampled[0]
    assert sampled[0] == sampled[1]


@two_gpus
@pytest.mark.parametrize("deterministic", [False, True])
def test_separate_gpus_sync_by_nccl(deterministic: bool, tmp_path: Path) -> None:
    """A deterministic engine pins NCCL settings for its own groups; the learner's must not have them."""
    settings = config({"name": "gxpo", "k": 5}, 3, colocate=False)
    rows = train(settings.updated(rollout={"deterministic": deterministic}), tmp_path / "run")
    assert len(rows) == 3
    assert "weights are sent by nccl" in (tmp_path / "run" / "events.jsonl").read_text()
