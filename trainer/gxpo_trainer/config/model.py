"""Settings of the policy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gxpo_trainer.config.base import Settings


class ModelConfig(Settings):
    """The policy."""

    path: str = Field(
        "starter",
        description="`starter` (the embedded policy), a local transformers folder, or a hub name.",
    )
    revision: str | None = Field(
        None, description="Hub names only: branch, tag or commit; a run holds the commit that it is resolved to."
    )
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model.")
    max_length: int = Field(4096, ge=8, description="Longest prompt plus response, in tokens.")
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = Field(
        "auto",
        description="Kernel of the learner; auto: sdpa, on GPUs in bf16 flash_attention_2 where it is installed.",
    )
    gradient_checkpointing: bool = Field(False, description="Recompute activations in the backward pass.")
