"""Everything a plan depends on: the model's shape, what its settings mean for it (`Inputs`), and the tokens of a step.

Shapes are those of decoder-only models with gated MLPs, dense or
with experts. Biases and the norms of queries and keys are counted; rotary embeddings have no parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from gxpo_trainer.config import RunConfig
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
            # Phi-3's fused projections.
            "qkv_proj": self.hidden + self.query_width + 2 * self.kv_width,
            "gate_up_proj": self.hidden + 2 * self.intermediate,
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
        # transformers 4 did not write it where it was its default, which is that of Gemma alone.
        tied=bool(body.get("tie_word_embeddings", kind.startswith("gemma"))),
        experts=experts,
        active_experts=number("num_experts_per_tok", 1) if experts > 1 else 1,
        shared_intermediate=number("shared_expert_intermediate_size", 0) if experts > 1 else 0,
        attention_bias=bool(body.get("attention_bias", kind in ("qwen2", "qwen2_moe"))),
        head_norms=kind in ("qwen3", "qwen3_moe", "gemma3_text"),
    )


def read_shape(model_path: str, setting: str = "model.path") -> ModelShape:
    """The shape of a setting's model: a starter policy, a folder, or a hub model that this package knows.

    Never contacts a hub. Raises ConfigError for a folder without a readable config.json and for another hub name.
    """
    known = known_config(model_path)
    if known is None:
        return read_folder(folder_of(model_path), model_path, setting)
    return shape_of(known, f"{setting} = {model_path!r}")


def read_folder(folder: Path, model_path: str, setting: str = "model.path") -> ModelShape:
    """The shape in a folder's config.json. Raises ConfigError naming the setting and `model_path`, its value."""
    where = f"{setting} = {model_path!r}"
    if not folder.is_dir():
        raise ConfigError(f"{where} is not a folder here, and its config is unknown; use a local copy of the model")
    return shape_of(read_config(folder, model_path, setting), where)


Rows = Literal["padded", "shared", "packed"]


@dataclass(frozen=True, slots=True)
class Inputs:
    """One run on one kind of device.

    config: without engines where nothing is sampled. num_devices: that there are; on a host without GPUs 1.
    teacher_parameters: 0 without a teacher.
    """

    config: RunConfig
    shape: ModelShape
    device: Device
    num_devices: int
    teacher_parameters: int = 0

    def updated(self, **sections: Mapping[str, Any]) -> Inputs:
        """The same with other settings; see RunConfig.updated."""
        return replace(self, config=self.config.updated(**sections))

    @property
    def on_gpu(self) -> bool:
        return self.device.kind == "gpu"

    @property
    def item(self) -> int:
        """Bytes of a parameter in the forward pass."""
        return 2 if self.config.learner.precision == "bf16" else 4

    @property
    def sampler_item(self) -> int:
        """Bytes of a parameter in the sampler."""
        return {"float32": 4, "bfloat16": 2}.get(self.config.rollout.dtype, self.item)

    @property
    def sampled(self) -> bool:
        """Whether the policy samples the responses of a step."""
        return self.config.rollout.source != "dataset"

    @property
    def group(self) -> int:
        """Responses to a prompt."""
        return self.config.rollout.samples_per_prompt if self.sampled else 1

    @property
    def sequences(self) -> int:
        """Samples of a step."""
        return self.config.rollout.prompts_per_step * self.group

    @property
    def prompt_limit(self) -> int:
        """Most tokens of a prompt: what is set, or what the longest response leaves."""
        left = self.config.model.max_length - self.config.rollout.max_new_tokens
        return min(self.config.data.max_prompt_tokens, left - self.config.environment.observation_tokens)

    @property
    def rows(self) -> Rows:
        """The layout of rows: what is set; for "auto" shared prompts on a CPU, on a GPU packed rows in bf16."""
        learner = self.config.learner
        if learner.packing != "auto":
            return learner.packing
        if not self.on_gpu:
            return "shared"
        dense = self.config.model.attention in ("sdpa", "eager")
        return "packed" if learner.precision == "bf16" and not dense else "padded"

    @property
    def checkpointing(self) -> bool:
        """Whether the backward pass recomputes activations."""
        return self.config.model.recomputes_activations(self.shape.parameters)

    @property
    def trainable(self) -> int:
        """Parameters that the optimizer moves."""
        lora = self.config.learner.lora
        return self.shape.adapter_parameters(lora.rank, lora.target_modules) if lora else self.shape.parameters

    @property
    def parameters(self) -> int:
        """Of the policy, adapters included."""
        return self.shape.parameters + (self.trainable if self.config.learner.lora else 0)

    @property
    def num_moments(self) -> int:
        """State tensors of the optimizer."""
        optimizer = self.config.learner.optimizer
        return 2 if optimizer.name == "adamw" else int(optimizer.momentum > 0)

    @property
    def reference_parameters(self) -> int:
        """Of the teacher, or of the KL term's start policy; 0 without either."""
        return self.teacher_parameters or (self.shape.parameters if self.config.learner.loss.kl_beta > 0 else 0)

    @property
    def shard(self) -> int:
        """Trainable parameters whose masters, gradients and moments a rank holds."""
        ranks = self.config.placement.learner_ranks if self.config.learner.zero_stage else 1
        return -(-self.trainable // ranks)

    @property
    def shared(self) -> bool:
        """Whether learner ranks and samplers are on the same devices, one rank for each device of a sampler."""
        if not self.on_gpu:
            return True
        placement = self.config.placement
        too_few = self.num_devices < placement.num_gpus(colocated=False)
        return placement.can_colocate and (placement.colocate is True or too_few)

    @property
    def devices_needed(self) -> int:
        return self.config.placement.num_gpus(colocated=self.shared) if self.on_gpu else 1


def inputs_of(
    config: RunConfig,
    shape: ModelShape,
    device: Device,
    num_devices: int | None = None,
    teacher: ModelShape | None = None,
) -> Inputs:
    """The inputs of a run. num_devices: None for the fewest that its placement can use. teacher: its shape, None to
    read it.

    Raises ConfigError for a `placement.tensor_parallel` that does not divide the model's heads, and for a teacher of
    unknown shape.
    """
    config = config.without_idle_engines()
    placement = config.placement
    uneven = uneven_split(shape.heads, shape.kv_heads, placement.tensor_parallel, repr(config.model.path))
    if uneven is not None:
        raise ConfigError(uneven)
    asked = num_devices or placement.num_gpus(colocated=placement.can_colocate)
    if teacher is None and config.teacher is not None:
        teacher = read_shape(config.teacher.path, "teacher.path")
    asked = asked if device.kind == "gpu" else 1
    return Inputs(config, shape, device, asked, teacher.parameters if teacher else 0)


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
    rollout, ranks = inputs.config.rollout, inputs.config.data_ranks
    budget = inputs.config.learner.micro_batch_tokens
    prompt = max(1.0, inputs.prompt_limit * assumed.prompt_fraction)
    response = max(1.0, rollout.max_new_tokens * (1.0 if rollout.ignore_eos else assumed.response_fraction))
    observation = inputs.config.environment.observation_tokens * assumed.response_fraction
    whole = response + observation
    per_row = _responses_per_row(inputs.group, budget, prompt, whole) if inputs.rows == "shared" else 1
    width = prompt + per_row * whole
    rows = rollout.prompts_per_step * -(-inputs.group // per_row)
    tokens = rows * prompt + inputs.sequences * whole
    micro = tokens / ranks / budget if inputs.rows == "packed" else rows / ranks / max(1, int(budget // width))
    micro_batches = max(inputs.config.learner.mini_batches, -int(-micro // 1))
    return Workload(prompt, response, observation, width, per_row, tokens, micro_batches)


def peak_tokens(inputs: Inputs, load: Workload) -> float:
    """Tokens of the largest micro-batch, the budget, or the longest sequence, or all there are; of ranks that are
    parallel over sequences the share of one."""
    learner, budget = inputs.config.learner, inputs.config.learner.micro_batch_tokens
    longest = inputs.prompt_limit + inputs.config.rollout.max_new_tokens + inputs.config.environment.observation_tokens
    filled = budget if inputs.rows == "packed" else max(1, int(budget // load.row_width)) * load.row_width
    most = load.learner_tokens / inputs.config.data_ranks / learner.mini_batches
    return min(max(filled, longest), most) / learner.sequence_parallel


def _responses_per_row(group: int, budget: int, prompt: float, response: float) -> int:
    """Responses that share a prompt's row, by the rule of algo.packing: while joining costs less than a new row."""
    alone = prompt + response
    count, width = 1, alone
    while count < group:
        joined = width + response
        cost = response + (joined**2 - width**2) / ATTENTION_BREAK_EVEN
        if joined > budget or cost >= alone + alone**2 / ATTENTION_BREAK_EVEN:
            break
        count, width = count + 1, joined
    return count
