"""Seconds of a step, by phase, from floating-point operations, bytes moved and fixed costs.

    learner pass   FLOPs / (ranks · device FLOP/s · utilization) + micro-batches · fixed + bytes sent / link
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


@dataclass(frozen=True, slots=True)
class PlannedSeconds:
    """Seconds of one step by phase.

    look_ahead: a rule's copies and extrapolation. overlapped: of sampling and verifying that pass during the update,
    where rollouts are asynchronous. step: the whole step.
    """

    sampling: float
    verify: float
    passes: float
    look_ahead: float
    sync: float
    other: float
    overlapped: float
    step: float


def step_time(inputs: Inputs, assumed: Assumptions, load: Workload, rule: RuleSettings) -> PlannedSeconds:
    """Expected seconds of a step under a rule, with its look-ahead on."""
    passes = rule.passes_per_step(gate_open=True)
    forwards: float = inputs.mini_batches > 1
    if inputs.reference != "none":
        forwards += inputs.reference_parameters / inputs.shape.parameters
    learner = passes * (pass_seconds(inputs, assumed, load) + optimizer_seconds(inputs))
    # A forward pass alone: the reference, or log π_old of several mini-batches.
    learner += forwards * _compute_seconds(inputs, assumed, forward_flops(inputs, load))
    sampling = sampling_seconds(inputs, assumed, load) if inputs.sampled else 0.0
    verify = assumed.fixed_s if inputs.sampled else 0.0
    look_ahead = look_ahead_seconds(inputs, rule)
    sync = assumed.fixed_s + sync_seconds(inputs) if inputs.sampled else 0.0
    rollout, update = sampling + verify, learner + look_ahead
    overlapped = min(rollout, update) if inputs.async_depth > 0 and not inputs.shared else 0.0
    return PlannedSeconds(
        sampling=sampling,
        verify=verify,
        passes=learner,
        look_ahead=look_ahead,
        sync=sync,
        other=assumed.fixed_s,
        overlapped=overlapped,
        step=rollout + update + sync + assumed.fixed_s - overlapped,
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
    """One forward and backward pass over a step's batch, with what the ranks send each other.

    The gradient is reduced in fp32, at stages 2 and 3 after every micro-batch; stage 3 gathers the forward weights
    twice in each.
    """
    stage, times = inputs.zero_stage, load.micro_batches
    reduced = 4 * inputs.trainable * (2 if stage == 0 else 1 if stage == 1 else times)
    gathered = 2 * times * inputs.parameters * inputs.item if stage == 3 else 0
    sent = (reduced + gathered) * (inputs.learner_ranks - 1) / inputs.learner_ranks
    compute = _compute_seconds(inputs, assumed, pass_flops(inputs, load)) + times * assumed.micro_batch_s
    return compute + sent / inputs.device.link_bandwidth


def optimizer_seconds(inputs: Inputs) -> float:
    """One optimizer step: reads parameters, gradient and moments, writes parameters and moments; two passes over the
    gradient for its norm and clipping, one over all for the norm of the update."""
    return _memory_seconds(inputs, 4 * inputs.shard * (8 + 3 * inputs.num_moments))


def look_ahead_seconds(inputs: Inputs, rule: RuleSettings) -> float:
    """Copies into a rule's buffers (read and write), and one pass that reads them, gradient and parameters."""
    buffers = rule.shard_buffers(inputs.num_moments)
    return _memory_seconds(inputs, 4 * inputs.shard * (3 * buffers + 3)) if buffers else 0.0


def sync_seconds(inputs: Inputs) -> float:
    """Weights from the learner to the samplers, which read in parallel: copied within a device by cuda_ipc, sent over
    the link by nccl, else written to the host's memory and read from it."""
    size, device = inputs.shape.parameters * inputs.sampler_item, inputs.device
    if inputs.transport == "nccl":
        return size / device.link_bandwidth
    return 2 * size / (device.memory_bandwidth if inputs.transport == "cuda_ipc" else device.host_bandwidth)


def sampling_seconds(inputs: Inputs, assumed: Assumptions, load: Workload) -> float:
    """All samples of a step by all samplers; a host's cores are shared between them."""
    shape = inputs.shape
    speed = (inputs.tensor_parallel if inputs.on_gpu else 1 / inputs.samplers) * assumed.sampling_efficiency
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
    # Prompts, and what environments wrote, are read without decoding steps.
    prefilled = inputs.prompts / inputs.samplers * load.prompt + sequences * load.observation
    return steps * step + prefilled * (shape.backbone_flops + shape.attention_flops(load.prompt / 2)) / flops


def _memory_seconds(inputs: Inputs, num_bytes: float) -> float:
    # The ranks of a host share its memory.
    share = 1 if inputs.on_gpu else inputs.learner_ranks
    return num_bytes * share / inputs.device.memory_bandwidth
