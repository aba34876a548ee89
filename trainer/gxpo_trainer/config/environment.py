"""Settings of the environment that answers the policy between its turns."""

from __future__ import annotations

import re

from pydantic import Field, field_validator

from gxpo_trainer.config.base import Settings

SINGLE_TURN = "single_turn"
OWN_ENVIRONMENTS = (SINGLE_TURN, "calculator")
_CLASS_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


class EnvironmentConfig(Settings):
    """What answers the policy between its turns, in killable processes (docs/environments.md)."""

    name: str = Field(SINGLE_TURN, description="`single_turn`, `calculator`, or a class as `package.module:Class`.")
    max_turns: int = Field(4, ge=1, description="Turns of the policy in an episode.")
    max_observation_tokens: int = Field(
        64, ge=1, description="Longest answer of the environment, with its role tokens; what is longer is cut."
    )
    deadline_s: float = Field(5.0, gt=0, description="Time limit of one call, after which its process is killed.")
    workers: int = Field(4, ge=1, description="Calls that run at the same time.")
    memory_mb: int = Field(1024, ge=64, description="Address-space limit of an episode's process.")

    @field_validator("name")
    @classmethod
    def _known_or_a_class(cls, value: str) -> str:
        if value not in OWN_ENVIRONMENTS and not _CLASS_PATH.fullmatch(value):
            raise ValueError(f"must be one of {', '.join(OWN_ENVIRONMENTS)}, or a class as package.module:Class")
        return value

    @property
    def multi_turn(self) -> bool:
        """Whether an environment takes part; without one a response is a single turn."""
        return self.name != SINGLE_TURN

    @property
    def observation_tokens(self) -> int:
        """Most tokens of an episode that the environment writes."""
        return (self.max_turns - 1) * self.max_observation_tokens if self.multi_turn else 0
