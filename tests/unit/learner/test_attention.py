"""Packed rows need an attention that knows where a sequence ends; a dense mask over the row is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gxpo_trainer.config import RunConfig
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.learner import setup
from gxpo_trainer.learner.setup import check_attention, choose_attention, choose_layout
from gxpo_trainer.learner.shards import Parking

BF16 = {"precision": "bf16", "zero_stage": 2, "token_budget": 16384}
FULL = frozenset({"full_attention"})
WINDOWED = frozenset({"full_attention", "sliding_attention"})
LINEAR = frozenset({"full_attention", "linear_attention"})
NONE, FLASH, VARLEN = frozenset[str](), frozenset({"flash_attention_2"}), frozenset({"varlen"})
BOTH = FLASH | VARLEN


def config(attention: str = "auto", **learner: Any) -> RunConfig:
    return RunConfig.model_validate({"model": {"attention": attention}, "learner": {**BF16, **learner}})


def chosen(run: RunConfig, device: Any, kernels: frozenset[str], layers: frozenset[str] = FULL) -> tuple[str, str]:
    attention = choose_attention(run, device, kernels, layers)
    return attention, choose_layout(run, device, attention, layers)


def test_auto_follows_its_table() -> None:
    table = {
        ("cpu", "bf16", NONE, FULL): ("sdpa", "shared"),
        ("cpu", "fp32", NONE, FULL): ("sdpa", "shared"),
        ("gpu", "fp32", BOTH, FULL): ("sdpa", "padded"),
        ("gpu", "bf16", NONE, FULL): ("sdpa", "padded"),
        ("gpu", "bf16", VARLEN, FULL): ("varlen", "packed"),
        ("gpu", "bf16", FLASH, FULL): ("flash_attention_2", "packed"),
        ("gpu", "bf16", BOTH, FULL): ("flash_attention_2", "packed"),
        ("gpu", "bf16", VARLEN, WINDOWED): ("varlen", "packed"),
        ("gpu", "bf16", VARLEN, LINEAR): ("sdpa", "padded"),
        ("gpu", "bf16", FLASH, LINEAR): ("flash_attention_2", "padded"),
    }
    assert {case: chosen(config(precision=case[1]), case[0], *case[2:]) for case in table} == table


def test_a_named_attention_is_taken_where_it_can_run() -> None:
    for attention, layout in (("varlen", "packed"), ("flash_attention_2", "packed"), ("sdpa", "padded")):
        assert chosen(config(attention), "gpu", BOTH) == (attention, layout)
    assert chosen(config("eager"), "cpu", NONE) == ("eager", "shared")
    for attention, taken in (("auto", "sdpa"), ("eager", "eager")):
        assert chosen(config(attention, packing="shared"), "gpu", BOTH) == (taken, "shared")
    assert choose_layout(config(), "cpu", "sdpa", WINDOWED) == "padded"


@pytest.mark.parametrize(
    ("attention", "device", "precision", "kernels", "layers"),
    [
        ("varlen", "gpu", "fp32", BOTH, FULL),
        ("flash_attention_2", "cpu", "bf16", NONE, FULL),
        ("flash_attention_2", "gpu", "bf16", VARLEN, FULL),
        ("varlen", "gpu", "bf16", FLASH, FULL),
        ("varlen", "gpu", "bf16", BOTH, LINEAR),
    ],
)
def test_an_attention_that_cannot_run_is_refused_with_what_it_needs(
    attention: str, device: Any, precision: str, kernels: frozenset[str], layers: frozenset[str]
) -> None:
    needs = "flash-attn" if attention == "flash_attention_2" else "compute capability 8.0 or newer, and a model whose"
    with pytest.raises(ConfigError, match=f'model.attention = "{attention}" needs a GPU, .*bf16", .*{needs}'):
        chosen(config(attention, precision=precision), device, kernels, layers)


@pytest.mark.parametrize("attention", ["sdpa", "eager", "auto"])
def test_a_dense_mask_over_a_packed_row_is_refused_but_over_short_ones_on_a_cpu(attention: str) -> None:
    fix = r'= "packed" .*dense mask of 16384 × 16384.*model.attention = "auto".*learner.packing = "padded"'
    with pytest.raises(ConfigError, match=fix):
        chosen(config(attention, packing="packed"), "gpu", NONE)
    with pytest.raises(ConfigError, match=r"dense mask of 16384 × 16384.*learner.token_budget to at most 4096"):
        chosen(config(attention, packing="packed"), "cpu", NONE)
    assert chosen(config(attention, packing="packed", token_budget=4096), "cpu", NONE)[1] == "packed"


@pytest.mark.parametrize(
    ("attention", "layers", "problem"),
    [
        ("auto", WINDOWED, "the model has sliding_attention layers"),
        ("eager", LINEAR, "the model has linear_attention layers"),
        ("varlen", FULL, 'model.attention = "varlen"'),
        ("flash_attention_2", FULL, 'model.attention = "flash_attention_2"'),
    ],
)
def test_sharing_prompts_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, attention: str, layers: frozenset[str], problem: str
) -> None:
    monkeypatch.setattr("gxpo_trainer.learner.setup.layer_types", lambda _: layers)
    with pytest.raises(ConfigError, match=f'"shared" needs full attention .*, but {problem}; set learner.packing'):
        check_attention(config(attention, packing="shared"), "gpu")


# Where a parked learner's memory lies on the host. That a learner continues bit for bit: test_learner_stages.py.


def test_fused_kernels_are_for_gpus_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernels(device: Any, precision: str, family: str, setting: str = "auto") -> str:
        monkeypatch.setattr(setup, "load_config", lambda model: SimpleNamespace(model_type=family))
        run = RunConfig.model_validate(
            {"model": {"kernels": setting}, "learner": {"precision": precision, "zero_stage": 2}}
        )
        return setup.choose_kernels(run, device)

    assert kernels("cpu", "fp32", "qwen2") == "eager"
    monkeypatch.setattr(setup, "find_spec", lambda name: None)
    assert kernels("gpu", "bf16", "qwen2") == "eager"
    monkeypatch.setattr(setup, "find_spec", lambda name: name)
    assert kernels("gpu", "bf16", "qwen2") == kernels("gpu", "fp32", "phi3", "liger") == "liger"
    assert kernels("gpu", "fp32", "qwen2") == kernels("gpu", "bf16", "qwen3_moe") == "eager"
    assert kernels("gpu", "bf16", "qwen2", "eager") == "eager"
    for device, family in (("cpu", "qwen2"), ("gpu", "qwen3_moe")):
        with pytest.raises(
            ConfigError, match=rf'needs a GPU.*this is {family} on a {device.upper()}; set it to "auto"'
        ):
            kernels(device, "bf16", family, "liger")


def test_everything_is_parked_in_one_buffer_of_its_size_which_is_kept() -> None:
    """Not a power of two for each tensor: 3, 1025 and 600 elements of 4 bytes take 256, 4352 and 2560 of 256 each."""
    kept = [torch.randn(count) for count in (3, 1025, 600)]
    dropped, expected = torch.ones(7), [tensor.clone() for tensor in kept]
    parking = Parking()
    places = set()
    for _ in range(2):
        assert parking.park(kept, [dropped]) == 4 * (3 + 1025 + 600 + 7)
        assert sum(tensor.untyped_storage().nbytes() for tensor in [*kept, dropped]) == 0
        assert parking.host.numel() == 256 + 4352 + 2560
        places.add(parking.host.data_ptr())
        parking.unpark()
        assert all(torch.equal(now, then) for now, then in zip(kept, expected, strict=True))
        assert not dropped.any()
    assert len(places) == 1
