"""The least time that a backward pass can take on a GPU: calculated from the code's own kernels, measured on none.

    python -m benchmarks.roofline [DEVICE]

The learner's own module runs one micro-batch forward and backward on tensors without data. Each kernel that torch
calls is counted: its floating-point operations, and the bytes of the tensors that it reads and writes. A kernel takes
at least the longer of operations / the chip's peak and bytes / its memory's bandwidth; a pass takes their sum.
Launches, caches and kernels that a compiler fuses are not in it, so the share of the peak is what eager kernels could
reach at best.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks.measure import save, single
from gxpo_trainer.algo.packing import MicroBatch
from gxpo_trainer.config.engines import LOGITS_CHUNK, logits_chunk
from gxpo_trainer.learner.logprobs import PolicyModule
from gxpo_trainer.planner.architectures import known_config
from gxpo_trainer.planner.devices import Device, device_named

MODELS = {"1.5 B": "Qwen/Qwen2.5-1.5B-Instruct", "7 B": "Qwen/Qwen2.5-7B-Instruct"}
ROWS, PROMPT, WIDTH = 8, 256, 2048
"""One micro-batch of 16,384 tokens, 14,336 of them responses."""
VIEWS = frozenset({"view", "t", "transpose", "expand", "slice", "unsqueeze", "squeeze", "detach", "alias", "select",
                   "_unsafe_view", "split", "as_strided", "permute", "unbind"})  # fmt: skip


@dataclass
class Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sums over the kernels of a pass. seconds: by part; flops: of all."""

    device: Device
    vocabulary: int
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    flops: float = 0.0

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in VIEWS or not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(out)):
            return out
        tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)]
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in {id(t): t for t in tensors}.values())
        counted: Any = flop_registry.get(func.overloadpacket)
        flops = counted(*args, **(kwargs or {}), out_val=out) if counted else 0
        head = any(self.vocabulary in tensor.shape for tensor in tensors)
        part = "head" if head else "attention" if "attention" in name else "matrices" if flops else "element-wise"
        self.flops += flops
        self.seconds[part] += max(flops / self.device.bf16_flops, num_bytes / self.device.memory_bandwidth)
        return out


def one_pass(path: str, device: Device, *, chunk: int, entropy: bool, recompute: bool) -> Kernels:
    """Forward and backward pass of the learner's module over one micro-batch in bf16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = dict(known_config(path) or {})
    config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
        if recompute:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        policy = PolicyModule(model, chunk_elements=chunk)
        targets = torch.arange(ROWS * WIDTH).view(ROWS, WIDTH)[:, PROMPT - 1 : -1].flatten()
        micro: Any = MicroBatch.__new__(MicroBatch)
        for name, value in {
            "input_ids": torch.zeros(ROWS, WIDTH, dtype=torch.int64),
            "position_ids": torch.arange(WIDTH).expand(ROWS, WIDTH),
            "attention_mask": None,
            "target_index": targets,
            "target_ids": torch.zeros(len(targets), dtype=torch.int64),
        }.items():
            object.__setattr__(micro, name, value)
        kernels = Kernels(device, config.vocab_size)
        with kernels:
            policy(micro, 1.0, entropy).logprobs.sum().backward()
    return kernels


def main() -> None:
    """Print the table of docs/benchmarks.md and save its figures."""
    device = device_named(sys.argv[1] if len(sys.argv) > 1 and sys.argv[0].endswith("roofline.py") else "h100-80")
    large = logits_chunk(device.memory_bytes)
    cases = {
        "head in chunks of 2²⁵ logits, entropy, recomputation": (LOGITS_CHUNK, True, True),
        "chunks by the GPU's memory": (large, True, True),
        "without entropy (passes after the first)": (large, False, True),
        "activations kept": (large, False, False),
    }
    figures = []
    print(f"| model | {device.name}, 16,384 tokens | ms | head | attention | matrices | element-wise | share of peak |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    for size, path in MODELS.items():
        # What a pass has to compute: without recomputation and without the head's second product.
        useful = one_pass(path, device, chunk=2**40, entropy=False, recompute=False).flops
        for case, (chunk, entropy, recompute) in cases.items():
            kernels = one_pass(path, device, chunk=chunk, entropy=entropy, recompute=recompute)
            total = sum(kernels.seconds.values())
            share = useful / total / device.bf16_flops
            parts = " | ".join(
                f"{1e3 * kernels.seconds[part]:.0f}" for part in ("head", "attention", "matrices", "element-wise")
            )
            print(f"| {size} | {case} | {1e3 * total:.0f} | {parts} | {share:.0%} |")
            figures.append(single(f"{size}: {case}", 1e3 * total, "ms, calculated"))
    save("roofline", figures, {"device": device.name, "tokens": ROWS * WIDTH})


if __name__ == "__main__":
    main()
