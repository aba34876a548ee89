"""Memory of two ranks while they load a policy, in units of the whole policy in fp32."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.engine

RANKS = 2
CASES: dict[str, dict[str, Any]] = {
    # Files in another dtype than the learner's: their pages cannot serve as the weights.
    **{f"converted-{stage}": {"path": "bf16", "zero_stage": stage} for stage in range(4)},
    "reference-0": {"path": "fp32", "zero_stage": 0, "loss": {"kl_beta": 0.1}},
    "reference-3": {"path": "fp32", "zero_stage": 3, "loss": {"kl_beta": 0.1}},
    "plain-0": {"path": "fp32", "zero_stage": 0},
    "plain-3": {"path": "fp32", "zero_stage": 3},
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, float]]]:
    """Case → what each rank found, as multiples of the policy's fp32 bytes."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    root = tmp_path_factory.mktemp("memory")
    config = Qwen2Config(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config)
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    model.save_pretrained(root / "fp32")
    model.to(torch.bfloat16).save_pretrained(root / "bf16")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = root / "job.json"
    cases = [{**case, "path": str(root / case["path"])} for case in CASES.values()]
    job.write_text(json.dumps({"world_size": RANKS, "port": port, "cases": cases}))
    # Freed tensors go back to the system at once, so that the resident set shows what is alive.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    worker = Path(__file__).with_name("load_memory_worker.py")
    ranks = [
        subprocess.Popen([sys.executable, str(worker), str(job), str(rank)], env=environment) for rank in range(RANKS)
    ]
    assert [rank.wait(timeout=300) for rank in ranks] == [0] * RANKS
    found = [json.loads(job.with_suffix(f".{rank}.out").read_text()) for rank in range(RANKS)]
    return {
        name: [{what: value / size for what, value in rank[index].items()} for rank in found]
        for index, name in enumerate(CASES)
    }


def test_no_rank_ever_holds_the_whole_policy_at_stage_3(measured: dict[str, list[dict[str, float]]]) -> None:
    for rank in measured["converted-3"]:
        assert rank["load"] < 0.75


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_policy_is_loaded_once(measured: dict[str, list[dict[str, float]]], stage: int) -> None:
    for rank in measured[f"converted-{stage}"]:
        assert rank["load"] < 1.15


def test_a_reference_costs_its_share_at_stage_3_and_no_private_memory_on_a_cpu(
    measured: dict[str, list[dict[str, float]]],
) -> None:
    for stage, most in ((3, 0.65), (0, 0.1)):
        pairs = zip(measured[f"reference-{stage}"], measured[f"plain-{stage}"], strict=True)
        assert all(with_reference["held"] - without["held"] < most for with_reference, without in pairs)
