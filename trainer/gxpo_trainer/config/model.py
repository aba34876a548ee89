"""Settings of the policy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gxpo_trainer.config.base import Settings

STARTER_POLICIES = {"starter": "starter_policy", "starter-tools": "starter_tools_policy"}
"""Embedded policies, and the folder of each in the package `models`."""
CHECKPOINTING_FROM = 1_000_000_000
"""Parameters from which `gradient_checkpointing = "auto"` recomputes: below, activations rarely fill a GPU."""


class ModelConfig(Settings):
    """The policy."""

    path: str = Field(
        "starter",
        description="`starter` or `starter-tools` (embedded policies), a local transformers folder, or a hub name.",
    )
    revision: str | None = Field(
        None, description="Hub names only: branch, tag or commit; a run holds the commit that it is resolved to."
    )
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model.")
    max_length: int = Field(4096, ge=8, description="Longest prompt plus response, in tokens.")
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2", "varlen"] = Field(
        "auto",
        description="Of the learner. varlen: torch's variable-length kernel. auto: sdpa; on GPUs in bf16 "
        "flash_attention_2 where it is installed, else varlen.",
    )
    gradient_checkpointing: bool | Literal["auto"] = Field(
        "auto", description="Recompute activations in the backward pass; auto: from 1 billion parameters on."
    )

    def recomputes_activations(self, num_parameters: int) -> bool:
        """Whether the backward pass of a model of this size recomputes activations."""
        if self.gradient_checkpointing == "auto":
            return num_parameters >= CHECKPOINTING_FROM
        return self.gradient_checkpointing
