"""On a CUDA device: extrapolation, a GRPO pass and parking of a 1.5 B policy, each against what the device allows.

Extrapolation is held against the bytes that it must move, the pass against the dense bf16 peak of the chip (the
planner's table), parking and return against a plain copy from and to pinned memory. Prints the reason and does nothing
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

from benchmarks.measure import Figure, median, ratio, save, single
from benchmarks.policies import LARGE_SHAPE, one_and_a_half_billion
from gxpo_trainer.algo.batch import ScoredSequence, StepBatch, with_scale
from gxpo_trainer.config import GxpoRule, RunConfig
from gxpo_trainer.learner.shards import Parking
from gxpo_trainer.planner.devices import devices
from gxpo_trainer.planner.inputs import ModelShape
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
    peak = bf16_peak(torch.cuda.get_device_name())
    work = batch(SEQUENCES, PROMPT, RESPONSE, LARGE_SHAPE.vocabulary)
    figures, taken = [], []
    with tempfile.TemporaryDirectory() as folder:
        policy = one_and_a_half_billion(Path(folder), "cuda")
        for kernels in ("eager", "auto"):
            torch.cuda.reset_peak_memory_stats()
            learner = learner_of(policy, "gpu", PROMPT + RESPONSE, TOKEN_BUDGET, kernels)
            seconds = pass_seconds(learner, work, torch.cuda.synchronize)
            learner.close()
            taken.append(seconds)
            name = f"GRPO pass, 1.5 B in bf16, {learner.attention}"
            figures.append(median(name, seconds, "s"))
            figures.append(single(f"{name}: peak memory in GiB", torch.cuda.max_memory_allocated() / 2**30))
            del learner
            gc.collect()
    figures.append(ratio("GRPO pass, kernels of auto / eager", taken[1], taken[0]))
    if peak is None:
        print(f"gpu: the planner has no peak of {torch.cuda.get_device_name()}; no share of it is given")
        return figures
    flops = model_flops(LARGE_SHAPE, SEQUENCES, PROMPT, RESPONSE)
    shares = [flops / one / peak for one in seconds]
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


def bf16_peak(name: str) -> float | None:
    """Dense bf16 products a second of the device that torch calls so, None where the planner does not know it."""
    words = name.upper().replace("-", " ").split()
    chips = [
        device for device in devices().values() if {kind.partition("-")[0] for kind in device.ray_names} & {*words}
    ]
    return chips[0].bf16_flops if chips else None


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
