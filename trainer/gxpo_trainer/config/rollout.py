"""Settings of sampling."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from gxpo_trainer.config.base import Settings

LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 2.0
"""vLLM samples at 0.01 where a request says less, and refuses more than 2."""


class RolloutConfig(Settings):
    """Sampling by vLLM."""

    prompts_per_step: int = Field(64, ge=1, description="Prompts in one training step.")
    samples_per_prompt: int = Field(8, description="Responses per prompt: the group.")
    max_new_tokens: int = Field(48, ge=1, description="Longest response.")
    ignore_eos: bool = Field(False, description="Continue to max_new_tokens after an end token, for measurements.")
    temperature: float = Field(
        1.0,
        ge=LOWEST_TEMPERATURE,
        le=HIGHEST_TEMPERATURE,
        description="Sampling temperature; the learner's policy uses the same.",
    )
    top_p: float = Field(1.0, gt=0, le=1, description="Must be 1: the learner's log-probabilities are untruncated.")
    deterministic: bool = Field(
        False, description="One seed per sample, so that a resumed run draws the samples of an uninterrupted one."
    )
    logprob_gap_mean_limit: float | None = Field(
        None, gt=0, description="Stop when the mean gap to the learner exceeds this; none: 1e-5 in fp32, 0.05 in bf16."
    )
    logprob_gap_max_limit: float | None = Field(
        None, gt=0, description="Warn when the largest gap exceeds this; none: 1e-3 in fp32, 5 in bf16."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="Sampler weights; auto: the learner's.")
    gpu_memory_utilization: float = Field(0.4, gt=0, lt=1, description="GPU only: share of memory for the sampler.")
    cpu_kv_cache_gib: int = Field(1, ge=1, description="CPU only: KV cache in GiB.")
    max_num_seqs: int = Field(512, ge=1, description="Maximum number of sequences sampled at the same time.")
    enforce_eager: bool = Field(True, description="No graph capture; false is faster on GPUs after a longer start.")
    async_depth: int = Field(
        0,
        ge=0,
        description="Steps that sampling may run ahead of the learner: weights as old as version t − 1 − async_depth "
        "sample the batch of step t. 0: strictly on-policy, the loop of the paper.",
    )
    update_in_flight: bool = Field(
        False,
        description="Engines take new weights between decoding steps and go on with their requests; false: once all "
        "requests under way are finished. Needs async_depth ≥ 1.",
    )

    @field_validator("samples_per_prompt")
    @classmethod
    def _a_group_has_two(cls, value: int) -> int:
        if value < 2:
            raise ValueError("must be at least 2: an advantage compares the samples of one group; set it to 2 or more")
        return value

    @model_validator(mode="after")
    def _in_flight_needs_depth(self) -> RolloutConfig:
        if self.update_in_flight and not self.async_depth:
            raise ValueError(
                "update_in_flight = true with async_depth = 0: no request is under way when the weights change; "
                "set async_depth ≥ 1 or update_in_flight = false"
            )
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
