"""Seconds of a step, by phase, from floating-point operations, bytes moved and fixed costs.

    learner pass   FLOPs / (ranks · device FLOP/s · utilization) + micro-batches · fixed
    decoding step  fixed + max(bytes / bandwidth, FLOPs / FLOP/s) / efficiency + sequences · scheduler
    sampling       decoding steps + prompts; the decoding steps are those of the longest response, or of all tokens
                   over the sequences that run at a time

On a host without GPUs all processes share one device, so that ranks and samplers do not multiply its speed, and
asynchronous rollouts hide nothing. On devices of their own they hide the shorter of sampling and update.
"""

from __future__ import annotations

from dataclasses import dataclass

from gxpo_trainer.config import RuleSettings
from gxpo_trainer.planner.devices import Assumptions
from gxpo_trainer.planner.inputs import Inputs, Workload
from gxpo_trainer.planner.memory import sampler_memory

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
    forwards: float = inputs.mini_batches > 1
    if inputs.reference != "none":
        forwards += inputs.reference_parameters / inputs.shape.parameters
    learner = passes * pass_seconds(inputs, assumed, load) + passes * optimizer_seconds(inputs)
    learner += forwards * forward_seconds(inputs, assumed, load)
    if inputs.reference == "whole" and inputs.zero_stage != 3 and inputs.on_gpu:  # copied from the host
        learner += inputs.reference_parameters * inputs.item / inputs.device.host_bandwidth
    sampling = sampling_seconds(inputs, assumed, load) if inputs.sampled else 0.0
    verify = assumed.verify_s if inputs.sampled else 0.0
    look_ahead = look_ahead_seconds(inputs, rule) if gate_open else 0.0
    overlaps = inputs.async_depth > 0 and not inputs.shared
    return StepTime(
        sampling=sampling,
        verify=verify,
        passes=learner,
        look_ahead=look_ahead,
        overlapped=min(sampling + verify, learner + look_ahead) if overlaps else 0.0,
        sync=assumed.sync_s + sync_seconds(inputs) if inputs.sampled else 0.0,
        other=assumed.step_s,
    )


def forward_flops(inputs: Inputs, load: Workload) -> float:
    """Of one forward pass over a step's rows, all ranks together; logits of sampled tokens alone."""
    shape = inputs.shape
    rows = load.learner_tokens * (shape.backbone_flops + shape.attention_flops(load.row_width / 2))
    return rows + inputs.sequences * load.response * shape.head_flops


def pass_flops(inputs: Inputs, load: Workload) -> float:
    """Of one forward and backward pass over a step's batch, all ranks together.

    A backward pass costs twice the forward pass, with an adapter once (no gradients of the frozen weights).
    Checkpointing runs the forward pass again.
    """
    backward = (1 if inputs.adapter_rank else 2) + inputs.checkpointing
    return forward_flops(inputs, load) * (1 + backward)


def _compute_seconds(inputs: Inputs, assumed: Assumptions, flops: float) -> float:
    """Time of `flops` on all ranks together."""
    speed = inputs.device.flops(inputs.precision) * (inputs.learner_ranks if inputs.on_gpu else 1)
    return flops / speed / assumed.utilization


def pass_seconds(inputs: Inputs, assumed: Assumptions, load: Workload) -> float:
    """One forward and backward pass over a step's batch, with the reduction of its gradient."""
    compute = _compute_seconds(inputs, assumed, pass_flops(inputs, load))
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
