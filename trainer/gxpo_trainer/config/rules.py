"""Settings of the update rules and their gates: one class a rule, chosen by `learner.rule.name`."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from gxpo_trainer.config.base import Settings


class GateConfig(Settings):
    """The z-score gate that ends the look-ahead."""

    threshold: float = Field(0.5, description="τ; inf never fires.")
    window: int = Field(30, ge=2, description="w: past values that mean and spread are taken over.")
    warmup: int = Field(2, ge=2, description="Values seen before z is computed; may exceed the window.")
    epsilon: float = Field(1e-8, ge=0, description="ε in z = (value − mean) / (std + ε).")
    mode: Literal["permanent", "never", "rearm"] = Field(
        "permanent", description="permanent: off for good; never: only measured; rearm: returns after a cool-down."
    )
    two_sided: bool = Field(False, description="Fire at |z| ≥ τ (SFPO's paper) instead of z ≥ τ.")
    rearm_after: int = Field(20, ge=1, description="rearm only: steps of cool-down.")
    rearm_threshold: float = Field(0.0, description="rearm only: z must be back under this.")

    @model_validator(mode="after")
    def _consistent(self) -> GateConfig:
        if math.isnan(self.threshold):
            raise ValueError("threshold is NaN; set a number, or inf for a gate that never fires")
        if self.mode == "rearm" and self.rearm_threshold >= self.threshold:
            raise ValueError("rearm_threshold must be below threshold, or the gate would flap")
        return self


class SfpoGateConfig(GateConfig):
    """SFPO's gate watches the policy's entropy."""

    threshold: float = Field(1.0, description="τ of the authors' scripts; the GXPO paper ran it with 2.0.")
    two_sided: bool = Field(True, description="Fire at |z| ≥ τ (the paper) instead of z ≥ τ (its script).")


class GrpoRule(Settings):
    """One optimizer step a batch: one backward pass."""

    name: Literal["grpo"] = "grpo"


class SfpoRule(Settings):
    """Slow-Fast Policy Optimization: K fast steps, reposition, one slow step; K + 1 passes."""

    name: Literal["sfpo"] = "sfpo"
    k: int = Field(3, description="K: fast steps.")
    alpha: float = Field(0.8, description="α: share of the way from θ⁰ to θᴷ.")
    gate: SfpoGateConfig = SfpoGateConfig()

    _check_k = field_validator("k")(lambda cls, value: _at_least_two(value))
    _check_alpha = field_validator("alpha")(lambda cls, value: _unit_interval(value))


class GxpoRule(Settings):
    """Gradient extrapolation: two probes, K virtual steps, one corrective pass; 3 passes whatever K."""

    name: Literal["gxpo"] = "gxpo"
    k: int = Field(5, description="K: virtual depth.")
    alpha: float = Field(0.5, description="α: share of the way from θ⁰ to θᴷ.")
    delta: float = Field(1e-8, ge=0, description="δ: a coordinate is active where |g⁰| > δ.")
    probes: Literal[1, 2] = Field(2, description="1 (replay only): a constant virtual gradient, two passes a step.")
    predictor: Literal["gradient", "displacement", "replay"] = Field(
        "gradient", description="How two probes become θᴷ; gradient is the paper's."
    )
    probe_state: Literal["keep", "rollback", "fast_forward"] = Field(
        "keep", description="Optimizer state before the corrective step; keep is the paper's."
    )
    ratio_clip: tuple[float, float] | Literal["none"] = Field(
        (-2.0, 3.0), description="Clamp of r = g¹/g⁰; none is the bare rule."
    )
    scale_clip: tuple[float, float] | Literal["auto", "none"] = Field(
        "auto", description="Clamp of the scale; auto is [1, K/2 + 1], none is the bare rule."
    )
    gate: GateConfig = GateConfig()

    _check_k = field_validator("k")(lambda cls, value: _at_least_two(value))
    _check_alpha = field_validator("alpha")(lambda cls, value: _unit_interval(value))

    @model_validator(mode="after")
    def _consistent(self) -> GxpoRule:
        if self.probes == 1 and self.predictor != "replay":
            raise ValueError('probes = 1 has no second gradient; set predictor = "replay" or probes = 2')
        if self.probe_state == "fast_forward" and self.predictor != "replay":
            raise ValueError('probe_state = "fast_forward" needs predictor = "replay", which computes that state')
        for name, clip in (("ratio_clip", self.ratio_clip), ("scale_clip", self.scale_clip)):
            if isinstance(clip, tuple) and not clip[0] < clip[1]:
                raise ValueError(f"{name} = {list(clip)} is empty; the lower bound must be below the upper")
        return self

    @property
    def scale_bounds(self) -> tuple[float, float] | None:
        """The clamp of the scale as numbers, None for the bare rule."""
        if self.scale_clip == "none":
            return None
        return (1.0, self.k / 2 + 1) if self.scale_clip == "auto" else self.scale_clip


RuleConfig = Annotated[GrpoRule | SfpoRule | GxpoRule, Field(discriminator="name")]


def _at_least_two(value: int) -> int:
    if value < 2:
        raise ValueError("must be at least 2: the rule needs two steps to look ahead; set it to 2 or more")
    return value


def _unit_interval(value: float) -> float:
    if not 0.0 <= value <= 1.0:
        raise ValueError("must lie in [0, 1]: it is the share of the way to the look-ahead point")
    return value
