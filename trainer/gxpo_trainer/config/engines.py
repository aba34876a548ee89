"""Settings of the policy, of sampling, and of placement: which processes run where, how weights reach the engines."""

from __future__ import annotations

import math
from itertools import product
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, FiniteFloat, field_validator, model_validator

from gxpo_trainer.config.base import (
    MOST_PROCESSES,
    MOST_SECONDS,
    MOST_TOKENS,
    Processes,
    Settings,
    Steps,
    Temperature,
    Tokens,
)

RANDOM_STARTER = "starter-random"
STARTER_POLICIES = {
    "starter": "starter_policy",
    "starter-tools": "starter_tools_policy",
    "starter-skill": "starter_skill_policy",
    RANDOM_STARTER: "starter_policy",
}
"""Embedded policies, and the folder of each in the package `learner`; of the random one without its weights."""
STARTER_TOKENS = {"starter": 48, "starter-tools": 48, "starter-skill": 80, RANDOM_STARTER: 48}
"""Tokens that the longest answer of an embedded policy needs."""
CHECKPOINTING_FROM = 1_000_000_000
"""Parameters from which `gradient_checkpointing = "auto"` recomputes where the planner does not know the device."""
TOKEN_BUDGET = 4096
"""Tokens of a micro-batch for `learner.token_budget = "auto"` on CPUs and on devices that the planner does not know."""

# Sizes of the engines that a plan of memory and time counts as well.
GRADIENT_BUCKET = 50_000_000
"""Most elements DeepSpeed reduces at once. Its default of 5e8 reserves 2 GB of buffer whatever the model's size."""
WEIGHT_BUCKET_BYTES = 512 * 2**20
"""Largest bucket of a sync. Two are in use at a time: one is filled while the engines load the other."""
LOGITS_CHUNK = 2**25
"""Maximum number of logits (tokens × vocabulary) in memory, per copy, on a CPU: 128 MB in fp32."""
LOGITS_COPIES = 3
"""fp32 copies of a chunk of logits at a time."""


def logits_chunk(device_bytes: int) -> int:
    """Maximum number of logits in memory, per copy. device_bytes: memory of the GPU; 0 for a CPU, or where unknown.

    A power of two, of which all copies take at most 1/24 of the GPU: 2²⁸ on 80 GB. The head's gradient is read and
    written once a chunk, in fp32: with a vocabulary of 152 k that is every 1,766 tokens, and every 220 with 2²⁵.
    """
    elements = device_bytes // (24 * 4 * LOGITS_COPIES)
    return min(max(1 << elements.bit_length() - 1, LOGITS_CHUNK), 2**28) if elements else LOGITS_CHUNK


ATTENTION_BREAK_EVEN = 1024
"""Row width at which dense attention costs about as much as the rest of the model; `shared` fills rows by it."""


class TeacherConfig(Settings):
    """The frozen model that scores the policy's responses, for rollout.source = "teacher". Off unless the run file has
    this section."""

    path: str = Field(description="As model.path; its vocabulary must be that of the policy.")
    revision: str | None = Field(None, description="As model.revision.")


class ModelConfig(Settings):
    """The policy."""

    path: str = Field(
        "starter",
        description="`starter`, `starter-tools`, `starter-skill` or `starter-random` (embedded policies, the last with "
        "random weights), a local transformers folder, or a hub name.",
    )
    revision: str | None = Field(None, description="Hub names only: branch, tag or commit; a run holds its commit.")
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model.")
    max_length: int = Field(4096, ge=8, le=MOST_TOKENS, description="Longest prompt plus response, in tokens.")
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2", "varlen"] = Field(
        "auto",
        description="Of the learner. varlen: torch's variable-length kernel. auto: sdpa; on GPUs in bf16 "
        "flash_attention_2 where it is installed, else varlen.",
    )
    kernels: Literal["auto", "eager", "liger"] = Field(
        "auto",
        description="Of the learner's norms, rotary embeddings and gated MLPs. liger: Liger's, which fuse their "
        "operations, on GPUs. auto: liger on GPUs in bf16 for the architectures that have them, else eager.",
    )
    gradient_checkpointing: bool | Literal["auto"] = Field(
        "auto",
        description="Recompute activations in the backward pass. auto: on a GPU where they do not fit, by the planner; "
        "elsewhere from 1 billion parameters on.",
    )

    def recomputes_activations(self, num_parameters: int) -> bool:
        """Whether the backward pass of a model of this size recomputes activations."""
        if self.gradient_checkpointing == "auto":
            return num_parameters >= CHECKPOINTING_FROM
        return self.gradient_checkpointing


class RolloutConfig(Settings):
    """Sampling by vLLM."""

    source: Literal["sampled", "dataset", "teacher"] = Field(
        "sampled",
        description="What a step learns from. sampled: responses of the policy and their rewards; dataset: the "
        "completions of data.completion_field, by cross-entropy (supervised fine-tuning); teacher: responses of the "
        "policy, each token of which `teacher` scores (on-policy distillation).",
    )
    prompts_per_step: int = Field(64, ge=1, le=1_000_000, description="Prompts of a step; of a data set its rows.")
    samples_per_prompt: int = Field(8, ge=2, le=100_000, description="Responses per prompt: the group.")
    max_new_tokens: Tokens = Field(48, description="Longest response.")
    ignore_eos: bool = Field(False, description="Continue to max_new_tokens after an end token, for measurements.")
    temperature: Temperature = Field(1.0, description="Sampling temperature; the learner's policy uses the same.")
    top_p: float = Field(1.0, gt=0, le=1, description="Must be 1: the learner's log-probabilities are untruncated.")
    deterministic: bool = Field(False, description="One seed per sample: a resumed run samples as an unbroken one.")
    logprob_gap_mean_limit: float | None = Field(
        None, gt=0, description="Stop when the mean gap to the learner exceeds this; none: 1e-5 in fp32, 0.05 in bf16."
    )
    logprob_gap_max_limit: float | None = Field(
        None, gt=0, description="Warn when the largest gap exceeds this; none: 1e-3 in fp32, 5 in bf16."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="Sampler weights; auto: the learner's.")
    gpu_memory_utilization: Annotated[float, Field(gt=0, lt=1)] | Literal["auto"] = Field(
        "auto",
        description="GPU only: share of memory for the sampler. auto: 0.4 of a GPU that it shares with the learner, "
        "0.9 of its own.",
    )
    cpu_kv_cache_gib: int = Field(1, ge=1, le=65_536, description="CPU only: KV cache in GiB.")
    max_num_seqs: int = Field(512, ge=1, le=1_000_000, description="Maximum number of sequences sampled at a time.")
    enforce_eager: bool | Literal["auto"] = Field(
        "auto", description="No graph capture. auto: graphs on GPUs, which decode faster after a longer start."
    )
    async_depth: int = Field(
        0,
        ge=0,
        le=1000,
        description="Steps that sampling may run ahead of the learner: weights as old as version t − 1 − async_depth "
        "sample the batch of step t. 0: strictly on-policy, the loop of the paper.",
    )
    update_in_flight: bool = Field(
        False,
        description="Engines take new weights between decoding steps and go on with their requests; false: once all "
        "requests under way are finished. Needs async_depth ≥ 1.",
    )

    def memory_share(self, *, shared: bool) -> float:
        """Of a GPU, for the sampler; shared: with a learner rank."""
        if self.gpu_memory_utilization == "auto":
            return 0.4 if shared else 0.9
        return self.gpu_memory_utilization

    def eager(self, device: Literal["cpu", "gpu"]) -> bool:
        """Whether the sampler runs without captured graphs."""
        return device == "cpu" if self.enforce_eager == "auto" else self.enforce_eager

    @model_validator(mode="after")
    def _in_flight_needs_depth(self) -> RolloutConfig:
        if self.update_in_flight and not self.async_depth:
            raise ValueError("update_in_flight = true with async_depth = 0 changes nothing; set async_depth ≥ 1")
        if self.update_in_flight and self.deterministic:
            raise ValueError(
                "update_in_flight = true with deterministic = true: the token at which weights change depends on the "
                "clock; set one of them to false"
            )
        return self

    @field_validator("top_p")
    @classmethod
    def _untruncated(cls, value: float) -> float:
        if value != 1.0:
            raise ValueError("must be 1.0: with nucleus sampling the ratio to the learner's policy is not defined")
        return value


Transport = Literal["shared_memory", "object_store", "nccl", "cuda_ipc"]


def choose_transport(
    requested: Transport | Literal["auto"], device: Literal["cpu", "gpu"], colocated: bool, one_node: bool
) -> Transport:
    """The transport of a run; `auto` takes the fastest that the placement allows.

    one_node: learner and all engines are on one node. Raises ValueError for a transport that cannot work.
    """
    if requested == "auto":
        if device == "gpu":
            return "cuda_ipc" if colocated else "nccl"
        return "shared_memory" if one_node else "object_store"
    why = None
    if requested in ("nccl", "cuda_ipc") and device == "cpu":
        why = 'needs GPUs, but this run uses CPUs; set device = "gpu" where GPUs join later'
    elif requested == "nccl" and colocated:
        why = "needs a GPU for each process, because NCCL rejects duplicate devices; set colocate = false"
    elif requested == "cuda_ipc" and not colocated:
        why = "needs learner and engines on the same GPUs, but each has its own; set colocate = true"
    elif requested == "shared_memory" and not one_node:
        why = 'works within one node, but learner and engines are on different nodes; set strategy = "pack"'
    if why is not None:
        raise ValueError(f'weight_transport = "{requested}" {why}, or weight_transport = "auto"')
    return requested


class CpuShares(NamedTuple):
    """Logical CPUs of each rank, of each engine and of the verifier."""

    learner: float
    sampler: float
    verifier: float


FULL_SHARES = CpuShares(1.0, 0.75, 0.25)
"""What "auto" stands for where it fits."""
_CPU_UNITS = 10_000
"""Ray counts CPUs in ten-thousandths."""
Share = Annotated[FiniteFloat, Field(gt=0, le=1e6)] | Literal["auto"]


class PlacementConfig(Settings):
    """Which processes run where. Logical Ray CPUs are fractional and their sum must fit the machine."""

    learner_ranks: Processes = Field(1, description="DeepSpeed ranks, one GPU each.")
    samplers: Processes = Field(1, description="vLLM engines, one actor each.")
    tensor_parallel: int = Field(1, ge=1, le=1000, description="Devices of an engine; must divide the attention heads.")
    device: Literal["auto", "cpu", "gpu"] = Field(
        "auto",
        description="auto: gpu where this machine, or the Ray of ray_address, has some; an event says which and why. "
        "Set gpu where an autoscaler adds the GPUs.",
    )
    colocate: bool | Literal["auto"] = Field(
        "auto",
        description="true: learner ranks and engines share GPUs, one rank for each device of an engine; false: each "
        "has its own; auto: shared where there are fewer than learner_ranks + samplers × tensor_parallel.",
    )
    learner_cpus: Share = Field("auto", description="Logical CPUs of each rank; auto: 1, or what fits.")
    sampler_cpus: Share = Field("auto", description="Logical CPUs of each engine; auto: 0.75, or what fits.")
    verifier_cpus: Share = Field("auto", description="Logical CPUs of the verifier; auto: 0.25, or what fits.")
    learner_threads: int | None = Field(
        None, ge=1, le=MOST_PROCESSES, description="Torch threads of each rank; none: the cores divided by ranks."
    )
    sampler_threads: int | None = Field(
        None,
        ge=1,
        le=MOST_PROCESSES,
        description="Threads of each device of an engine; none: the cores divided by those devices.",
    )
    ray_address: str | None = Field(None, description="Address of a running Ray; none: start one.")
    strategy: Literal["pack", "split"] = Field(
        "pack",
        description="On several nodes. pack: on as few as possible; split: learner and engines on different ones.",
    )
    weight_transport: Transport | Literal["auto"] = Field(
        "auto",
        description="How weights reach the engines. auto: cuda_ipc on shared GPUs, nccl between separate ones; on CPUs "
        "shared_memory on one node, else object_store (Ray's).",
    )
    wait_s: float = Field(
        600.0, ge=0, le=MOST_SECONDS, description="Longest wait for nodes to join, and for other runs to end."
    )
    max_restarts: Steps = Field(3, description="Recoveries of a learner from its checkpoint before giving up.")

    @property
    def sampler_devices(self) -> int:
        """Devices of all engines together."""
        return self.samplers * self.tensor_parallel

    @property
    def can_colocate(self) -> bool:
        """Whether each device of the engines has exactly one learner rank to share it with."""
        return self.colocate is not False and self.learner_ranks == self.sampler_devices and self.strategy == "pack"

    def cpu_shares(self, available: float = math.inf) -> CpuShares:
        """The shares where there are so many CPUs: "auto" in full, or as much as explicit ones leave room for."""
        given = (self.learner_cpus, self.sampler_cpus, self.verifier_cpus)

        def shares(part: float) -> CpuShares:
            auto = [max(1, math.floor(full * part * _CPU_UNITS)) / _CPU_UNITS for full in FULL_SHARES]
            return CpuShares(*(a if isinstance(share, str) else share for share, a in zip(given, auto, strict=True)))

        whole = self.total_cpus(shares(1.0))
        explicit = self.total_cpus(CpuShares(*(0.0 if isinstance(share, str) else share for share in given)))
        if not explicit < available < whole:
            return shares(1.0)
        return shares((available - explicit) / (whole - explicit))

    def total_cpus(self, shares: CpuShares) -> float:
        """Logical CPUs of the whole run."""
        verifier = shares.verifier if self.samplers else 0.0
        return self.learner_ranks * shares.learner + self.samplers * shares.sampler + verifier

    def num_gpus(self, *, colocated: bool) -> int:
        """GPUs of the whole run on a GPU cluster."""
        return self.learner_ranks if colocated else self.learner_ranks + self.sampler_devices

    @model_validator(mode="after")
    def _consistent(self) -> PlacementConfig:
        if self.colocate is True and not self.can_colocate:
            raise ValueError(
                'colocate = true needs strategy = "pack" and one learner rank for each device of the engines, but '
                f'strategy = "{self.strategy}", learner_ranks = {self.learner_ranks} and samplers × tensor_parallel = '
                f"{self.sampler_devices}; make them equal, or set colocate = false"
            )
        # A transport must work on CPUs or on GPUs, shared or not, as far as the settings leave these open.
        devices: tuple[Literal["cpu", "gpu"], ...] = ("cpu", "gpu") if self.device == "auto" else (self.device,)
        sharing = (True, False) if self.colocate == "auto" and self.can_colocate else (self.colocate is True,)
        refusals = []
        for device, colocated in product(devices, sharing):
            try:
                choose_transport(self.weight_transport, device, colocated, one_node=self.strategy != "split")
                return self
            except ValueError as error:
                refusals.append(error)
        raise refusals[-1]
