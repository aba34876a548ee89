"""Settings of the environment that answers the policy between its turns."""

from __future__ import annotations

from typing import Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from gxpo_trainer.config.base import Settings, known_or_class

SINGLE_TURN = "single_turn"
OPENENV = "openenv"
OWN_ENVIRONMENTS = (SINGLE_TURN, "calculator", OPENENV)


class EnvironmentConfig(Settings):
    """What answers the policy between its turns, in killable processes (docs/environments.md)."""

    name: str = Field(
        SINGLE_TURN, description="`single_turn`, `calculator`, `openenv`, or a class as `package.module:Class`."
    )
    url: str | None = Field(None, description="Address of an OpenEnv server, as http://host:port.")
    action_field: str = Field("message", description="Field of an OpenEnv action that gets the policy's text.")
    observation_field: str | None = Field(
        None, description="Field of an OpenEnv observation that the policy reads; default: all of it, as JSON."
    )
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
        return known_or_class(value, OWN_ENVIRONMENTS)

    @field_validator("url")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = urlsplit(value)
        if "@" in parts.netloc:
            raise ValueError("must be an address without a user name or password")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError("must look like http://host:port")
        return value

    @model_validator(mode="after")
    def _address_of_a_server(self) -> Self:
        if (self.name == OPENENV) != (self.url is not None):
            reason = "needs an address" if self.url is None else "is a class; only openenv has an address"
            raise ValueError(f"url: environment.name = {self.name!r} {reason}")
        return self

    @property
    def multi_turn(self) -> bool:
        """Whether an environment takes part; without one a response is a single turn."""
        return self.name != SINGLE_TURN

    @property
    def observation_tokens(self) -> int:
        """Most tokens of an episode that the environment writes."""
        return (self.max_turns - 1) * self.max_observation_tokens if self.multi_turn else 0
