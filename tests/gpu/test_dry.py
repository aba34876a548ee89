"""GPU code on a machine without a GPU, with the packages of the GPU list: `make gpu-dry`.

Tensors of the device "cuda" without data run torch's shape functions, and Triton compiles for a chip that is not there.
The backward pass asks the driver for a stream, so it runs on GPUs alone.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import re
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.tiny_policy import random_batch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import HashStore  # type: ignore[attr-defined]
from transformers import AttentionInterface, AutoModelForCausalLM, Qwen2Config

import gxpo_trainer
from gxpo_trainer.algo.packing import Layout, pack
from gxpo_trainer.config import GxpoRule, RunConfig
from gxpo_trainer.learner import logprobs
from gxpo_trainer.rollout.sampler import SamplerSettings, _engine_arguments
from gxpo_trainer.rules.contract import AdamWRecurrence
from gxpo_trainer.rules.predictors import Plan, extrapolate_by_ratio, extrapolate_by_replay
from gxpo_trainer.weights.transports import _nccl_group

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.version.cuda is None or torch.cuda.is_available(),
        reason="torch is its build for CPUs, or a GPU is here; `make gpu-dry` has the packages for GPUs",
    ),
]
H100 = types.SimpleNamespace(
    name="H100", major=9, minor=0, total_memory=80 << 30, multi_processor_count=132, warp_size=32,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024, gcnArchName="",
)  # fmt: skip
"""What a compiler asks of the chip."""


def test_every_module_imports() -> None:
    ours = [module.name for module in pkgutil.walk_packages(gxpo_trainer.__path__, "gxpo_trainer.")]
    workers = ("gpu_worker", "gpu_model_runner", "gpu.model_runner")
    for name in (*ours, *(f"vllm.v1.worker.{worker}" for worker in workers)):
        if not name.endswith("__main__"):
            importlib.import_module(name)


@pytest.mark.parametrize("placement", [{}, {"tensor_parallel": 2}])
def test_an_engine_knows_its_arguments(placement: dict[str, int]) -> None:
    from vllm import EngineArgs

    config = RunConfig.model_validate({"placement": placement, "learner": {"lora": {}}})
    settings = SamplerSettings(config, "a-model", threads=1, initial_version=0, device="gpu", colocated=True)
    EngineArgs(**{name: value for name, value in _engine_arguments(settings).items() if name != "use_tqdm_on_load"})
    assert _engine_arguments(settings).keys() <= {field.name for field in dataclasses.fields(EngineArgs)}


def test_a_group_of_nccl_takes_its_options() -> None:
    with pytest.raises(ValueError, match="no GPUs found"):
        _nccl_group(HashStore(), 0, 1, timedelta(seconds=5))


@pytest.mark.parametrize(
    ("attention", "layout"), [("varlen", "packed"), ("varlen", "padded"), ("sdpa", "padded"), ("sdpa", "shared")]
)
@pytest.mark.parametrize("recompute", [False, True])
def test_a_forward_pass_stays_on_the_device(
    attention: str, layout: Layout, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    micro = pack(random_batch(seed=3), token_budget=10_000, layout=layout, aggregation="token_mean", pad_id=0)[0]
    real = logprobs.sequence_boundaries(micro.position_ids)  # from the values of a tensor
    AttentionInterface.register(logprobs.NAME, logprobs.varlen_attention)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: H100)
    config = Qwen2Config(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    with FakeTensorMode(allow_non_fake_inputs=True):
        there = {name: value.to("cuda") if torch.is_tensor(value) else value for name, value in real.items()}
        monkeypatch.setattr(logprobs, "sequence_boundaries", lambda _: there)
        with torch.device("cuda"):
            model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, dtype=torch.bfloat16, attn_implementation=attention
            )
        if recompute:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        # Logits in one piece, or in chunks that the backward pass computes again.
        policy = logprobs.PolicyModule(model.train(), chunk_elements=2048 if recompute else None)
        out = policy(micro.to("cuda"), 1.0, True)
    for values in (out.logprobs, out.entropy):
        assert (values.device.type, values.dtype, values.shape) == ("cuda", torch.float32, micro.target_ids.shape)


@pytest.fixture
def chip() -> Iterator[FakeTensorMode]:
    """Makes Inductor write kernels for an H100."""
    import triton
    from torch._dynamo.device_interface import CudaInterface
    from triton.backends.compiler import GPUTarget

    driver = types.SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
    )
    fixed = {"get_device_properties": H100, "get_compute_capability": 90, "current_device": 0, "is_available": True}
    with ExitStack() as stack:
        for name, value in fixed.items():
            stack.enter_context(mock.patch.object(CudaInterface, name, return_value=value))
        stack.enter_context(mock.patch.object(CudaInterface.Worker, "get_device_properties", return_value=H100))
        stack.enter_context(mock.patch("torch.cuda.get_device_properties", return_value=H100))
        stack.enter_context(mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)))
        stack.enter_context(mock.patch("torch.cuda.current_device", return_value=0))
        stack.enter_context(mock.patch("torch.utils._triton.has_triton", return_value=True))
        stack.enter_context(mock.patch("torch._inductor.runtime.triton_helpers.set_driver_to_gpu", return_value=None))
        triton.runtime.driver.set_active(driver)
        yield stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))


class _Written(BaseException):
    """Carries Inductor's code out of it, before it would load the kernels onto a device."""


def kernels(mode: FakeTensorMode, function: Callable[..., Any], count: int) -> str:
    """Inductor's code for a function of `count` slices of parameters."""
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch.fx.experimental.proxy_tensor import make_fx

    def written(_: Any, code: Any) -> None:
        raise _Written(code.value)

    tensors = [torch.empty(1 << 20, device="cuda") for _ in range(count)]
    graph = make_fx(lambda *given: (function(*given),), decomposition_table=select_decomp_table())(*tensors)
    fresh = torch._inductor.config.patch(fx_graph_cache=False)
    captured = mock.patch.object(GraphLowering, "_compile_to_module_lines", written)
    with V.set_fake_mode(mode), fresh, captured, pytest.raises(_Written) as caught:
        compile_fx_inner(graph, tensors)
    return str(caught.value)


@pytest.mark.parametrize("rule", ["ratio", "replay"])
def test_extrapolation_compiles_for_the_chip(rule: str, chip: FakeTensorMode, tmp_path: Path) -> None:
    """Every kernel that Inductor writes becomes a binary for sm_90, with the first of its configurations."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    plan, recurrence = Plan.of(GxpoRule(k=5), 1e-8, trial=False), AdamWRecurrence(1e-3, 0.9, 0.999, 1e-8, 0.01)
    if rule == "ratio":
        code = kernels(chip, lambda *slices: extrapolate_by_ratio(plan, *slices), 4)
    else:
        code = kernels(chip, lambda *slices: extrapolate_by_replay(plan, recurrence, 2, False, 2, *slices), 6)
    sources = re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", code, re.DOTALL)
    assert sources
    for name, source in sources:
        path = tmp_path / f"{name}.py"
        path.write_text(source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        kernel = getattr(module, name)
        meta, chosen = kernel.triton_meta, kernel.configs[0]
        constants = {**meta["constants"], **chosen.kwargs}
        (attributes,) = meta["configs"]
        built = triton.compile(
            ASTSource(kernel.fn, meta["signature"], constants, attributes),
            target=GPUTarget("cuda", 90, 32),
            options={"num_warps": chosen.num_warps, "num_stages": chosen.num_stages},
        )
        assert ".target sm_90" in built.asm["ptx"]
        assert built.asm["cubin"]
