"""RunConfig: a whole run, and the sections without a file of their own."""

from __future__ import annotations

import hashlib
import json

from pydantic import Field, model_validator

from gxpo_trainer.config.base import Settings
from gxpo_trainer.config.data import DataConfig
from gxpo_trainer.config.environment import EnvironmentConfig
from gxpo_trainer.config.evaluation import EvaluationConfig
from gxpo_trainer.config.learner import LearnerConfig
from gxpo_trainer.config.model import ModelConfig
from gxpo_trainer.config.placement import PlacementConfig
from gxpo_trainer.config.rollout import RolloutConfig
from gxpo_trainer.config.timeouts import TimeoutsConfig
from gxpo_trainer.config.verifier import VerifierConfig


class CheckpointConfig(Settings):
    """What is saved and kept."""

    every_steps: int = Field(10, ge=0, description="0: only at the end.")
    keep_last: int = Field(2, ge=1, description="Newest checkpoints to keep.")
    keep_best: int = Field(1, ge=0, description="Best by eval/average/pass@1, kept in addition to the newest.")


class DiagnosticsConfig(Settings):
    """Measurements that cost extra passes, which are counted separately."""

    trajectory_every: int = Field(0, ge=0, description="Steps between true K-step trajectories; 0: never.")
    noise_floor: bool = Field(False, description="Repeat a gradient at the same point with each trajectory.")


class BudgetConfig(Settings):
    """The first bound that is reached ends the run cleanly."""

    steps: int | None = Field(None, description="Training steps.")
    backward_passes: int | None = Field(None, description="Full-batch gradients, without repeated and diagnostic ones.")
    hours: float | None = Field(None, description="Training time without evaluation, diagnostics, checkpoints.")
    tokens: int | None = Field(None, description="Sampled tokens.")

    @model_validator(mode="after")
    def _some_and_positive(self) -> BudgetConfig:
        bounds = {name: getattr(self, name) for name in type(self).model_fields}
        for name, value in bounds.items():
            if value is not None and not value > 0:
                raise ValueError(f"{name} = {value} leaves nothing to train; set it above 0 or remove it")
        if all(value is None for value in bounds.values()):
            raise ValueError("no bound is set; set one of steps, backward_passes, hours, tokens")
        return self


class RunConfig(Settings):
    """A whole run."""

    name: str = Field("run", min_length=1, max_length=200, description="Display name; need not be unique.")
    seed: int = Field(0, ge=0, description="Data order, sampling and generated problems.")
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    verifier: VerifierConfig = VerifierConfig()
    learner: LearnerConfig = LearnerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    diagnostics: DiagnosticsConfig = DiagnosticsConfig()
    budget: BudgetConfig = BudgetConfig(steps=40)
    placement: PlacementConfig = PlacementConfig()
    timeouts: TimeoutsConfig = TimeoutsConfig()

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        if self.rollout.max_new_tokens >= self.model.max_length:
            raise ValueError(
                f"rollout.max_new_tokens = {self.rollout.max_new_tokens} leaves no room for a prompt in "
                f"model.max_length = {self.model.max_length}; lower the first or raise the second"
            )
        if self.rollout.max_new_tokens + self.environment.observation_tokens >= self.model.max_length:
            raise ValueError(
                f"rollout.max_new_tokens = {self.rollout.max_new_tokens} and {self.environment.observation_tokens} "
                "tokens of environment.max_observation_tokens in every turn but the last leave no room for a prompt in "
                f"model.max_length = {self.model.max_length}; lower environment.max_turns or "
                "environment.max_observation_tokens, or raise model.max_length"
            )
        if not self.environment.multi_turn and any(reward.name == "environment" for reward in self.verifier.rewards):
            raise ValueError(
                f'verifier.rewards: environment is always 0 with environment.name = "{self.environment.name}"; remove '
                "the component or choose an environment"
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
        if self.rollout.async_depth and self.placement.colocate is True:
            raise ValueError(
                f"rollout.async_depth = {self.rollout.async_depth} samples while the learner updates, which "
                "placement.colocate = true rules out on shared devices; set placement.colocate = false, or "
                "rollout.async_depth = 0"
            )
        return self

    @property
    def compares_in_fp32(self) -> bool:
        """Whether sampler and learner both compute in fp32, so that their log-probabilities agree closely."""
        return self.learner.precision == "fp32" and self.rollout.dtype != "bfloat16"

    @property
    def open_sequences(self) -> int:
        """Sequences that one engine is given at a time: those that wait for their environment take no place in it."""
        return self.rollout.max_num_seqs * (2 if self.environment.multi_turn else 1)

    def gap_limits(self) -> tuple[float, float]:
        """Limits of the log-prob gap between sampler and learner: the mean ends a run, the largest warns."""
        mean, largest = (1e-5, 1e-3) if self.compares_in_fp32 else (0.05, 5.0)
        return self.rollout.logprob_gap_mean_limit or mean, self.rollout.logprob_gap_max_limit or largest

    def sha256(self) -> str:
        """Hash of everything that can change a result; `name` and `timeouts` are left out."""
        body = self.model_dump(mode="json", exclude={"name", "timeouts"})
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
