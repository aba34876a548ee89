"""Everything a plan depends on, as one record; `inputs_of` is the only place that reads a RunConfig."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gxpo_trainer.config import BudgetConfig, RuleSettings, RunConfig
from gxpo_trainer.config.transport import Transport, choose_transport
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.planner.devices import Device
from gxpo_trainer.planner.heads import uneven_split
from gxpo_trainer.planner.shapes import ModelShape

Rows = Literal["padded", "shared", "packed"]
Reference = Literal["none", "whole", "adapter"]


@dataclass(frozen=True, slots=True)
class Inputs:
    """One run on one kind of device.

    num_devices: that there are; on a host without GPUs 1. colocate: as in the settings. one_node: learner and samplers
    on one node, which sharing devices needs. reference: what the KL term's start policy is: nothing, a model of its
    own, or the policy without its adapter. num_moments: state tensors of the optimizer.
    trainable: parameters that require a gradient. kv_bytes: size of the KV cache where it is set, None where it is
    what `memory_utilization` leaves. response_limit: sampled tokens of a response; observation_limit: those that an
    environment adds to it.
    """

    shape: ModelShape
    device: Device
    num_devices: int
    learner_ranks: int
    samplers: int
    tensor_parallel: int
    colocate: bool | Literal["auto"]
    one_node: bool
    weight_transport: Transport | Literal["auto"]
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
    kv_bytes: int | None
    max_num_seqs: int
    async_depth: int
    rule: RuleSettings
    budget: BudgetConfig
    observation_limit: int = 0

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
    def shard(self) -> int:
        """Trainable parameters whose masters, gradients and moments a rank holds."""
        return self.trainable if self.zero_stage == 0 else -(-self.trainable // self.learner_ranks)

    @property
    def sampler_devices(self) -> int:
        return self.samplers * self.tensor_parallel

    @property
    def separate_devices(self) -> int:
        """Devices that learner ranks and samplers need without sharing any."""
        return self.learner_ranks + self.sampler_devices

    @property
    def shared(self) -> bool:
        """Whether learner ranks and samplers are on the same devices, one rank for each device of a sampler."""
        if not self.on_gpu:
            return True
        possible = self.colocate is not False and self.one_node and self.learner_ranks == self.sampler_devices
        return possible and (self.colocate is True or self.num_devices < self.separate_devices)

    @property
    def transport(self) -> Transport:
        """How weights reach the samplers. Raises ValueError for one that cannot work."""
        shared = self.shared and self.on_gpu
        return choose_transport(self.weight_transport, self.device.kind, shared, self.one_node)

    @property
    def devices_needed(self) -> int:
        if not self.on_gpu:
            return 1
        return self.learner_ranks if self.shared else self.separate_devices


def inputs_of(config: RunConfig, shape: ModelShape, device: Device, num_devices: int | None = None) -> Inputs:
    """The inputs of a run. num_devices: None for the fewest that its placement can use.

    Raises ConfigError for a `placement.weight_transport` that cannot work there, and for a `placement.tensor_parallel`
    that does not divide the model's heads.
    """
    learner, rollout, placement = config.learner, config.rollout, config.placement
    uneven = uneven_split(shape.heads, shape.kv_heads, placement.tensor_parallel, repr(config.model.path))
    if uneven is not None:
        raise ConfigError(uneven)
    on_gpu = device.kind == "gpu"
    lora = learner.lora
    optimizer = learner.optimizer
    observed = config.environment.observation_tokens
    needs_reference = learner.loss.kl_beta > 0
    sampler_fp32 = rollout.dtype == "float32" or (rollout.dtype == "auto" and learner.precision == "fp32")
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
        weight_transport=placement.weight_transport,
        zero_stage=learner.zero_stage,
        precision=learner.precision,
        adapter_rank=lora.rank if lora else None,
        trainable=shape.adapter_parameters(lora.rank, lora.target_modules) if lora else shape.parameters,
        num_moments=2 if optimizer.name == "adamw" else int(optimizer.momentum > 0),
        reference=("adapter" if lora else "whole") if needs_reference else "none",
        checkpointing=config.model.recomputes_activations(shape.parameters),
        token_budget=learner.token_budget,
        rows=_rows(config, on_gpu),
        mini_batches=learner.mini_batches,
        prompts=rollout.prompts_per_step,
        group=rollout.samples_per_prompt,
        prompt_limit=min(config.data.max_prompt_tokens, config.model.max_length - rollout.max_new_tokens - observed),
        response_limit=rollout.max_new_tokens,
        full_responses=rollout.ignore_eos,
        max_length=config.model.max_length,
        sampler_item=4 if sampler_fp32 else 2,
        memory_utilization=rollout.gpu_memory_utilization,
        kv_bytes=None if on_gpu else rollout.cpu_kv_cache_gib * 2**30,
        max_num_seqs=rollout.max_num_seqs,
        async_depth=rollout.async_depth,
        rule=learner.rule,
        budget=config.budget,
        observation_limit=observed,
    )
    try:
        inputs.transport  # noqa: B018
    except ValueError as error:
        raise ConfigError(f"placement: {error}") from None
    return inputs


def _rows(config: RunConfig, on_gpu: bool) -> Rows:
    """The layout of rows: what is set; for "auto" shared prompts on a CPU, on a GPU packed rows in bf16."""
    if config.learner.packing != "auto":
        return config.learner.packing
    if not on_gpu:
        return "shared"
    dense = config.model.attention in ("sdpa", "eager")
    return "packed" if config.learner.precision == "bf16" and not dense else "padded"
