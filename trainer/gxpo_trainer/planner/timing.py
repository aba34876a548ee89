"""Seconds of a step, by phase, from floating-point operations, bytes moved and fixed costs.

    learner pass   FLOPs / (ranks · device FLOP/s · utilization) + micro-batches · fixed
    decoding step  fixed + max(bytes / bandwidth, FLOPs / FLOP/s) / efficiency + sequences · scheduler
    sampling       decoding steps + prompts; the decoding steps are those of the longest response, or of all tokens
                   over the sequences that run at a time

On a host without GPUs all processes share one device, so that ranks and samplers do not multiply its speed, and
asynchronous rollouts hide nothing. On devices of their own they hide the shorter of sampling and update.

Assumptions fitted to runs: what `gxpo plan --calibrate RUN_DIR` replaces the defaults with.

One run fixes one factor for each of the learner's time, the sampler's time and the learner's memory. Several runs of
different sizes separate what grows with the work from what does not: a non-negative least-squares fit of two terms to
relative errors.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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
    learner += forwards * forward_seconds(inputs, assumed, load) + reference_seconds(inputs)
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


def learner_flops_per_second(inputs: Inputs) -> float:
    """Dense products a second of all ranks together."""
    return inputs.device.flops(inputs.precision) * (inputs.learner_ranks if inputs.on_gpu else 1)


def pass_seconds(inputs: Inputs, assumed: Assumptions, load: Workload) -> float:
    """One forward and backward pass over a step's batch, with the reduction of its gradient."""
    flops = pass_flops(inputs, load, assumed.zero_variance_fraction)
    compute = flops / learner_flops_per_second(inputs) / assumed.utilization
    compute += load.micro_batches * assumed.micro_batch_s
    if inputs.zero_stage == 3 and inputs.on_gpu:
        # Gathering for forward and backward is overlapped with computing.
        return max(compute, 2 * load.micro_batches * gather_seconds(inputs)) + reduce_seconds(inputs, load)
    gathering = 2 * load.micro_batches * gather_seconds(inputs) if inputs.zero_stage == 3 else 0.0
    return compute + gathering + reduce_seconds(inputs, load)


def forward_seconds(inputs: Inputs, assumed: Assumptions, load: Workload) -> float:
    """A forward pass alone: the reference, or log π_old of several mini-batches."""
    compute = forward_flops(inputs, load) / learner_flops_per_second(inputs) / assumed.utilization
    return compute + load.micro_batches * assumed.micro_batch_s / 3


def reference_seconds(inputs: Inputs) -> float:
    """Copying the reference from the host."""
    if inputs.reference != "whole" or inputs.zero_stage == 3 or not inputs.on_gpu:
        return 0.0
    return inputs.shape.parameters * inputs.item / inputs.device.host_bandwidth


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
    names = {key for row in steps for key in row}
    medians = {key: statistics.median(row[key] for row in steps if key in row) for key in names}
    peaks = [row["system/learner_peak_bytes"] for row in steps if "system/learner_peak_bytes" in row]
    return Observation(name, inputs, medians | ({"system/learner_peak_bytes": max(peaks)} if peaks else {}))


def calibrate(base: Assumptions, runs: Sequence[Observation]) -> Assumptions:
    """`base` with everything that the runs measured in its place."""
    own = [lengths_of(base, run) for run in runs]
    pairs = list(zip(runs, own, strict=True))
    work, fixed = fit_two([_learner_term(run, mine) for run, mine in pairs])
    engine, scheduler = fit_two([_sampler_term(run, mine) for run, mine in pairs])

    def mean(values: Sequence[float]) -> float:
        return statistics.fmean(values)

    fitted = replace(
        base,
        utilization=base.utilization / work if work else 1.0,
        micro_batch_s=base.micro_batch_s * fixed,
        sampling_efficiency=base.sampling_efficiency / engine if engine else 1.0,
        decode_step_s=base.decode_step_s * scheduler,
        token_s=base.token_s * scheduler,
        verify_s=mean([run.metrics.get("time/verify_s", base.verify_s) for run in runs]),
        sync_s=mean([_fixed_sync(base, run) for run in runs]),
        step_s=mean([_unnamed(run) for run in runs]),
        prompt_fraction=mean([mine.prompt_fraction for mine in own]),
        response_fraction=mean([mine.response_fraction for mine in own]),
        zero_variance_fraction=mean([mine.zero_variance_fraction for mine in own]),
        source=f"calibrated to {', '.join(run.name for run in runs)}",
    )
    return _with_memory(fitted, runs, own)


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
    rows = [(a / m, b / m) for a, b, m in terms if m > 0]
    if not rows:
        return 1.0, 1.0
    aa, bb, ab = (sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (1, 1), (0, 1)))
    a, b = (sum(r[i] for r in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    if len(rows) > 1 and determinant > 1e-6 * aa * bb:
        x, y = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
        if x >= 0 and y >= 0:
            return x, y
        return (a / aa, 0.0) if y < 0 else (0.0, b / bb)
    total = [r[0] + r[1] for r in rows]
    both = sum(total) / sum(value * value for value in total)
    return both, both


def _learner_term(run: Observation, assumed: Assumptions) -> Term:
    whole = _modelled(run, assumed).update
    work = _modelled(run, replace(assumed, micro_batch_s=0.0)).update
    moved = _modelled(run, replace(assumed, micro_batch_s=0.0, utilization=math.inf)).update
    return _term(whole, work, moved, run.metrics["time/update_s"])


def _sampler_term(run: Observation, assumed: Assumptions) -> Term:
    whole = _modelled(run, assumed).sampling
    work = _modelled(run, replace(assumed, decode_step_s=0.0, token_s=0.0)).sampling
    moved = _modelled(run, replace(assumed, decode_step_s=0.0, token_s=0.0, sampling_efficiency=math.inf)).sampling
    return _term(whole, work, moved, run.metrics["time/rollout_s"])


def _term(whole: float, work: float, moved: float, measured: float) -> Term:
    """moved: what no factor changes; at most 99 % of what was measured is put down to it."""
    return work - moved, whole - work, max(measured - moved, measured / 100)


def _modelled(run: Observation, assumed: Assumptions) -> StepTime:
    """The step that the run's median step was: with its look-ahead where it took more than one pass."""
    inputs = run.inputs
    return step_time(inputs, assumed, workload_of(inputs, assumed), inputs.rule, gate_open=run.passes > 1.0)


def _fixed_sync(base: Assumptions, run: Observation) -> float:
    load = workload_of(run.inputs, base)
    moved = step_time(run.inputs, base, load, run.inputs.rule, gate_open=False).sync - base.sync_s
    return max(0.0, run.metrics.get("time/sync_s", base.sync_s + moved) - moved)


def _unnamed(run: Observation) -> float:
    named = ("time/rollout_s", "time/verify_s", "time/update_s", "time/sync_s")
    return max(0.0, run.metrics["time/step_s"] - sum(run.metrics.get(name, 0.0) for name in named))


def _with_memory(assumed: Assumptions, runs: Sequence[Observation], own: Sequence[Assumptions]) -> Assumptions:
    """With the learner's memory: its process before the model, and the measured over the counted bytes after it."""
    terms: list[Term] = []
    for run, mine in zip(runs, own, strict=True):
        counting = replace(mine, memory_factor=1.0, runtime_bytes=0, engine_bytes=0)
        counted = sum(part.num_bytes for part in learner_parts(run.inputs, counting, workload_of(run.inputs, counting)))
        if run.memory_bytes is not None:
            terms.append((float(counted), float(assumed.engine_bytes), run.memory_bytes))
    if not terms:
        return assumed
    factor, fixed = fit_two(terms)
    idle = [run.metrics["system/learner_idle_bytes"] for run in runs if "system/learner_idle_bytes" in run.metrics]
    on_host = not runs[0].inputs.on_gpu and bool(idle)
    runtime = int(statistics.fmean(idle)) if on_host else assumed.runtime_bytes
    engine = int(fixed * assumed.engine_bytes)
    return replace(assumed, memory_factor=factor, runtime_bytes=runtime, engine_bytes=engine)
