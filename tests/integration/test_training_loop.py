"""The whole loop on real Ray, vLLM and DeepSpeed: ranks, adapters, shared devices, proofs."""

from __future__ import annotations

import json
import os
from itertools import pairwise

import pytest
import ray
import torch
from peft import PeftModel
from safetensors.torch import load_file
from support import sockets
from support.tiny_families import save_family
from transformers import AutoModelForCausalLM

from docs_build.metrics import undescribed
from gxpo_trainer.learner.group import LearnerGroup
from gxpo_trainer.learner.models import STARTER_FOLDER
from gxpo_trainer.planner.architectures import FAMILIES, TRAINS
from gxpo_trainer.reporting.reading import read_events, read_metrics
from gxpo_trainer.rollout.engines import Engines
from gxpo_trainer.training.controller import Controller
from gxpo_trainer.training.run import train_run

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("ray_on_loopback")]


@pytest.mark.long("twenty steps; three of GXPO run in the short tier")
def test_twenty_steps_of_gxpo_stay_on_policy_to_a_millionth(tmp_path, small_run):
    rule = {"name": "gxpo", "k": 5, "gate": {"threshold": 3.0, "warmup": 10}}
    config = small_run(
        budget={"steps": 20},
        learner={"rule": rule, "optimizer": {"learning_rate": 1e-5}},
        diagnostics={"trajectory_every": 10},
        evaluation={"every_steps": 0, "samples_per_prompt": 2, "num_problems": 16, "at_start": True},
    )
    train_run(config, tmp_path / "run")
    rows = [row["metrics"] for row in read_metrics(tmp_path / "run") if row["step"] > 0]
    assert len(rows) == 20
    assert max(row["rollout/logprob_gap_mean"] for row in rows) <= 1e-6
    assert max(row["rollout/logprob_gap_max"] for row in rows) <= 1e-4
    shut = next((int(row["gate/shutoff_step"]) for row in rows if "gate/shutoff_step" in row), 20)
    assert rows[-1]["update/backward_passes_total"] == 3 * shut + 20 - shut
    fired = [event["step"] for event in read_events(tmp_path / "run") if event["kind"] == "gate_fired"]
    assert fired == ([shut] if "gate/shutoff_step" in rows[-1] else [])
    assert "gate/z" in rows[10]
    assert "gate/z" not in rows[9]
    assert rows[9]["update/diagnostic_passes_total"] == 5
    assert 0 < rows[9]["gxpo/theta_k_relative_error"] < 1
    assert not undescribed({name for row in read_metrics(tmp_path / "run") for name in row["metrics"]})
    named = sum(rows[-1][f"time/{part}_s"] for part in ("rollout", "verify", "update", "sync"))
    assert named <= rows[-1]["time/step_s"]


@pytest.mark.long("the families of models, each on engines of its own")
@pytest.mark.parametrize("family", [family for family, w in FAMILIES.items() if w == TRAINS])
def test_sampler_and_learner_agree_on_each_family_that_trains(family, tmp_path, small_run, capsys):
    """Every weight of a sync is read back; responses are longer than the attention windows."""
    model = {"path": str(save_family(tmp_path / family, family)), "max_length": 256}
    parts = {"evaluation": {"benchmarks": []}, "budget": {"steps": 1}, "learner": {"rule": {"name": "grpo"}}}
    train_run(small_run(model=model, **parts), tmp_path / "run")
    rows = [row["metrics"] for row in read_metrics(tmp_path / "run") if "rollout/logprob_gap_mean" in row["metrics"]]
    assert rows[0]["rollout/logprob_gap_mean"] <= 5e-6
    assert "pass@1" not in "".join(capsys.readouterr()), "a run without benchmarks has no accuracies to tell"


@pytest.mark.long("shared devices with two engines and two ranks")
def test_gxpo_at_another_temperature_takes_turns_with_its_engines(tmp_path, small_run, monkeypatch):
    """Two engines and two whole copies of the learner with shared devices; on CPUs vLLM ignores sleep and wake."""
    moves = []

    def record(owner, method):
        inner = getattr(owner, method)

        def call(self, *arguments, **options):
            moves.append(" ".join([method, *map(str, (*arguments, *options.values()) if owner is Engines else ())]))
            return inner(self, *arguments, **options)

        monkeypatch.setattr(owner, method, call)

    for owner, methods in ((Engines, ("sleep", "wake")), (LearnerGroup, ("park", "unpark", "train_step"))):
        for method in methods:
            record(owner, method)
    config = small_run(
        rollout={"temperature": 0.7},
        learner={"rule": {"name": "gxpo", "k": 3, "gate": {"mode": "never"}}, "optimizer": {"learning_rate": 1e-4}},
        budget={"steps": 3},
        checkpoint={"every_steps": 0},
        placement={"colocate": True, "learner_ranks": 2, "samplers": 2},  # CPU shares that fit what is there
    )
    assert train_run(config, tmp_path / "run") == "steps"
    (chosen,) = [event for event in read_events(tmp_path / "run") if event["kind"] == "cpus"]
    assert "logical CPUs" in chosen["message"]
    assert 2 * chosen["learner"] + 2 * chosen["sampler"] + chosen["verifier"] <= ray.cluster_resources()["CPU"]
    rows = [row["metrics"] for row in read_metrics(tmp_path / "run") if "rollout/logprob_gap_mean" in row["metrics"]]
    assert [row["rollout/engines_alive"] for row in rows] == [2, 2, 2]
    assert all(row["rollout/logprob_gap_mean"] <= 1e-6 and row["rollout/logprob_gap_max"] <= 1e-4 for row in rows)
    steps = [place for place, move in enumerate(moves) if move == "train_step"]
    # Each side leaves and returns once a step; weights that the sync brings again are given up.
    expected = ["sleep True", "unpark", "wake weights", "park", "wake kv_cache"]
    assert [moves[here + 1 : there] for here, there in pairwise(steps)] == [expected, expected]
    assert "learner and engines take turns on the CPUs" in (tmp_path / "run" / "events.jsonl").read_text()


def train_listening(config, out):
    """Train a run whose sockets are all known and on loopback; which they are."""
    seen = []
    report = Controller._report

    def look(self, *arguments):
        seen.extend(sockets.listening(os.getpid(), {os.getpid(): "driver"}))
        report(self, *arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Controller, "_report", look)
        assert train_run(config, out) == "steps"
    actors = {"ray::SamplerActor", "ray::VerifierActor", "ray::LearnerRank"}
    assert {"driver", "gcs_server", "raylet"} | actors <= {one.process for one in seen}
    sockets.check(seen, sockets.RUN)
    return seen


def assert_merged(checkpoint):
    """The policy of a checkpoint is the starter with its adapter."""
    base = AutoModelForCausalLM.from_pretrained(STARTER_FOLDER)
    merged = PeftModel.from_pretrained(base, checkpoint / "adapter").merge_and_unload()
    policy = AutoModelForCausalLM.from_pretrained(checkpoint / "policy")
    for (name, left), (_, right) in zip(merged.named_parameters(), policy.named_parameters(), strict=True):
        assert left.allclose(right, atol=1e-6), name


@pytest.mark.long("two ranks; one trains an adapter through kills in make test")
def test_two_ranks_of_zero_2_with_lora_and_kl_listen_on_loopback_train_and_export_an_adapter(tmp_path, small_run):
    config = small_run(
        learner={
            "rule": {"name": "gxpo", "k": 3},
            "zero_stage": 2,
            "lora": {"rank": 4, "alpha": 8},
            "loss": {"kl_beta": 0.01, "zero_variance": "resample"},
            "optimizer": {"learning_rate": 1e-3},
        },
        placement={"learner_ranks": 2, "learner_cpus": 0.5, "sampler_cpus": 0.5, "verifier_cpus": 0.25},
        budget={"steps": 2},
    )
    out = tmp_path / "run"
    train_listening(config, out)
    rows = [row["metrics"] for row in read_metrics(out)]
    assert len(rows) == 2
    assert all(row["rollout/logprob_gap_mean"] <= 1e-6 for row in rows)
    assert rows[1]["policy/kl"] > 0
    assert_merged(out / "checkpoints" / "step-00000002")


@pytest.mark.long("an adapter in another dtype, on one rank; two ranks listen on more")
def test_an_adapter_in_bf16_passes_the_proofs_and_is_merged_in_fp32(tmp_path, small_run):
    config = small_run(
        learner={"precision": "bf16", "zero_stage": 1, "lora": {"rank": 4, "alpha": 8}},
        budget={"steps": 1},
        checkpoint={"every_steps": 0},
    )
    train_listening(config, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints" / "step-00000001"
    base, policy = (load_file(path / "model.safetensors") for path in (STARTER_FOLDER, folder / "policy"))
    adapter = load_file(folder / "adapter" / "adapter_model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    down, up = (adapter[f"base_model.model.{name}.lora_{part}.weight"].float() for part in "AB")
    assert up.abs().max() > 0
    merged = base[f"{name}.weight"].to(torch.bfloat16).float() + 8 / 4 * (up @ down)
    assert torch.allclose(policy[f"{name}.weight"], merged, rtol=0, atol=1e-9)
    assert json.loads((folder / "policy" / "config.json").read_text())["dtype"] == "float32"
