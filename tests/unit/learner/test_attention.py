"""Packed rows need an attention that knows where a sequence ends; a dense mask over the row is refused."""

from __future__ import annotations

from typing import Any

import pytest

from gxpo_trainer.config import RunConfig
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.learner.attention import choose_attention, choose_layout

BF16 = {"precision": "bf16", "zero_stage": 2, "token_budget": 16384}


def config(attention: str = "auto", **learner: Any) -> RunConfig:
    return RunConfig.model_validate({"model": {"attention": attention}, "learner": {**BF16, **learner}})


def chosen(run: RunConfig, device: Any, *, flash: bool) -> tuple[str, str]:
    attention = choose_attention(run, device, flash_installed=flash)
    return attention, choose_layout(run, device, attention, can_share_prompts=True)


def test_a_gpu_packs_rows_where_attention_knows_their_boundaries() -> None:
    assert chosen(config(), "gpu", flash=True) == ("flash_attention_2", "packed")
    assert chosen(config("flash_attention_2"), "gpu", flash=True) == ("flash_attention_2", "packed")


def test_a_gpu_without_such_an_attention_pads_rows() -> None:
    assert chosen(config(), "gpu", flash=False) == ("sdpa", "padded")
    assert chosen(config("sdpa"), "gpu", flash=True) == ("sdpa", "padded")
    fp32 = config(precision="fp32")  # flash attention computes in half precision alone
    assert chosen(fp32, "gpu", flash=True) == ("sdpa", "padded")


@pytest.mark.parametrize("attention", ["sdpa", "eager", "auto"])
def test_a_dense_mask_over_a_packed_row_is_refused_on_a_gpu(attention: str) -> None:
    fix = (
        r'learner.packing = "packed" .*dense mask of 16384 × 16384.*model.attention = "flash_attention_2".*'
        r'learner.packing = "padded"'
    )
    with pytest.raises(ConfigError, match=fix):
        chosen(config(attention, packing="packed"), "gpu", flash=False)


def test_a_cpu_shares_prompts_and_may_pack_small_rows() -> None:
    assert chosen(config(), "cpu", flash=False) == ("sdpa", "shared")
    assert chosen(config(packing="packed", token_budget=64), "cpu", flash=False) == ("sdpa", "packed")
    assert choose_layout(config(), "cpu", "sdpa", can_share_prompts=False) == "padded"
