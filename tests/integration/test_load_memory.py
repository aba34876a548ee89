"""Memory of two ranks while they load a policy, in units of the whole policy in fp32."""

from __future__ import annotations

import pytest
import torch
from support.tiny_policy import qwen2
from test_learner_stages import run_ranks

pytestmark = [pytest.mark.engine, pytest.mark.long("a matrix of stages, dtypes and rules")]

RANKS = 2
Measured = dict[tuple[str, int], list[dict[str, float]]]
CASES = [(dtype, stage) for dtype in ("bf16", "fp32") for stage in (0, 3)]
"""dtype of the files, ZeRO stage. The learner computes in fp32, so pages of bf16 files cannot serve as the weights."""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """What each rank measured, as multiples of the policy's fp32 bytes."""
    root = tmp_path_factory.mktemp("memory")
    model = qwen2(4096, 512, 1536, 8, 8, 8)
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    model.save_pretrained(root / "fp32")
    model.to(torch.bfloat16).save_pretrained(root / "bf16")
    cases = {
        f"{dtype}-{stage}": ("load_memory", {"folder": str(root / dtype), "zero_stage": stage})
        for dtype, stage in CASES
    }
    # Freed tensors go back to the system at once, so that the resident set shows what is alive.
    run_ranks(RANKS, str(root / "fp32"), root, cases, MALLOC_MMAP_THRESHOLD_="65536")
    return {
        (dtype, stage): [
            {what: value / size for what, value in rank.items()}
            for rank in torch.load(root / f"{dtype}-{stage}.pt", weights_only=True)["ranks"]
        ]
        for dtype, stage in CASES
    }


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_no_rank_ever_holds_the_whole_policy_at_stage_3(measured: Measured, dtype: str) -> None:
    """Its half, and the largest tensor, the embedding with 7% of the parameters, while that is read and cut."""
    for rank in measured[dtype, 3]:
        assert rank["peak"] < 0.75
        assert 0.49 < rank["held"] < 0.55


def test_a_policy_is_converted_without_a_second_copy(measured: Measured) -> None:
    assert all(0.95 < rank["held"] <= rank["peak"] < 1.05 for rank in measured["bf16", 0])


def test_weights_in_the_files_dtype_are_pages_of_the_files(measured: Measured) -> None:
    assert all(rank["peak"] < 0.05 for rank in measured["fp32", 0])
