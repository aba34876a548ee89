"""On a CUDA device: extrapolation, a GRPO pass and parking of a 1.5 B policy, each against what the device allows.

Extrapolation is held against the bytes that it must move, the pass against the dense bf16 peak of the chip and the
memory that the planner counts, the head and attention alone against the pass, parking and return against a plain copy
from and to pinned memory. Prints the reason and does nothing
where there is no device.
"""

from __future__ import annotations

import gc
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measure import Figure, deviation, median, ratio, save, single
from benchmarks.policies import LARGE_SHAPE, one_and_a_half_billion
from gxpo_trainer.algo.batch import ScoredSequence, StepBatch, with_scale
from gxpo_trainer.config import GxpoRule, ModelConfig, RunConfig
from gxpo_trainer.learner.logprobs import NAME as VARLEN, TokenScorer, sequence_boundaries, varlen_attention
from gxpo_trainer.learner.models import load_policy
from gxpo_trainer.learner.setup import installed_kernels
from gxpo_trainer.learner.shards import Parking
from gxpo_trainer.planner.devices import Device, assumptions_for, devices
from gxpo_trainer.planner.inputs import ModelShape, inputs_of, workload_of
from gxpo_trainer.planner.memory import learner_parts
from gxpo_trainer.planner.plan import MARGIN
from gxpo_trainer.rules.predictors import Plan, extrapolate_by_ratio

ELEMENTS = LARGE_SHAPE.parameters
READS_AND_WRITES = 5
"""θ², θ⁰, g⁰, g¹ read and θ̃ written: 20 bytes an element in fp32."""
PROMPT, RESPONSE, SEQUENCES, TOKEN_BUDGET = 256, 1792, 64, 16_384
"""Tokens of a sequence, sequences of a pass, tokens of a packed row."""
SHARDS = {"weights": torch.bfloat16, "master": torch.float32, "mean": torch.float32, "variance": torch.float32}
"""What one rank keeps between steps under AdamW, each with the policy's number of elements."""


def main() -> None:
    if not torch.cuda.is_available():
        print("gpu: no CUDA device is visible; nothing measured")
        return
    figures: list[Figure] = []
    for measured in (extrapolation, grpo_pass, parking):
        try:
            figures += measured()
        except torch.cuda.OutOfMemoryError as error:
            print(f"gpu: {measured.__name__} not measured, out of memory: {error}")
        gc.collect()
        torch.cuda.empty_cache()
    settings = {"elements": ELEMENTS, "prompt": PROMPT, "response": RESPONSE, "sequences": SEQUENCES}
    save("gpu", figures, settings | {"token_budget": TOKEN_BUDGET, "device": torch.cuda.get_device_name()})


def extrapolation() -> list[Figure]:
    """The compiled pass over fp32 shards against a copy of the bytes that it moves."""
    theta, theta0, g0, g1 = (torch.randn(ELEMENTS, device="cuda") for _ in range(4))
    plan = Plan.of(GxpoRule(k=5), 1e-8, trial=False)
    kernel = torch.compile(extrapolate_by_ratio, dynamic=True)
    passes = _milliseconds(lambda: kernel(plan, theta, theta0, g0, g1))
    copies = _milliseconds(lambda: theta0.copy_(theta))
    # A copy moves 2 × 4 bytes an element.
    bound = [copy * READS_AND_WRITES / 2 for copy in copies]
    return [
        median("extrapolation of 1.5 B fp32", passes, "ms"),
        median("copy-bandwidth bound", bound, "ms"),
        ratio("extrapolation / bound", passes, bound, at_most=1.5),
    ]


def grpo_pass() -> list[Figure]:
    """Forward and backward pass in bf16, in products of the model a second over the chip's peak.

    With the layers' eager kernels first, because Liger replaces the classes. Rows are packed where a kernel takes their
    boundaries; the figure's name says which.
    """
    chip = known_chip(torch.cuda.get_device_name())
    work = batch(SEQUENCES, PROMPT, RESPONSE, LARGE_SHAPE.vocabulary)
    figures, taken = [], []
    with tempfile.TemporaryDirectory() as folder:
        policy = one_and_a_half_billion(Path(folder), "cuda")
        for kernels in ("eager", "auto"):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            learner = learner_of(policy, "gpu", PROMPT + RESPONSE, TOKEN_BUDGET, kernels)
            seconds = pass_seconds(learner, work, torch.cuda.synchronize)
            learner.close()
            taken.append(seconds)
            name = f"GRPO pass, 1.5 B in bf16, {learner.attention}"
            figures.append(median(name, seconds, "s"))
            figures.append(single(f"{name}: peak memory in GiB", torch.cuda.max_memory_allocated() / 2**30))
            if chip is not None:
                reserved = [float(torch.cuda.max_memory_reserved())]
                planned = planned_bytes(learner.config, LARGE_SHAPE, chip)
                figures.append(deviation(f"{name}: planned memory, off by", planned, reserved, at_most=MARGIN))
            del learner
            gc.collect()
        copies = reference_copies(policy)
    figures.append(ratio("GRPO pass, kernels of auto / eager", taken[1], taken[0]))
    figures += [median("copy of a reference of 1.5 B from pages of its files", copies, "s")]
    micro_batches = SEQUENCES * (PROMPT + RESPONSE) // TOKEN_BUDGET
    per_micro_batch = SEQUENCES // micro_batches
    heads = head_seconds(LARGE_SHAPE, per_micro_batch * RESPONSE, "cuda", torch.cuda.synchronize)
    figures.append(ratio("head, share of a GRPO pass", [micro_batches * one for one in heads], seconds))
    if VARLEN in installed_kernels("gpu"):
        layers = attention_seconds(LARGE_SHAPE, per_micro_batch, PROMPT + RESPONSE, torch.cuda.synchronize)
        attentions = [micro_batches * LARGE_SHAPE.layers * one for one in layers]
        figures.append(ratio("variable-length attention, share of a GRPO pass", attentions, seconds))
    if chip is None:
        print(f"gpu: the planner has no peak of {torch.cuda.get_device_name()}; no share of it is given")
        return figures
    flops = model_flops(LARGE_SHAPE, SEQUENCES, PROMPT, RESPONSE)
    shares = [flops / one / chip.bf16_flops for one in seconds]
    return [*figures, median("GRPO pass, share of the dense bf16 peak", shares, "", at_least=0.4)]


def parking() -> list[Figure]:
    """Both ways of a learner's shards against one plain copy of as many bytes each way."""
    shards = [torch.zeros(ELEMENTS, dtype=dtype, device="cuda") for dtype in SHARDS.values()]
    num_bytes = sum(shard.nbytes for shard in shards)
    parked = Parking()
    leaving, returning = [], []
    for _ in range(6):
        leaving.append(_seconds(lambda: parked.park(shards), torch.cuda.synchronize))
        returning.append(_seconds(parked.unpark, torch.cuda.synchronize))
    sample = torch.zeros(2**30, dtype=torch.uint8, device="cuda")
    host = torch.empty(2**30, dtype=torch.uint8, pin_memory=True)
    scale = num_bytes / sample.nbytes / 1e3
    down = [scale * one for one in _milliseconds(lambda: host.copy_(sample, non_blocking=True))]
    up = [scale * one for one in _milliseconds(lambda: sample.copy_(host, non_blocking=True))]
    # The first round allocates the pinned memory, which torch keeps for the next ones.
    return [
        median("first park of 1.5 B", leaving[:1], "s"),
        median("park of 1.5 B", leaving[1:], "s"),
        median("return of 1.5 B", returning[1:], "s"),
        ratio("park, share of the link's bandwidth", down, leaving[1:], at_least=0.8),
        ratio("return, share of the link's bandwidth", up, returning[1:], at_least=0.8),
    ]


def learner_of(policy: Path, device: str, max_length: int, token_budget: int, kernels: str = "auto") -> Any:
    """A learner of one rank for GRPO, in bf16 on a GPU."""
    from gxpo_trainer.learner.deepspeed_learner import DeepSpeedLearner

    settings = {"rule": {"name": "grpo"}, "token_budget": token_budget}
    on_gpu = {"precision": "bf16", "zero_stage": 2} if device == "gpu" else {}
    config = RunConfig.model_validate(
        {
            "model": {"path": str(policy), "max_length": max_length, "kernels": kernels},
            "learner": settings | on_gpu,
        }
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return DeepSpeedLearner(config, master_port=port, device="gpu" if device == "gpu" else "cpu")


def batch(sequences: int, prompt: int, response: int, vocabulary: int) -> StepBatch:
    """Sequences of equal length with random tokens, half of them with a positive advantage."""
    rng = np.random.default_rng(0)

    def tokens(number: int) -> np.ndarray:
        return rng.integers(3, vocabulary, number).astype(np.int32)

    guesses = np.full(response, -np.log(vocabulary), np.float32)
    rows = [
        ScoredSequence(tokens(prompt), tokens(response), 1.0 if index % 2 else -1.0, guesses)
        for index in range(sequences)
    ]
    return with_scale(rows, response)


def pass_seconds(learner: Any, work: StepBatch, synchronize: Callable[[], None], repeats: int = 5) -> list[float]:
    """Seconds of `repeats` passes over a batch, after one that is not counted; each in a step of its own."""
    seconds = []
    for _ in range(repeats + 1):
        learner.load_batches([work])
        seconds.append(_seconds(learner.backward, synchronize))
        learner.optimizer_step()
    return seconds[1:]


def model_flops(shape: ModelShape, sequences: int, prompt: int, response: int) -> float:
    """Products of one forward and backward pass, logits of responses alone. What checkpointing computes again does
    not count."""
    length = prompt + response
    forward = length * (shape.backbone_flops + shape.attention_flops(length / 2)) + response * shape.head_flops
    return 3.0 * sequences * forward


def head_seconds(
    shape: ModelShape, tokens: int, device: str, synchronize: Callable[[], None], repeats: int = 5
) -> list[float]:
    """Forward and backward pass of the head alone over that many predicted tokens, in bf16."""
    head = torch.nn.Linear(shape.hidden, shape.vocabulary, bias=False, device=device, dtype=torch.bfloat16)
    scorer = TokenScorer(head, None)
    hidden = torch.randn(tokens, shape.hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(shape.vocabulary, (tokens,), device=device)

    def once() -> None:
        logprobs: torch.Tensor = scorer(hidden, targets, 1.0, False)[0]
        logprobs.sum().backward()  # type: ignore[no-untyped-call]

    return [_seconds(once, synchronize) for _ in range(repeats + 1)][1:]


def attention_seconds(
    shape: ModelShape, sequences: int, length: int, synchronize: Callable[[], None], repeats: int = 5
) -> list[float]:
    """Forward and backward pass of torch's variable-length attention of one layer over a packed row, in bf16."""

    def values(heads: int) -> torch.Tensor:
        size = (1, heads, sequences * length, shape.head_dim)
        return torch.randn(size, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    query, key, value = values(shape.heads), values(shape.kv_heads), values(shape.kv_heads)
    boundaries = sequence_boundaries(torch.arange(length, device="cuda").repeat(sequences)[None])

    def once() -> None:
        varlen_attention(None, query, key, value, None, **boundaries)[0].sum().backward()  # type: ignore[no-untyped-call]

    return [_seconds(once, synchronize) for _ in range(repeats + 1)][1:]


def reference_copies(policy: Path, repeats: int = 5) -> list[float]:
    """Seconds of the copy of all weights from pages of their file to the GPU."""
    pages = list(load_policy(ModelConfig(path=str(policy)), precision="bf16").parameters())

    def once() -> None:
        for tensor in pages:
            tensor.to("cuda")

    return [_seconds(once, torch.cuda.synchronize) for _ in range(repeats + 1)][1:]


def planned_bytes(config: RunConfig, shape: ModelShape, chip: Device) -> float:
    """What the planner counts of the memory that torch reserves for a learner: without runtime and weights sent."""
    inputs, assumed = inputs_of(config, shape, chip), assumptions_for(chip)
    parts = learner_parts(inputs, assumed, workload_of(inputs, assumed), publishes=False)
    return float(sum(size for name, size in parts.items() if name != "runtime"))


def known_chip(name: str) -> Device | None:
    """The planner's device that torch calls so, None where it does not know it."""
    words = name.upper().replace("-", " ").split()
    return next(
        (chip for chip in devices().values() if {kind.partition("-")[0] for kind in chip.ray_names} & {*words}), None
    )


def _seconds(action: Callable[[], object], synchronize: Callable[[], None]) -> float:
    synchronize()
    begin = time.perf_counter()
    action()
    synchronize()
    return time.perf_counter() - begin


def _milliseconds(action: Callable[[], object], repeats: int = 20) -> list[float]:
    for _ in range(3):
        action()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        action()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return times


if __name__ == "__main__":
    main()
