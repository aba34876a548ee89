"""Seconds of a step, by phase, from floating-point operations, bytes moved and fixed costs.

    learner pass   FLOPs / (ranks · device FLOP/s · utilization) + micro-batches · fixed
    decoding step  fixed + max(bytes / bandwidth, FLOPs / FLOP/s) / efficiency + sequences · scheduler
    sampling       decoding steps + prompts; the decoding steps are those of the longest response, or of all tokens
                   over the sequences that run at a time

On a host without GPUs all processes share one device, so that ranks and samplers do not multiply its speed, and
asynchronous rollouts hide nothing. On devices of their own they hide the shorter of sampling and update.

`calibrate` fits the assumptions to runs (`gxpo plan --calibrate`). One run fixes one factor for each of the learner's
time, the sampler's time and the learner's memory. Several runs of different sizes separate what grows with the work
from what does not: a non-negative least-squares fit of two terms to relative errors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Literal

import numpy as np

from gxpo_trainer.config import RuleSettings
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.planner.devices import Assumptions
from gxpo_trainer.planner.inputs import Inputs, Workload, workload_of
from gxpo_trainer.planner.memory import learner_parts, sampler_memory

ALL_REDUCE_S = 1e-5
"""Latency of one all-reduce between the devices of a tensor-parallel sampler."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step by phase. look_ahead: a rule's copies and extrapolation. overlapped: of sampling and
    verifying that pass during the update, where rollouts are asynchronous."""

    sampling: float
    verify: float
    passes: float
    look_ahead: float
    sync: float
    other: float
    overlapped: float

    @property
    def update(self) -> float:
        """What `time/update_s` measures."""
        return self.passes + self.look_ahead

    @property
    def total(self) -> float:
        return self.sampling + self.verify + self.update + self.sync + self.other - self.overlapped


def step_time(inputs: Inputs, assumed: Assumptions, load: Workload, rule: RuleSettings, *, gate_open: bool) -> StepTime:
    """Expected seconds of a step under a rule."""
    passes = rule.passes_per_step(gate_open)
    forwards = (inputs.reference != "none") + (inputs.mini_batches > 1)
    learner = passes * pass_seconds(inputs, assumed, load) + passes * optimizer_seconds(inputs)
    learner += forwards * forward_seconds(inputs, assumed, load)
    if inputs.reference == "whole" and inputs.zero_stage != 3 and inputs.on_gpu:  # copied from the host
        learner += inputs.shape.parameters * inputs.item / inputs.device.host_bandwidth
    sampling = sampling_seconds(inputs, assumed, load)
    look_ahead = look_ahead_seconds(inputs, rule) if gate_open else 0.0
    overlaps = inputs.async_depth > 0 and not inputs.shared
    return StepTime(
        sampling=sampling,
        verify=assumed.verify_s,
        passes=learner,
        look_ahead=look_ahead,
        overlapped=min(sampling + assumed.verify_s, learner + look_ahead) if overlaps else 0.0,
        sync=assumed.sync_s + sync_seconds(inputs),
        other=assumed.step_s,
    )


def forward_flops(inputs: Inputs, load: Workload) -> float:
    """Of one forward pass over a step's rows, all ranks together; logits of sampled tokens alone."""
    shape = inputs.shape
    rows = load.learner_tokens * (shape.backbone_flops + shape.attention_flops(load.row_width / 2))
    return rows + inputs.sequences * load.response * shape.head_flops


def pass_flops(inputs: Inputs, load: Workload, zero_variance: float = 0.0) -> float:
    """Of one forward and backward pass over a step's batch, all ranks together.

    A backward pass costs twice the forward pass, with an adapter once (no gradients of the frozen weights).
    Checkpointing runs the forward pass again. zero_variance: share of groups without a backward pass.
    """
    backward = (1 if inputs.adapter_rank else 2) + inputs.checkpointing
    moving = 1.0 if inputs.reference != "none" else 1.0 - zero_variance
    return forward_flops(inputs, load) * (1 + backward * moving)


def _compute_seconds(inputs: Inputs, assumed: Assumptions, flops: float) -> float:
    """Time of `flops` on all ranks together."""
    speed = inputs.device.flops(inputs.precision) * (inputs.learner_ranks if inputs.on_gpu else 1)
    return flops / speed / assumed.utilization


def pass_seconds(inputs: Inputs, assumed: Assumptions, load: Workload) -> float:
    """One forward and backward pass over a step's batch, with the reduction of its gradient."""
    compute = _compute_seconds(inputs, assumed, pass_flops(inputs, load, assumed.zero_variance_fraction))
    compute += load.micro_batches * assumed.micro_batch_s
    gathering = 2 * load.micro_batches * gather_seconds(inputs) if inputs.zero_stage == 3 else 0.0
    # On GPUs gathering for forward and backward is overlapped with computing.
    return (max(compute, gathering) if inputs.on_gpu else compute + gathering) + reduce_seconds(inputs, load)


def forward_seconds(inputs: Inputs, assumed: Assumptions, load: Workload) -> float:
    """A forward pass alone: the reference, or log π_old of several mini-batches."""
    compute = _compute_seconds(inputs, assumed, forward_flops(inputs, load))
    return compute + load.micro_batches * assumed.micro_batch_s / 3


def gather_seconds(inputs: Inputs) -> float:
    """All-gather of the forward weights."""
    ranks = inputs.learner_ranks
    return inputs.parameters * inputs.item * (ranks - 1) / ranks / inputs.device.link_bandwidth


def reduce_seconds(inputs: Inputs, load: Workload) -> float:
    """Reduction of the gradient in fp32, at stages 2 and 3 after every micro-batch."""
    ranks, times = inputs.learner_ranks, load.micro_batches if inputs.zero_stage >= 2 else 1
    share = (ranks - 1) / ranks * (2 if inputs.zero_stage == 0 else 1)
    return times * 4 * inputs.trainable * share / inputs.device.link_bandwidth


def optimizer_seconds(inputs: Inputs) -> float:
    """One optimizer step: reads parameters, gradient and moments, writes parameters and moments; then publishes."""
    moved = 4 * inputs.shard * (3 + 2 * inputs.num_moments)
    # Two passes over the gradient for its norm and clipping, one over all for the norm of the update.
    moved += 4 * inputs.shard * (5 + inputs.num_moments)
    published = gather_seconds(inputs) if inputs.zero_stage in (1, 2) else 0.0
    return _memory_seconds(inputs, moved) + published


def look_ahead_seconds(inputs: Inputs, rule: RuleSettings) -> float:
    """Copies into a rule's buffers (read and write), and one pass that reads them, gradient and parameters."""
    buffers = rule.shard_buffers(inputs.num_moments)
    return _memory_seconds(inputs, 4 * inputs.shard * (3 * buffers + 3)) if buffers else 0.0


def sync_seconds(inputs: Inputs) -> float:
    """Weights from the learner to the samplers: gathered at stage 3, then by the transport; samplers read in parallel.

    cuda_ipc copies within a device, nccl over the link; shared memory is written and read, the object store copies once
    more. A tensor-parallel sampler's devices read a part each.
    """
    size = inputs.shape.parameters * inputs.sampler_item
    gathered = gather_seconds(inputs) if inputs.zero_stage == 3 else 0.0
    host, parts = inputs.device.host_bandwidth, inputs.tensor_parallel
    moving = {
        "cuda_ipc": 2 * size / parts / inputs.device.memory_bandwidth,
        "nccl": size / inputs.device.link_bandwidth,
        "shared_memory": (size + size / parts) / host,
        "object_store": (2 * size + size / parts) / host,
    }
    return gathered + moving[inputs.transport]


def sampling_seconds(inputs: Inputs, assumed: Assumptions, load: Workload) -> float:
    """All samples of a step by all samplers; a host's cores are shared between them."""
    shape, tp = inputs.shape, inputs.tensor_parallel
    speed = (tp if inputs.on_gpu else 1 / inputs.samplers) * assumed.sampling_efficiency
    precision = "bf16" if inputs.sampler_item == 2 else "fp32"
    flops, bandwidth = inputs.device.flops(precision) * speed, inputs.device.memory_bandwidth * speed
    sequences = inputs.sequences / inputs.samplers
    tokens = sequences * load.response
    at_once = max(1, min(sequences, inputs.max_num_seqs, sampler_memory(inputs, load).sequences))
    steps = max(load.response if inputs.full_responses else inputs.response_limit, tokens / at_once)
    running = tokens / steps
    active = shape.backbone_flops + shape.head_flops
    read = shape.parameters * inputs.sampler_item + running * load.context * shape.kv_bytes(inputs.sampler_item)
    computed = running * (active + shape.attention_flops(load.context))
    step = assumed.decode_step_s + max(read / bandwidth, computed / flops) + running * assumed.token_s
    if tp > 1:
        step += 2 * shape.layers * ALL_REDUCE_S
    # Prompts, and what environments wrote, are read without decoding steps.
    prefilled = inputs.prompts / inputs.samplers * load.prompt + sequences * load.observation
    return steps * step + prefilled * (shape.backbone_flops + shape.attention_flops(load.prompt / 2)) / flops


def _memory_seconds(inputs: Inputs, num_bytes: float) -> float:
    # The ranks of a host share its memory.
    share = 1 if inputs.on_gpu else inputs.learner_ranks
    return num_bytes * share / inputs.device.memory_bandwidth


WARM_UP = 2
"""First steps of a run that are left out where there are others: caches fill and kernels are chosen."""
REQUIRED = ("rollout/length_mean", "time/rollout_s", "time/update_s", "time/step_s", "update/backward_passes")
Term = tuple[float, float, float]
"""Modelled share that grows with the work, modelled fixed share, measured."""


@dataclass(frozen=True, slots=True)
class Observation:
    """Medians over a run's steps, by metric, and the inputs that the run had."""

    name: str
    inputs: Inputs
    metrics: Mapping[str, float]

    @property
    def passes(self) -> float:
        return self.metrics["update/backward_passes"]

    @property
    def memory_bytes(self) -> float | None:
        """The learner's peak without what its process holds before the model: on a GPU the device's, else resident."""
        if self.inputs.on_gpu:
            return self.metrics.get("system/learner_device_peak_bytes")
        peak, idle = self.metrics.get("system/learner_peak_bytes"), self.metrics.get("system/learner_idle_bytes")
        return None if peak is None or idle is None else peak - idle


def observe(name: str, inputs: Inputs, rows: Sequence[Mapping[str, float]]) -> Observation:
    """Medians over the steps of a run. rows: metrics of its steps. Raises ConfigError when it has none to fit to."""
    steps = [row for row in rows if all(key in row for key in REQUIRED)]
    steps = steps[WARM_UP:] if len(steps) > WARM_UP else steps
    if not steps:
        raise ConfigError(f"--calibrate {name}: no step has {', '.join(REQUIRED)}; name the folder of a run with steps")
    medians = {key: median(row[key] for row in steps if key in row) for key in {key for row in steps for key in row}}
    if (peak := "system/learner_peak_bytes") in medians:
        medians[peak] = max(row[peak] for row in steps if peak in row)
    return Observation(name, inputs, medians)


def calibrate(base: Assumptions, runs: Sequence[Observation]) -> Assumptions:
    """`base` with everything that the runs measured in its place."""
    own = [lengths_of(base, run) for run in runs]
    pairs = list(zip(runs, own, strict=True))
    work, fixed = fit_two([_time_term(run, mine, "update", "time/update_s") for run, mine in pairs])
    engine, scheduler = fit_two([_time_term(run, mine, "sampling", "time/rollout_s") for run, mine in pairs])
    factor, process = fit_two([term for run, mine in pairs if (term := _memory_term(base, run, mine))])
    measures_memory = any(run.memory_bytes is not None for run in runs)
    idle = [run.metrics["system/learner_idle_bytes"] for run in runs if "system/learner_idle_bytes" in run.metrics]
    on_host = measures_memory and not runs[0].inputs.on_gpu and bool(idle)
    return replace(
        base,
        utilization=base.utilization / work if work else 1.0,
        micro_batch_s=base.micro_batch_s * fixed,
        sampling_efficiency=base.sampling_efficiency / engine if engine else 1.0,
        decode_step_s=base.decode_step_s * scheduler,
        token_s=base.token_s * scheduler,
        verify_s=fmean(run.metrics.get("time/verify_s", base.verify_s) for run in runs),
        sync_s=fmean(_fixed_sync(base, run) for run in runs),
        step_s=fmean(_unnamed(run) for run in runs),
        runtime_bytes=int(fmean(idle)) if on_host else base.runtime_bytes,
        engine_bytes=int(process * base.engine_bytes) if measures_memory else base.engine_bytes,
        memory_factor=factor if measures_memory else base.memory_factor,
        prompt_fraction=fmean(mine.prompt_fraction for mine in own),
        response_fraction=fmean(mine.response_fraction for mine in own),
        zero_variance_fraction=fmean(mine.zero_variance_fraction for mine in own),
        source=f"calibrated to {', '.join(run.name for run in runs)}",
    )


def lengths_of(base: Assumptions, run: Observation) -> Assumptions:
    """`base` with a run's own lengths and share of groups without a backward pass."""
    inputs, metrics = run.inputs, run.metrics
    prompt = metrics.get("rollout/prompt_length_mean")
    return replace(
        base,
        prompt_fraction=base.prompt_fraction if prompt is None else prompt / inputs.prompt_limit,
        response_fraction=metrics["rollout/length_mean"] / inputs.response_limit,
        zero_variance_fraction=metrics.get("reward/zero_variance_fraction", base.zero_variance_fraction),
    )


def fit_two(terms: Sequence[Term]) -> tuple[float, float]:
    """Factors x, y ≥ 0 that minimize Σ ((x·a + y·b)/measured − 1)² over terms (a, b, measured).

    One term, or terms that are multiples of each other, leave the shares as they are: x = y.
    """
    from scipy.optimize import nnls

    rows = np.array([(a / m, b / m) for a, b, m in terms if m > 0]).reshape(-1, 2)
    if not rows.size:
        return 1.0, 1.0
    (aa, ab), (_, bb) = rows.T @ rows
    if len(rows) > 1 and aa * bb - ab * ab > 1e-6 * aa * bb:
        x, y = nnls(rows, np.ones(len(rows)))[0]
        return float(x), float(y)
    total = rows.sum(axis=1)
    both = float(total.sum() / (total @ total))
    return both, both


def _time_term(run: Observation, assumed: Assumptions, phase: Literal["update", "sampling"], metric: str) -> Term:
    """A phase of the run's median step, with its look-ahead where the step took more than one pass."""

    def modelled(assumed: Assumptions) -> float:
        load = workload_of(run.inputs, assumed)
        time = step_time(run.inputs, assumed, load, run.inputs.rule, gate_open=run.passes > 1.0)
        return time.update if phase == "update" else time.sampling

    growing = replace(assumed, micro_batch_s=0.0, decode_step_s=0.0, token_s=0.0)
    work = modelled(growing)
    moved = modelled(replace(growing, utilization=math.inf, sampling_efficiency=math.inf))
    measured = run.metrics[metric]
    # No factor changes what is moved; at most 99% of what was measured is put down to it.
    return work - moved, modelled(assumed) - work, max(measured - moved, measured / 100)


def _memory_term(base: Assumptions, run: Observation, own: Assumptions) -> Term | None:
    """The learner's counted bytes, those of its libraries, and the measured ones; None where they are not measured."""
    if run.memory_bytes is None:
        return None
    counting = replace(own, memory_factor=1.0, runtime_bytes=0, engine_bytes=0)
    counted = sum(learner_parts(run.inputs, counting, workload_of(run.inputs, counting)).values())
    return float(counted), float(base.engine_bytes), run.memory_bytes


def _fixed_sync(base: Assumptions, run: Observation) -> float:
    moved = sync_seconds(run.inputs)
    return max(0.0, run.metrics.get("time/sync_s", base.sync_s + moved) - moved)


def _unnamed(run: Observation) -> float:
    """Seconds of a step outside the phases that have a metric."""
    named = ("time/rollout_s", "time/verify_s", "time/update_s", "time/sync_s")
    return max(0.0, run.metrics["time/step_s"] - sum(run.metrics.get(name, 0.0) for name in named))
