"""Everything a plan depends on: the model's shape, the run's settings as `Inputs`, and the tokens of a step.

`inputs_of` is the only place that reads a RunConfig. Shapes are those of decoder-only models with gated MLPs, dense or
with experts. Biases and the norms of queries and keys are counted; rotary embeddings have no parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from gxpo_trainer.config import BudgetConfig, RuleSettings, RunConfig
from gxpo_trainer.config.engines import ATTENTION_BREAK_EVEN
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.planner.architectures import (
    experts_setting,
    folder_of,
    known_config,
    language_model,
    read_config,
    uneven_split,
)
from gxpo_trainer.planner.devices import Assumptions, Device

_REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder-only transformer.

    experts: MLPs a layer, of which a token passes `active_experts`; 1 and 1 for a dense model. intermediate: width of
    one of them. shared_intermediate: width of an MLP that every token passes in addition to the experts.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    experts: int = 1
    active_experts: int = 1
    shared_intermediate: int = 0
    attention_bias: bool = False
    head_norms: bool = False

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    def layer_parameters(self, *, active: bool = False) -> int:
        """Of one layer; active: those that one token passes."""
        experts = self.active_experts if active else self.experts
        attention = self.hidden * (2 * self.query_width + 2 * self.kv_width)  # q, k, v, o
        attention += self.query_width + 2 * self.kv_width if self.attention_bias else 0
        attention += 2 * self.head_dim if self.head_norms else 0
        mlp = 3 * self.hidden * (experts * self.intermediate + self.shared_intermediate)
        router = self.hidden * self.experts if self.experts > 1 else 0
        return attention + mlp + router + 2 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All of them; tied embeddings once."""
        embeddings = self.embedding_parameters * (1 if self.tied else 2)
        return embeddings + self.layers * self.layer_parameters() + self.hidden

    @property
    def backbone_flops(self) -> int:
        """Of a token's forward pass through the layers, without the products of attention scores."""
        return 2 * self.layers * self.layer_parameters(active=True)

    @property
    def head_flops(self) -> int:
        """Of a token's logits."""
        return 2 * self.embedding_parameters

    def attention_flops(self, context: float) -> float:
        """Of a token that attends to `context` tokens: scores and weighted values in every layer."""
        return 4.0 * self.layers * self.query_width * context

    def kv_bytes(self, item: int) -> int:
        """Of one token in the KV cache."""
        return 2 * self.layers * self.kv_width * item

    def adapter_parameters(self, rank: int, targets: tuple[str, ...]) -> int:
        """LoRA matrices: rank × (inputs + outputs) for each target of each layer. Unknown names count nothing."""
        sides = {
            **dict.fromkeys(("q_proj", "o_proj"), self.hidden + self.query_width),
            **dict.fromkeys(("k_proj", "v_proj"), self.hidden + self.kv_width),
            **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), self.experts * (self.hidden + self.intermediate)),
        }
        return self.layers * rank * sum(sides.get(name, 0) for name in set(targets))


def shape_of(config: Mapping[str, Any], where: str) -> ModelShape:
    """The shape that a config.json describes. Raises ConfigError naming `where` for one that is not supported."""
    body = language_model(config)
    missing = [name for name in _REQUIRED if not isinstance(body.get(name), int) or body[name] < 1]
    if missing:
        raise ConfigError(
            f"{where} has no {missing[0]}; a plan needs the config of a decoder-only model with a gated MLP, such as "
            "Llama, Qwen or Mistral"
        )

    def number(name: str, default: int) -> int:
        value = body.get(name)
        return value if isinstance(value, int) and value > 0 else default

    kind = str(body.get("model_type", ""))
    heads = body["num_attention_heads"]
    setting = experts_setting(body)
    experts = number(setting, 1) if setting else 1
    dense = body["intermediate_size"]
    return ModelShape(
        hidden=body["hidden_size"],
        intermediate=number("moe_intermediate_size", dense) if experts > 1 else dense,
        layers=body["num_hidden_layers"],
        heads=heads,
        kv_heads=number("num_key_value_heads", heads),
        head_dim=number("head_dim", max(1, body["hidden_size"] // heads)),
        vocabulary=body["vocab_size"],
        tied=bool(body.get("tie_word_embeddings", False)),
        experts=experts,
        active_experts=number("num_experts_per_tok", 1) if experts > 1 else 1,
        shared_intermediate=number("shared_expert_intermediate_size", 0) if experts > 1 else 0,
        attention_bias=bool(body.get("attention_bias", kind in ("qwen2", "qwen2_moe"))),
        head_norms=kind in ("qwen3", "qwen3_moe"),
    )


def read_shape(model_path: str) -> ModelShape:
    """The shape of `model.path`: a starter policy, a folder, or a hub model that this package knows.

    Never contacts a hub. Raises ConfigError for a folder without a readable config.json and for another hub name.
    """
    known = known_config(model_path)
    return read_folder(folder_of(model_path), model_path) if known is None else shape_of(known, model_path)


def read_folder(folder: Path, model_path: str) -> ModelShape:
    """The shape in a folder's config.json. Raises ConfigError naming `model_path`."""
    where = f"model.path = {model_path!r}"
    if not folder.is_dir():
        raise ConfigError(f"{where} is not a folder here, and its shape is not known; use a local copy of the model")
    return shape_of(read_config(folder, model_path), where)


Rows = Literal["padded", "shared", "packed"]
Reference = Literal["none", "whole", "adapter"]
Automatic = Literal["checkpointing", "token_budget"]


@dataclass(frozen=True, slots=True)
class Inputs:
    """One run on one kind of device.

    num_devices: that there are; on a host without GPUs 1. one_node: learner and samplers on one node, which sharing
    devices needs. reference: what the teacher or the KL term's start policy is: nothing, a model of its own, or the
    policy without its adapter. num_moments: state tensors of the optimizer. kv_bytes: size of the KV cache where it is
    set, None where it is what `memory_utilization` leaves. automatic: fields that the planner decides on a GPU
    (plan.settled). response_limit: sampled tokens of a response; observation_limit: those that an environment adds.
    """

    shape: ModelShape
    device: Device
    num_devices: int
    learner_ranks: int
    samplers: int
    tensor_parallel: int
    colocate: bool | Literal["auto"]
    one_node: bool
    zero_stage: int
    precision: str
    adapter_rank: int | None
    trainable: int
    num_moments: int
    reference: Reference
    checkpointing: bool
    token_budget: int
    rows: Rows
    mini_batches: int
    prompts: int
    group: int
    prompt_limit: int
    response_limit: int
    full_responses: bool
    max_length: int
    sampler_item: int
    memory_utilization: float
    eager: bool
    kv_bytes: int | None
    max_num_seqs: int
    async_depth: int
    rule: RuleSettings
    budget: BudgetConfig
    observation_limit: int = 0
    sampled: bool = True
    teacher_parameters: int = 0
    automatic: frozenset[Automatic] = frozenset()

    @property
    def on_gpu(self) -> bool:
        return self.device.kind == "gpu"

    @property
    def item(self) -> int:
        """Bytes of a parameter in the forward pass."""
        return 2 if self.precision == "bf16" else 4

    @property
    def sequences(self) -> int:
        """Samples of a step."""
        return self.prompts * self.group

    @property
    def parameters(self) -> int:
        """Of the policy, adapters included."""
        return self.shape.parameters + (self.trainable if self.adapter_rank else 0)

    @property
    def reference_parameters(self) -> int:
        """Of a reference that is a model of its own."""
        return self.teacher_parameters or self.shape.parameters

    @property
    def shard(self) -> int:
        """Trainable parameters whose masters, gradients and moments a rank holds."""
        return self.trainable if self.zero_stage == 0 else -(-self.trainable // self.learner_ranks)

    @property
    def sampler_devices(self) -> int:
        return self.samplers * self.tensor_parallel

    @property
    def shared(self) -> bool:
        """Whether learner ranks and samplers are on the same devices, one rank for each device of a sampler."""
        if not self.on_gpu:
            return True
        possible = self.colocate is not False and self.one_node and self.learner_ranks == self.sampler_devices
        return possible and (self.colocate is True or self.num_devices < self.learner_ranks + self.sampler_devices)

    @property
    def devices_needed(self) -> int:
        if not self.on_gpu:
            return 1
        return self.learner_ranks + (0 if self.shared else self.sampler_devices)


def inputs_of(config: RunConfig, shape: ModelShape, device: Device, num_devices: int | None = None) -> Inputs:
    """The inputs of a run. num_devices: None for the fewest that its placement can use.

    Raises ConfigError for a `placement.tensor_parallel` that does not divide the model's heads.
    """
    config = config.without_idle_engines()
    learner, rollout, placement = config.learner, config.rollout, config.placement
    sampled = rollout.source != "dataset"
    uneven = uneven_split(shape.heads, shape.kv_heads, placement.tensor_parallel, repr(config.model.path))
    if uneven is not None:
        raise ConfigError(uneven)
    on_gpu = device.kind == "gpu"
    lora = learner.lora
    optimizer = learner.optimizer
    observed = config.environment.observation_tokens
    reference: Reference = "none"
    if config.teacher is not None:
        reference = "whole"
    elif learner.loss.kl_beta > 0:
        reference = "adapter" if lora else "whole"
    sampler_fp32 = rollout.dtype == "float32" or (rollout.dtype == "auto" and learner.precision == "fp32")
    automatic: frozenset[Automatic] = frozenset()
    if config.model.gradient_checkpointing == "auto":
        automatic |= {"checkpointing"}
    if learner.token_budget == "auto":
        automatic |= {"token_budget"}
    asked = placement.num_gpus(colocated=placement.can_colocate)
    inputs = Inputs(
        shape=shape,
        device=device,
        num_devices=(num_devices or asked) if on_gpu else 1,
        learner_ranks=placement.learner_ranks,
        samplers=placement.samplers,
        tensor_parallel=placement.tensor_parallel,
        colocate=placement.colocate,
        one_node=placement.strategy == "pack",
        zero_stage=learner.zero_stage,
        precision=learner.precision,
        adapter_rank=lora.rank if lora else None,
        trainable=shape.adapter_parameters(lora.rank, lora.target_modules) if lora else shape.parameters,
        num_moments=2 if optimizer.name == "adamw" else int(optimizer.momentum > 0),
        reference=reference,
        checkpointing=config.model.recomputes_activations(shape.parameters),
        token_budget=learner.micro_batch_tokens,
        rows=_rows(config, on_gpu),
        mini_batches=learner.mini_batches,
        prompts=rollout.prompts_per_step,
        group=rollout.samples_per_prompt if sampled else 1,
        prompt_limit=min(config.data.max_prompt_tokens, config.model.max_length - rollout.max_new_tokens - observed),
        response_limit=rollout.max_new_tokens,
        full_responses=rollout.ignore_eos,
        max_length=config.model.max_length,
        sampler_item=4 if sampler_fp32 else 2,
        memory_utilization=rollout.memory_share(shared=True),
        eager=rollout.eager(device.kind),
        kv_bytes=None if on_gpu else rollout.cpu_kv_cache_gib * 2**30,
        max_num_seqs=rollout.max_num_seqs,
        async_depth=rollout.async_depth,
        rule=learner.rule,
        budget=config.budget,
        observation_limit=observed,
        sampled=sampled,
        teacher_parameters=0 if config.teacher is None else read_shape(config.teacher.path).parameters,
        automatic=automatic,
    )
    return replace(inputs, memory_utilization=rollout.memory_share(shared=inputs.shared))


def _rows(config: RunConfig, on_gpu: bool) -> Rows:
    """The layout of rows: what is set; for "auto" shared prompts on a CPU, on a GPU packed rows in bf16."""
    if config.learner.packing != "auto":
        return config.learner.packing
    if not on_gpu:
        return "shared"
    dense = config.model.attention in ("sdpa", "eager")
    return "packed" if config.learner.precision == "bf16" and not dense else "padded"


@dataclass(frozen=True, slots=True)
class Workload:
    """Means over a step.

    prompt: tokens. response: sampled tokens; observation: those that an environment wrote between them. row_width,
    responses_per_row: of the learner's rows. learner_tokens: in all rows of a step, of all ranks. micro_batches: of one
    rank in one pass.
    """

    prompt: float
    response: float
    observation: float
    row_width: float
    responses_per_row: int
    learner_tokens: float
    micro_batches: int

    @property
    def context(self) -> float:
        """Tokens that a response token sees on average."""
        return self.prompt + (self.response + self.observation) / 2


def workload_of(inputs: Inputs, assumed: Assumptions) -> Workload:
    """The expected workload. Lengths are the limits times the assumed fractions."""
    prompt = max(1.0, inputs.prompt_limit * assumed.prompt_fraction)
    response = max(1.0, inputs.response_limit * (1.0 if inputs.full_responses else assumed.response_fraction))
    observation = inputs.observation_limit * assumed.response_fraction
    whole = response + observation
    per_row = _responses_per_row(inputs, prompt, whole) if inputs.rows == "shared" else 1
    width = prompt + per_row * whole
    rows = inputs.prompts * -(-inputs.group // per_row)
    tokens = rows * prompt + inputs.sequences * whole
    ranks = inputs.learner_ranks
    if inputs.rows == "packed":
        micro = tokens / ranks / inputs.token_budget
    else:
        micro = rows / ranks / max(1, int(inputs.token_budget // width))
    return Workload(prompt, response, observation, width, per_row, tokens, max(inputs.mini_batches, -int(-micro // 1)))


def peak_tokens(inputs: Inputs, load: Workload) -> float:
    """Tokens of the largest micro-batch: the budget, or the longest sequence, or all there are."""
    longest = min(inputs.max_length, inputs.prompt_limit + inputs.response_limit + inputs.observation_limit)
    rows = max(1, int(inputs.token_budget // load.row_width))
    filled = inputs.token_budget if inputs.rows == "packed" else rows * load.row_width
    return min(max(filled, longest), load.learner_tokens / inputs.learner_ranks / inputs.mini_batches)


def _responses_per_row(inputs: Inputs, prompt: float, response: float) -> int:
    """Responses that share a prompt's row, by the rule of algo.batch: as long as joining costs less than a new row."""
    alone = prompt + response
    count, width = 1, alone
    while count < inputs.group:
        joined = width + response
        cost = response + (joined**2 - width**2) / ATTENTION_BREAK_EVEN
        if joined > inputs.token_budget or cost >= alone + alone**2 / ATTENTION_BREAK_EVEN:
            break
        count, width = count + 1, joined
    return count
