"""Memory of a device, part by part, in each phase of a step.

The bytes of a learner's parts at each ZeRO stage are in the table of docs/planner.md.
tests/unit/planner checks them by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gxpo_trainer.config.engines import GRADIENT_BUCKET, LOGITS_COPIES, WEIGHT_BUCKET_BYTES, logits_chunk
from gxpo_trainer.planner.devices import GIB, Assumptions, Device
from gxpo_trainer.planner.inputs import Inputs, Workload, peak_tokens

LIVE_PARAMETERS = 1_000_000_000
"""Elements that DeepSpeed keeps gathered at stage 3, its default."""
GRAPHS = GIB
"""Of a sampler with `rollout.enforce_eager = false`; vLLM keeps its captured graphs while it sleeps. A guess."""


Parts = Mapping[str, int]
"""Bytes by the name of what they hold."""


@dataclass(frozen=True, slots=True)
class Phase:
    """What one device holds at a time. limit: its usable bytes, 0 where that is not known."""

    name: str
    parts: Parts
    limit: int

    @property
    def num_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return not self.limit or self.num_bytes <= self.limit


def learner_parts(inputs: Inputs, assumed: Assumptions, load: Workload, *, publishes: bool = True) -> Parts:
    """One learner rank at its peak, in the backward pass, with the rule's look-ahead on. Empty parts are left out.

    publishes: whether it is rank 0, which on a host holds the weights that samplers read.
    """
    shard, learner = inputs.shard, inputs.config.learner
    diagnosed = learner.rule.family == "look-ahead" and inputs.config.diagnostics.trajectory_every > 0
    weight_ranks = inputs.config.placement.learner_ranks if learner.zero_stage == 3 else 1
    parts = {
        "weights": -(-inputs.parameters // weight_ranks) * inputs.item,
        "fp32 masters": 4 * shard if learner.zero_stage else 0,
        "gradients": gradient_bytes(inputs),
        "optimizer": 4 * inputs.num_moments * shard,
        "rule buffers": 4 * learner.rule.shard_buffers(inputs.num_moments) * shard,
        "diagnostics": 4 * diagnosed * (1 + inputs.num_moments) * shard,
        "reference": reference_bytes(inputs, load),
        "communication": communication_bytes(inputs),
        "activations": activation_bytes(inputs, peak_tokens(inputs, load)) + mask_bytes(inputs, load),
        "logits": logits_bytes(inputs, load),
        "published weights": published_bytes(inputs) if publishes else 0,
    }
    counted = {name: int(size * assumed.memory_factor) for name, size in parts.items() if size}
    return counted | {"runtime": assumed.runtime_bytes + assumed.engine_bytes}


def released_parts(inputs: Inputs) -> frozenset[str]:
    """Parts that a learner on shared GPUs releases before the sampler's weights wake. DeepSpeed keeps buffers for the
    gradients of stage 3, and of stage 1 in bf16; the reference of stage 3 stays as well."""
    released, learner = {"activations", "logits", "rule buffers", "diagnostics"}, inputs.config.learner
    if learner.zero_stage < 3:
        released.add("reference")
        if learner.zero_stage != 1 or learner.precision == "fp32":
            released.add("gradients")
    return frozenset(released)


def published_bytes(inputs: Inputs) -> int:
    """Weights on their way to the samplers: on a GPU two buckets, on a host two versions in shared memory, which count
    as resident where the learner maps them."""
    if not inputs.on_gpu:
        return 2 * inputs.shape.parameters * inputs.sampler_item
    return 2 * min(WEIGHT_BUCKET_BYTES, inputs.trainable * inputs.sampler_item)


def gradient_bytes(inputs: Inputs) -> int:
    """Gradients of one rank at the end of a pass."""
    if inputs.config.learner.zero_stage == 1:
        # DeepSpeed partitions gradients after the last micro-batch; in bf16 it accumulates in a full fp32 buffer.
        other = 2 * inputs.trainable if inputs.item == 2 else 4 * inputs.shard
        return 4 * inputs.trainable + other
    return 4 * inputs.shard


def communication_bytes(inputs: Inputs) -> int:
    """Reduction buckets, and at stage 3 the parameters that are gathered at a time."""
    bucket, stage = min(max(inputs.trainable, 1024), GRADIENT_BUCKET), inputs.config.learner.zero_stage
    if stage == 0:
        alone = inputs.config.placement.learner_ranks == 1
        return 0 if alone else 4 * min(inputs.trainable, 10 * GRADIENT_BUCKET)
    buckets = 4 * bucket * (2 if inputs.on_gpu else 1)
    if stage < 3:
        return buckets
    return buckets + min(inputs.parameters, LIVE_PARAMETERS + bucket) * inputs.item


def reference_bytes(inputs: Inputs, load: Workload) -> int:
    """The teacher or the KL term's start policy, which under LoRA is the policy itself: a part at stage 3; else whole
    on a CPU, and on a GPU during its forward pass, when there are no activations of a backward pass."""
    learner = inputs.config.learner
    if learner.lora and not inputs.teacher_parameters:
        return 0
    whole = inputs.reference_parameters * inputs.item
    if learner.zero_stage == 3:
        return -(-inputs.reference_parameters // inputs.config.placement.learner_ranks) * inputs.item
    return max(whole - activation_bytes(inputs, peak_tokens(inputs, load)), 0) if inputs.on_gpu else whole


def activation_bytes(inputs: Inputs, tokens: float) -> int:
    """What a forward pass over a micro-batch keeps for the backward pass, and the gradients of one layer.

    Elements a token and layer: norms 2 × 3·hidden, which compute in fp32; queries, keys, values and the output of
    attention; MLP 4·intermediate. With checkpointing one layer at a time is kept, and the input of each.
    """
    shape, item = inputs.shape, inputs.item
    mlp = shape.intermediate * shape.active_experts + shape.shared_intermediate
    norms = 2 * shape.hidden * (12 if item == 4 else 8)
    layer = norms + item * (2 * shape.query_width + 2 * shape.kv_width + 4 * mlp)
    working = item * (2 * shape.hidden + 3 * mlp)
    if inputs.checkpointing:
        token_bytes = shape.layers * shape.hidden * item + layer + working
    else:
        token_bytes = shape.layers * layer + working
    return int(tokens * token_bytes)


def mask_bytes(inputs: Inputs, load: Workload) -> int:
    """Masks over rows that share a prompt: one of bits, and an additive one in every layer; over whole rows also where
    ranks are parallel over sequences."""
    if load.responses_per_row == 1:
        return 0
    layers = 1 if inputs.checkpointing else inputs.shape.layers
    tokens = peak_tokens(inputs, load) * inputs.config.learner.sequence_parallel
    return int(tokens * load.row_width * (1 + layers * inputs.item))


def logits_bytes(inputs: Inputs, load: Workload) -> int:
    """Copies of one chunk of logits in fp32, and the head's gradient."""
    elements = peak_tokens(inputs, load) * inputs.shape.vocabulary
    chunk = logits_chunk(inputs.device.memory_bytes if inputs.on_gpu else 0)
    # Over several chunks the gradient is summed in fp32, in bf16 beside the product that is added.
    gradient = inputs.item if elements <= chunk else 6 if inputs.item == 2 else 4
    gradient *= inputs.config.learner.lora is None
    return int(4 * LOGITS_COPIES * min(elements, chunk)) + gradient * inputs.shape.embedding_parameters


@dataclass(frozen=True, slots=True)
class SamplerMemory:
    """One device of a sampler. kv: bytes of the cache, below 0 where not even the weights fit. sequences: of mean
    length, that the whole engine's cache holds."""

    weights: int
    working: int
    graphs: int
    kv: int
    sequences: int
    longest_fits: bool

    @property
    def parts(self) -> Parts:
        return {
            "sampler weights": self.weights,
            "sampler working memory": self.working,
            **({"CUDA graphs": self.graphs} if self.graphs else {}),
            "KV cache": max(0, self.kv),
        }


NO_SAMPLER = SamplerMemory(0, 0, 0, 0, 0, longest_fits=True)
"""Of a supervised run without benchmarks."""


def sampler_memory(inputs: Inputs, load: Workload) -> SamplerMemory:
    """What a sampler's device holds while it samples. Samples of a prompt share the prompt's part of the cache."""
    shape, item = inputs.shape, inputs.sampler_item
    rollout, tp = inputs.config.rollout, inputs.config.placement.tensor_parallel
    weights = -(-shape.parameters * item // tp)
    mlp = shape.intermediate * shape.active_experts // tp
    logits = 4 * LOGITS_COPIES * rollout.max_num_seqs * shape.vocabulary
    working = batched_tokens(inputs.device) * (4 * shape.hidden + 3 * mlp) * item + logits
    # KV heads are split over devices, and repeated where there are more devices than heads.
    token = shape.kv_bytes(item) // min(tp, shape.kv_heads)
    graphs, kv = 0, rollout.cpu_kv_cache_gib * GIB
    if inputs.on_gpu:
        graphs = 0 if rollout.eager("gpu") else GRAPHS
        kv = int(rollout.memory_share(shared=inputs.shared) * inputs.device.memory_bytes) - weights - working
    tokens = max(0, kv) // token
    mean = load.response + load.observation + load.prompt / inputs.group
    return SamplerMemory(weights, working, graphs, kv, int(tokens / mean), tokens >= inputs.config.model.max_length)


def batched_tokens(device: Device) -> int:
    """Most tokens that vLLM runs through the model at once, by its own defaults."""
    large = device.memory_bytes >= 160 * GIB or (device.memory_bytes >= 70 * GIB and not device.name.startswith("a100"))
    return 16_384 if large and device.kind == "gpu" else 8192
