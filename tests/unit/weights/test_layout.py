"""Rows of a checkpoint in the part of one tensor-parallel worker, against vLLM's own loader."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import linear, vocab_parallel_embedding
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from gxpo_trainer.errors import ConfigError
from gxpo_trainer.planner.architectures import CPU_HEADS
from gxpo_trainer.weights.buckets import TensorEntry
from gxpo_trainer.weights.vllm_weights import VllmWeights, packed_order

HIDDEN, HEAD = 8, 4
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


@pytest.fixture(params=[(2, 0), (2, 1), (4, 1), (4, 3)], ids="{0[1]} of {0[0]}".format)
def worker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """Number of workers and rank of one: vLLM's layers as it would build them, which ask for both only when they are
    built and loaded."""
    import vllm.model_executor.parameter as parameter

    workers, rank = request.param
    for module in (linear, vocab_parallel_embedding, parameter):
        monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank)
        monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: workers)
    with set_current_vllm_config(VllmConfig()):
        yield workers, rank


def test_attention_heads_that_are_not_refused_are_those_that_vllm_lists() -> None:
    assert CPUAttentionBackend.get_supported_head_sizes() == list(CPU_HEADS)


def layers(kv_heads: int, fused: bool = False) -> torch.nn.Module:
    """The layers of a small policy that vLLM splits. fused: the checkpoint fuses the same projections."""
    model = torch.nn.Module()
    model.packed_modules_mapping = {name: [name] for name in FUSED} if fused else FUSED
    model.embed_tokens = vocab_parallel_embedding.VocabParallelEmbedding(100, HIDDEN)
    model.qkv_proj = linear.QKVParallelLinear(HIDDEN, HEAD, 4, kv_heads, bias=True)
    model.o_proj = linear.RowParallelLinear(4 * HEAD, HIDDEN, bias=False)
    model.gate_up_proj = linear.MergedColumnParallelLinear(HIDDEN, [12, 12], bias=False)
    model.norm = torch.nn.LayerNorm(HIDDEN, bias=False)
    return model


def checkpoint(kv_heads: int) -> dict[str, torch.Tensor]:
    """Every element with a value of its own."""
    shapes = {
        "embed_tokens.weight": (100, HIDDEN),
        "q_proj.weight": (4 * HEAD, HIDDEN),
        "k_proj.weight": (kv_heads * HEAD, HIDDEN),
        "v_proj.weight": (kv_heads * HEAD, HIDDEN),
        "q_proj.bias": (4 * HEAD,),
        "k_proj.bias": (kv_heads * HEAD,),
        "v_proj.bias": (kv_heads * HEAD,),
        "o_proj.weight": (HIDDEN, 4 * HEAD),
        "gate_proj.weight": (12, HIDDEN),
        "up_proj.weight": (12, HIDDEN),
        "norm.weight": (HIDDEN,),
    }
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def load_by_vllm(model: Any, tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        layer, _, attribute = name.partition(".")
        fused = next((key for key, names in FUSED.items() if layer in names), layer)
        target = getattr(getattr(model, fused), attribute)
        if fused == "qkv_proj":
            target.weight_loader(target, tensor, layer[0])
        elif fused == "gate_up_proj":
            target.weight_loader(target, tensor, FUSED[fused].index(layer))
        elif hasattr(target, "weight_loader"):
            target.weight_loader(target, tensor)
        else:
            target.data.copy_(tensor)


@pytest.mark.parametrize("rows", [100, 5, 1], ids=lambda rows: f"{rows} rows a bucket")
@pytest.mark.parametrize("kv_heads", [4, 2, 1], ids=lambda heads: f"{heads} KV heads")
@pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
def test_a_workers_part_from_buckets_with_split_rows_is_what_vllm_loads(
    kv_heads: int, rows: int, fused: bool, worker: tuple[int, int]
) -> None:
    workers, rank = worker
    tensors = checkpoint(kv_heads)
    expected, loaded = layers(kv_heads), layers(kv_heads, fused)
    for parameter in loaded.parameters():
        parameter.data.fill_(torch.nan)
    load_by_vllm(expected, tensors)
    for name, parts in FUSED.items() if fused else ():
        for kind in ("weight", "bias") if name == "qkv_proj" else ("weight",):
            tensors[f"{name}.{kind}"] = torch.cat([tensors.pop(f"{part}.{kind}") for part in parts])
    slots = VllmWeights(loaded, torch.float32).slots
    assert slots.keys() == tensors.keys()
    for name, tensor in tensors.items():
        for slot, first_row in product(slots[name], range(0, len(tensor), rows)):
            part, at = slot.part_of(tensor[first_row : first_row + rows], first_row)
            getattr(slot.module, slot.attribute).data[slot.start + at : slot.start + at + len(part)] = part
    for (name, left), (_, right) in zip(loaded.named_parameters(), expected.named_parameters(), strict=True):
        # vLLM pads the vocabulary of 100 to 128 rows and cuts them into equal parts.
        used = min(100 - rank * 128 // workers, len(right)) if name == "embed_tokens.weight" else len(right)
        assert torch.equal(left[:used], right[:used]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_order_of_packed_experts_is_the_kernels(dtype: torch.dtype) -> None:
    experts = torch.randn(3, 64, 1056).to(dtype)  # more elements than 16 bits count
    packed, order = cpu_prepack_moe_weight(experts, "vec"), packed_order(64, 1056, dtype, "vec")
    assert torch.equal(packed.view(3, -1), experts.view(3, -1)[:, order])
    assert not torch.equal(packed, experts)


@pytest.mark.usefixtures("worker")
def test_tensors_without_a_place_are_refused_before_any_is_loaded() -> None:
    model = layers(4)
    before = model.norm.weight.clone()
    names = ("norm.weight", "qkv_proj.weight", "experts.down_proj", "experts.gate_up_proj", "experts.w1")
    published = [(TensorEntry(name, torch.float32, (HIDDEN,), 0, 0), torch.full((HIDDEN,), 2.0)) for name in names]
    places = r"no place for experts\.down_proj, experts\.gate_up_proj, experts\.w1 and 1 more.*choose an architecture"
    with pytest.raises(ConfigError, match=places):
        VllmWeights(model, torch.float32).load(published)
    assert torch.equal(model.norm.weight, before)
