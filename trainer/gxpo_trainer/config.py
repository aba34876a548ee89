"""RunConfig: every setting of a run, typed, documented and checked once, at the edge.

Free of torch, so that `gxpo config --check FILE` answers in under half a second. An unknown or
contradictory setting is an error that names it; what depends on the machine (folders, devices) is checked by
`train.prepare` before anything starts. The settings of the rules are in `config_rules.py`, those of the problems in
`config_data.py`; all are imported from here. Files and presets are read in `config_io.py`.
"""

from __future__ import annotations

import hashlib
import json
from typing import Literal

from pydantic import Field, field_validator, model_validator

from gxpo_trainer.config_base import Fraction, Settings
from gxpo_trainer.config_data import DataConfig, EvaluationConfig, RewardConfig, VerifierConfig
from gxpo_trainer.config_rules import GateConfig, GrpoRule, GxpoRule, RuleConfig, SfpoGateConfig, SfpoRule

__all__ = [
    "BudgetConfig",
    "CheckpointConfig",
    "DataConfig",
    "DiagnosticsConfig",
    "EvaluationConfig",
    "GateConfig",
    "GrpoRule",
    "GxpoRule",
    "LearnerConfig",
    "LoraConfig",
    "LossConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PlacementConfig",
    "RewardConfig",
    "RolloutConfig",
    "RuleConfig",
    "RunConfig",
    "Settings",
    "SfpoGateConfig",
    "SfpoRule",
    "VerifierConfig",
]


class LoraConfig(Settings):
    """Low-rank adapters by PEFT; the rule then acts on the adapter's parameters only."""

    rank: int = Field(16, ge=1, description="Rank of the adapter matrices.")
    alpha: float = Field(32.0, gt=0, description="Scaling; the adapter's output is multiplied by alpha / rank.")
    dropout: Fraction = Field(0.0, description="Must be 0: two passes of a rule must see the same function.")
    target_modules: tuple[str, ...] = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj"), description="Names of the linear layers that get an adapter."
    )

    @field_validator("dropout")
    @classmethod
    def _no_dropout(cls, value: float) -> float:
        if value != 0.0:
            raise ValueError("must be 0: with dropout two gradients of one batch differ by chance; set it to 0")
        return value


class ModelConfig(Settings):
    """The policy."""

    path: str = Field(
        "starter",
        description="`starter` (the embedded policy), a local transformers folder, or a hub name.",
    )
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model.")
    max_length: int = Field(4096, ge=8, description="Longest prompt plus response, in tokens.")
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = Field(
        "auto", description="Attention kernel of the learner; auto is sdpa."
    )
    gradient_checkpointing: bool = Field(False, description="Recompute activations in the backward pass.")


class RolloutConfig(Settings):
    """Sampling by vLLM."""

    prompts_per_step: int = Field(64, ge=1, description="Prompts in one training step.")
    samples_per_prompt: int = Field(8, description="Responses per prompt: the group.")
    max_new_tokens: int = Field(48, ge=1, description="Longest response.")
    ignore_eos: bool = Field(False, description="Go on to max_new_tokens past an end token, for measurements.")
    temperature: float = Field(1.0, gt=0, description="Sampling temperature; the learner's policy uses the same.")
    top_p: float = Field(1.0, gt=0, le=1, description="Must be 1: the learner's log-probabilities are untruncated.")
    deterministic: bool = Field(
        False, description="One seed a sample, so that a resumed run draws what the uninterrupted run would have."
    )
    logprob_gap_mean_limit: float | None = Field(
        None, gt=0, description="Stop when the mean gap to the learner exceeds this; none: 1e-5 in fp32, 0.05 in bf16."
    )
    logprob_gap_max_limit: float | None = Field(
        None, gt=0, description="Stop when the largest gap exceeds this; none: 1e-3 in fp32, 5 in bf16."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="Sampler weights; auto: the learner's.")
    gpu_memory_utilization: float = Field(0.4, gt=0, lt=1, description="GPU only: share of memory for the sampler.")
    cpu_kv_cache_gib: int = Field(1, ge=1, description="CPU only: KV cache in GiB.")
    max_num_seqs: int = Field(512, ge=1, description="Most sequences that are sampled at the same time.")
    enforce_eager: bool = Field(True, description="No graph capture; false is faster on GPUs after a longer start.")
    async_depth: Literal[0] = Field(0, description="0: strictly on-policy, the loop of the paper.")

    @field_validator("samples_per_prompt")
    @classmethod
    def _a_group_has_two(cls, value: int) -> int:
        if value < 2:
            raise ValueError("must be at least 2: an advantage compares the samples of one group; set it to 2 or more")
        return value

    @field_validator("top_p")
    @classmethod
    def _untruncated(cls, value: float) -> float:
        if value != 1.0:
            raise ValueError("must be 1.0: with nucleus sampling the ratio to the learner's policy is not defined")
        return value


class LossConfig(Settings):
    """The clipped surrogate of GRPO and the family's options."""

    clip_low: float = Field(0.2, ge=0, description="ε_low.")
    clip_high: float = Field(0.2, ge=0, description="ε_high; above ε_low it is clip-higher.")
    kl_beta: float = Field(0.0, ge=0, description="β of the KL term to the frozen start policy.")
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum"] = Field(
        "token_mean", description="Mean over tokens; tokens then sequences; sum over max_new_tokens (Dr. GRPO)."
    )
    advantage_std: bool = Field(True, description="Divide by the group's std; false leaves it out (Dr. GRPO).")
    advantage_epsilon: float = Field(1e-6, gt=0, description="ε added to the std.")
    zero_variance: Literal["keep", "drop", "resample"] = Field(
        "keep", description="Groups whose rewards are all equal: kept (no signal), left out, or drawn again."
    )
    resample_limit: int = Field(3, ge=1, description="resample only: most extra rounds of sampling a step.")
    mask_truncated: bool = Field(False, description="Leave responses that were cut at the limit out of the loss.")
    importance_cap: float | None = Field(
        None, gt=0, description="Truncated importance sampling for the gap between sampler and learner; none: off."
    )


class OptimizerConfig(Settings):
    """The base optimizer and its schedule, counted in training steps."""

    name: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = Field(1e-5, gt=0, description="η.")
    betas: tuple[float, float] = Field((0.9, 0.999), description="AdamW only.")
    epsilon: float = Field(1e-8, gt=0, description="AdamW only.")
    momentum: float = Field(0.0, ge=0, lt=1, description="SGD only.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled for AdamW, added to the gradient for SGD.")
    max_grad_norm: float = Field(1.0, gt=0, description="Clip the global gradient norm; inf turns it off.")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="After the warm-up.")
    warmup_steps: int = Field(0, ge=0, description="Training steps of linear warm-up.")


class LearnerConfig(Settings):
    """The DeepSpeed learner."""

    rule: RuleConfig = GxpoRule()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    precision: Literal["fp32", "bf16"] = Field("fp32", description="Of the forward and backward pass.")
    zero_stage: Literal[0, 1, 2, 3] = Field(0, description="DeepSpeed ZeRO stage.")
    lora: LoraConfig | None = Field(None, description="Train adapters instead of all weights.")
    mini_batches: int = Field(1, ge=1, description="Rule steps a rollout batch, each on a part of it.")
    token_budget: int = Field(4096, ge=16, description="Most tokens (padding included) in one micro-batch.")
    packing: Literal["auto", "padded", "shared", "packed"] = Field(
        "auto",
        description="padded: sorted rows; shared: a prompt once for its short responses; "
        "packed: one row, variable-length attention. auto: shared on CPU, packed on GPU.",
    )

    @model_validator(mode="after")
    def _supported(self) -> LearnerConfig:
        if self.precision == "bf16" and self.zero_stage == 0:
            raise ValueError(
                'precision = "bf16" with zero_stage = 0 keeps its fp32 masters where no rule can reach them; '
                "set zero_stage = 1, 2 or 3"
            )
        return self


class CheckpointConfig(Settings):
    """What is saved and kept."""

    every_steps: int = Field(10, ge=0, description="0: only at the end.")
    keep_last: int = Field(2, ge=1, description="Newest checkpoints to keep.")
    keep_best: int = Field(1, ge=0, description="Best by eval/average/pass@1, kept beside the newest.")


class DiagnosticsConfig(Settings):
    """Measurements that cost extra passes, counted apart."""

    trajectory_every: int = Field(0, ge=0, description="Steps between true K-step trajectories; 0: never.")
    noise_floor: bool = Field(False, description="Repeat a gradient at the same point with each trajectory.")


class BudgetConfig(Settings):
    """The first bound that is reached ends the run cleanly."""

    steps: int | None = Field(None, description="Training steps.")
    backward_passes: int | None = Field(None, description="Full-batch gradients, repeats and diagnostics left out.")
    hours: float | None = Field(None, description="Training time without evaluation, diagnostics, checkpoints.")
    tokens: int | None = Field(None, description="Sampled tokens.")

    @model_validator(mode="after")
    def _some_and_positive(self) -> BudgetConfig:
        bounds = {name: getattr(self, name) for name in type(self).model_fields}
        for name, value in bounds.items():
            if value is not None and not value > 0:
                raise ValueError(f"{name} = {value} leaves nothing to train; set it above 0 or leave it out")
        if all(value is None for value in bounds.values()):
            raise ValueError("no bound is set; set one of steps, backward_passes, hours, tokens")
        return self


class PlacementConfig(Settings):
    """Which processes run where. Logical Ray CPUs are fractional and their sum must fit the machine."""

    learner_ranks: int = Field(1, ge=1, description="DeepSpeed ranks.")
    device: Literal["auto", "cpu", "gpu"] = Field("auto", description="auto: gpu where one is visible.")
    learner_cpus: float = Field(1.0, gt=0, description="Logical CPUs a rank.")
    sampler_cpus: float = Field(0.75, gt=0, description="Logical CPUs of the sampler.")
    verifier_cpus: float = Field(0.25, gt=0, description="Logical CPUs of the verifier.")
    learner_threads: int | None = Field(
        None, ge=1, description="Torch threads a rank; none: the cores divided by ranks."
    )
    sampler_threads: int | None = Field(None, ge=1, description="Threads of the sampler; none: all cores.")
    tensor_parallel: int = Field(1, ge=1, description="GPUs a sampler.")
    ray_address: str | None = Field(None, description="Address of a running Ray; none: one of our own.")
    strategy: Literal["pack", "split"] = Field(
        "pack",
        description="On several nodes. pack: on as few as possible; split: learner and sampler on different ones.",
    )
    weight_transport: Literal["auto", "shared_memory", "object_store"] = Field(
        "auto",
        description="How weights reach the sampler. auto: shared_memory on one node, object_store (Ray's) between two.",
    )
    wait_s: float = Field(120.0, ge=0, description="How long a run waits for nodes that are still joining its Ray.")
    max_restarts: int = Field(3, ge=0, description="Recoveries of a learner from its checkpoint before giving up.")


class RunConfig(Settings):
    """A whole run."""

    name: str = Field("run", min_length=1, max_length=200, description="For people; need not be unique.")
    seed: int = Field(0, ge=0, description="Data order, sampling and generated problems.")
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    verifier: VerifierConfig = VerifierConfig()
    learner: LearnerConfig = LearnerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    diagnostics: DiagnosticsConfig = DiagnosticsConfig()
    budget: BudgetConfig = BudgetConfig(steps=40)
    placement: PlacementConfig = PlacementConfig()

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        if self.rollout.max_new_tokens >= self.model.max_length:
            raise ValueError(
                f"rollout.max_new_tokens = {self.rollout.max_new_tokens} leaves no room for a prompt in "
                f"model.max_length = {self.model.max_length}; lower the first or raise the second"
            )
        if self.learner.mini_batches > self.rollout.prompts_per_step:
            raise ValueError(
                f"learner.mini_batches = {self.learner.mini_batches} exceeds rollout.prompts_per_step = "
                f"{self.rollout.prompts_per_step}; a mini-batch needs at least one prompt"
            )
        if self.learner.optimizer.schedule != "constant" and self.budget.steps is None:
            raise ValueError(
                f'learner.optimizer.schedule = "{self.learner.optimizer.schedule}" falls to 0 at the last step; '
                'set budget.steps, or schedule = "constant"'
            )
        if self.placement.learner_ranks > self.rollout.prompts_per_step // self.learner.mini_batches:
            raise ValueError("placement.learner_ranks exceeds the prompts of a mini-batch; lower it")
        return self

    def gap_limits(self) -> tuple[float, float]:
        """Largest mean and largest single log-prob gap between sampler and learner that a run may have."""
        exact = self.learner.precision == "fp32" and self.rollout.dtype != "bfloat16"
        mean, largest = (1e-5, 1e-3) if exact else (0.05, 5.0)
        return self.rollout.logprob_gap_mean_limit or mean, self.rollout.logprob_gap_max_limit or largest

    def sha256(self) -> str:
        """Hash of everything that can change a result; `name` is left out."""
        body = self.model_dump(mode="json", exclude={"name"})
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
