"""Settings classes; what they name is in parts.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from gxpo_trainer.config import (
    AdvantageSettings,
    EnvironmentConfig,
    GateConfig,
    LoggerSettings,
    LossSettings,
    RewardConfig,
    RuleSettings,
)
from gxpo_trainer.config.rules import Family, GateSignal, PassCount


class RepeatedRule(RuleSettings):
    """Plain optimizer steps on one batch, halved for good by a gate on the gradient's norm."""

    label: ClassVar[str] = "Repeated"
    family: ClassVar[Family] = "look-ahead"
    implementation: ClassVar[str] = "workbench.parts:Repeated"
    passes: ClassVar[PassCount] = PassCount(0, ("repeats",))
    gate_signal: ClassVar[GateSignal | None] = GateSignal("grad/norm_g0", "first gradient norm")
    symbols: ClassVar[Mapping[str, str]] = {"repeats": "R", "alpha": "α"}
    label_settings: ClassVar[tuple[str, ...]] = ("repeats",)

    name: Literal["repeated"] = "repeated"
    repeats: int = Field(2, ge=1, description="R: optimizer steps on one batch.")
    alpha: float = Field(0.25, le=0.9, description="Not used; shared with the base of a sweep.")
    ceiling: float | None = Field(2.0, description="Not used; may be absent.")
    gate: GateConfig = GateConfig()

    @property
    def learning_rate_factor(self) -> float | None:
        return float(self.repeats)


class BareRule(RuleSettings):
    """Without an implementation."""

    name: Literal["bare"] = "bare"


class NoSuchPartRule(RepeatedRule):
    """Its implementation does not exist."""

    label: ClassVar[str] = "No such part"
    family: ClassVar[Family] = "control"
    implementation: ClassVar[str] = "workbench.parts:Repeatde"

    name: Literal["no_such_part"] = "no_such_part"  # type: ignore[assignment]


class UnfinishedRule(RepeatedRule):
    """Its implementation is no rule."""

    label: ClassVar[str] = "Unfinished"
    family: ClassVar[Family] = "control"
    implementation: ClassVar[str] = "workbench.parts:Linear"

    name: Literal["unfinished"] = "unfinished"  # type: ignore[assignment]


class LinearLoss(LossSettings):
    """−scale · ρA, without a clip."""

    implementation: ClassVar[str] = "workbench.parts:Linear"

    surrogate: Literal["linear"] = "linear"
    scale: float = Field(1.0, gt=0, description="Factor of the surrogate.")


class FromBestAdvantage(AdvantageSettings):
    """Relative to the best response of the group."""

    implementation: ClassVar[str] = "workbench.parts:FromBest"

    name: Literal["from_best"] = "from_best"
    offset: float = Field(0.0, description="Added to each advantage.")


class BrevityReward(RewardConfig):
    """Fewer tokens are better."""

    implementation: ClassVar[str] = "workbench.parts:Brevity"

    name: Literal["brevity"] = "brevity"
    longest: int = Field(10, ge=1, description="Tokens from which on the reward is 0.")


class EchoEnvironment(EnvironmentConfig):
    """Repeats what the policy says."""

    implementation: ClassVar[str] = "workbench.parts:Echo"

    name: Literal["echo"] = "echo"
    prefix: str = Field("You said ", description="Before the policy's words.")


class LinesLogger(LoggerSettings):
    """A line of text a step."""

    implementation: ClassVar[str] = "workbench.parts:Lines"

    name: Literal["lines"] = "lines"
    every: int = Field(1, ge=1, description="Steps between lines.")
