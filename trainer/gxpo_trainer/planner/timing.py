"""Seconds of a step, from floating-point operations, bytes of memory and fixed costs.

    learner pass   FLOPs / (ranks · device FLOP/s · utilization) + micro-batches · fixed
    decoding step  fixed + max(bytes / bandwidth, FLOPs / FLOP/s) / efficiency + sequences · scheduler
    sampling       decoding steps + prompts; the decoding steps are those of the longest response, or of all tokens
                   over the sequences that run at a time

What devices send each other is not counted. On a host without GPUs all processes share one device, so that ranks and
samplers do not multiply its speed, and asynchronous rollouts hide nothing. On devices of their own they hide the
shorter of sampling and update.
"""

from __future__ import annotations

from dataclasses import dataclass

from gxpo_trainer.config import RuleSettings
from gxpo_trainer.planner.devices import Assumptions
from gxpo_trainer.planner.inputs import Inputs, Workload
from gxpo_trainer.planner.memory import sampler_memory


@dataclass(frozen=True, slots=True)
class PlannedSeconds:
    """Seconds of one step.

    look_ahead: a rule's copies and extrapolation. other: scoring, weight sync and the rest. overlapped: of sampling
    that passes during the update, where rollouts are asynchronous. step: the whole step.
    """

    sampling: float
    passes: float
    look_ahead: float
    other: float
    overlapped: float
    step: float


def step_time(inputs: Inputs, assumed: Assumptions, load: Workload, rule: RuleSettings) -> PlannedSeconds:
    """Expected seconds of a step under a rule, with its look-ahead on."""
    passes = rule.passes_per_step(gate_open=True)
    # A forward pass alone: the reference, or log π_old of several mini-batches, which worked answers do not have and
    # stale samples with π_old of the sampler do not need.
    config = inputs.config
    known = config.rollout.async_depth > 0 and config.learner.loss.proximal == "sampler"
    ratios = inputs.sampled and config.learner.mini_batches > 1 and not known
    forwards = ratios + inputs.reference_parameters / inputs.shape.parameters
    # An optimizer step reads parameters, gradient and moments, and writes parameters and moments; two passes over the
    # gradient for its norm and clipping, one over all for the norm of the update.
    optimizer = _memory_seconds(inputs, 4 * inputs.shard * (8 + 3 * inputs.num_moments))
    learner = passes * (pass_seconds(inputs, assumed, load) + optimizer)
    learner += forwards * _compute_seconds(inputs, assumed, forward_flops(inputs, load))
    # Copies into a rule's buffers (read and write), and one pass that reads them, gradient and parameters.
    buffers = rule.shard_buffers(inputs.num_moments)
    look_ahead = _memory_seconds(inputs, 4 * inputs.shard * (3 * buffers + 3)) if buffers else 0.0
    sampling = sampling_seconds(inputs, assumed, load) if inputs.sampled else 0.0
    update, other = learner + look_ahead, assumed.fixed_s * (3 if inputs.sampled else 1)
    overlapped = min(sampling, update) if inputs.config.rollout.async_depth > 0 and not inputs.shared else 0.0
    return PlannedSeconds(sampling, learner, look_ahead, other, overlapped, sampling + update + other - overlapped)


def forward_flops(inputs: Inputs, load: Workload) -> float:
    """Of one forward pass over a step's rows, all ranks together; logits of sampled tokens alone."""
    shape = inputs.shape
    rows = load.learner_tokens * (shape.backbone_flops + shape.attention_flops(load.row_width / 2))
    return rows + inputs.sequences * load.response * shape.head_flops


def pass_seconds(inputs: Inputs, assumed: Assumptions, load: Workload) -> float:
    """One forward and backward pass over a step's batch.

    A backward pass costs twice the forward pass, with an adapter once (no gradients of the frozen weights).
    Checkpointing runs the forward pass again.
    """
    backward = (1 if inputs.config.learner.lora else 2) + inputs.checkpointing
    flops = forward_flops(inputs, load) * (1 + backward)
    return _compute_seconds(inputs, assumed, flops) + load.micro_batches * assumed.micro_batch_s


def _compute_seconds(inputs: Inputs, assumed: Assumptions, flops: float) -> float:
    """Time of `flops` on all ranks together."""
    ranks = inputs.config.placement.learner_ranks if inputs.on_gpu else 1
    speed = inputs.device.flops(inputs.config.learner.precision) * ranks
    return flops / speed / assumed.utilization


def sampling_seconds(inputs: Inputs, assumed: Assumptions, load: Workload) -> float:
    """All samples of a step by all samplers; a host's cores are shared between them."""
    shape, rollout, placement = inputs.shape, inputs.config.rollout, inputs.config.placement
    speed = (placement.tensor_parallel if inputs.on_gpu else 1 / placement.samplers) * assumed.sampling_efficiency
    precision = "bf16" if inputs.sampler_item == 2 else "fp32"
    flops, bandwidth = inputs.device.flops(precision) * speed, inputs.device.memory_bandwidth * speed
    sequences = inputs.sequences / placement.samplers
    tokens = sequences * load.response
    at_once = max(1, min(sequences, rollout.max_num_seqs, sampler_memory(inputs, load).sequences))
    steps = max(load.response if rollout.ignore_eos else rollout.max_new_tokens, tokens / at_once)
    running = tokens / steps
    active = shape.backbone_flops + shape.head_flops
    read = shape.parameters * inputs.sampler_item + running * load.context * shape.kv_bytes(inputs.sampler_item)
    computed = running * (active + shape.attention_flops(load.context))
    step = assumed.decode_step_s + max(read / bandwidth, computed / flops) + running * assumed.token_s
    # Prompts, and what environments wrote, are read without decoding steps.
    prefilled = rollout.prompts_per_step / placement.samplers * load.prompt + sequences * load.observation
    return steps * step + prefilled * (shape.backbone_flops + shape.attention_flops(load.prompt / 2)) / flops


def _memory_seconds(inputs: Inputs, num_bytes: float) -> float:
    # The ranks of a host share its memory.
    share = 1 if inputs.on_gpu else inputs.config.placement.learner_ranks
    return num_bytes * share / inputs.device.memory_bandwidth
