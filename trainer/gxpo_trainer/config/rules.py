"""Settings of the update rules, one class per rule, and what each declares for the rest of the product.

Cost preview, command line, sweeps, comparison and (through the JSON schema) the dashboard read these declarations;
their code contains no rule's name. Free of torch: `implementation` is a reference that `rules.contract` resolves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, FiniteFloat, model_validator

from gxpo_trainer.config.base import MOST_STEPS, Settings
from gxpo_trainer.config.components import Choice
from gxpo_trainer.plugins import is_class_path

Family = Literal["baseline", "look-ahead", "control"]
SCHEMA_KEY = "x-rule"
"""Key of a rule's declarations in its part of the JSON schema."""


class GateConfig(Settings):
    """The z-score gate that ends the look-ahead."""

    threshold: float = Field(0.5, description="τ; inf never fires.")
    window: int = Field(30, ge=2, le=MOST_STEPS, description="w: past values for mean and standard deviation.")
    warmup: int = Field(2, ge=2, le=MOST_STEPS, description="Values seen before z is computed; may exceed the window.")
    epsilon: FiniteFloat = Field(1e-8, ge=0, description="ε in z = (value − mean) / (std + ε).")
    mode: Literal["permanent", "never", "rearm"] = Field(
        "permanent", description="permanent: off for good; never: only measured; rearm: returns after a cool-down."
    )
    two_sided: bool = Field(False, description="Fire at |z| ≥ τ (SFPO's paper) instead of z ≥ τ.")
    rearm_after: int = Field(
        20, ge=1, le=MOST_STEPS, description="rearm only: cool-down, in steps that the gate judges."
    )
    rearm_threshold: float = Field(0.0, description="rearm only: z, with two_sided |z|, must be below this.")

    @model_validator(mode="after")
    def _consistent(self) -> GateConfig:
        if math.isnan(self.threshold):
            raise ValueError("threshold is NaN; set a number, or inf for a gate that never fires")
        if self.mode == "rearm" and not self.rearm_threshold < self.threshold:
            raise ValueError("rearm_threshold must be below threshold; otherwise the gate would oscillate")
        if self.mode == "rearm" and self.two_sided and self.rearm_threshold <= 0:
            raise ValueError(
                f"rearm_threshold = {self.rearm_threshold:g} with two_sided = true: |z| is never below it, so the "
                "look-ahead would not return; set it above 0 and below threshold"
            )
        return self

    @property
    def can_fire(self) -> bool:
        return self.mode != "never" and math.isfinite(self.threshold)


@dataclass(frozen=True, slots=True)
class PassCount:
    """Backward passes of a training step while the gate is open: the values of `settings` plus `constant`."""

    constant: int
    settings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GateSignal:
    """What a gate watches. metric: its name among the metrics of a step. label: its name in charts."""

    metric: str
    label: str


class RuleSettings(Settings):
    """Base of the rules' settings classes. A subclass narrows `name` to its Literal and sets the declarations.

    A rule with a gate has its settings in a field `gate`; with the gate closed a step takes one backward pass.
    """

    model_config = ConfigDict(json_schema_extra=lambda schema, rule: schema.update({SCHEMA_KEY: rule.declarations()}))

    label: ClassVar[str]
    """Name in tables and charts."""
    family: ClassVar[Family]
    """baseline: plain optimizer steps, to compare look-ahead rules with. control: a rule that exists to tell what a
    look-ahead adds; it stands in no list of rules to choose between, but can be trained as any other."""
    implementation: ClassVar[str]
    """`module:Class` of the rule on the contract of rules/contract.py; the class takes these settings."""
    passes: ClassVar[PassCount] = PassCount(1)
    gate_signal: ClassVar[GateSignal | None] = None
    symbols: ClassVar[Mapping[str, str]] = {}
    """Settings (path below `learner.rule`) with a symbol: the ones that forms show first."""
    label_settings: ClassVar[tuple[str, ...]] = ()
    """Settings of `symbols` that the label of a run states, as in `SFPO K=3`."""
    sweep_base: ClassVar[bool] = False
    """Whether the sweep preset `rules` may take the settings of the other rules from this one."""

    name: str

    def passes_per_step(self, gate_open: bool) -> int:
        """Backward passes of a training step, in full batches."""
        if not gate_open:
            return 1
        return self.passes.constant + sum(int(getattr(self, name)) for name in self.passes.settings)

    def shard_buffers(self, num_moments: int) -> int:
        """Parameter-shard copies that the look-ahead holds in addition to parameters, gradient and optimizer state.

        num_moments: state tensors of the optimizer, 2 for AdamW. With the gate closed a rule holds none.
        """
        return 0

    @property
    def gate_config(self) -> GateConfig | None:
        """The gate's settings; None for a rule without a gate."""
        gate = getattr(self, "gate", None)
        return gate if isinstance(gate, GateConfig) else None

    @property
    def learning_rate_factor(self) -> float | None:
        """Length of one step in a flat region, in plain steps; None for a plain step.

        The control of this rule is the baseline at the learning rate times this factor.
        """
        return None

    @classmethod
    def adapted_from(cls, base: RuleSettings) -> Self:
        """This rule for a comparison with `base`: the settings that both have, and defaults for the others.

        Raises pydantic's ValidationError for a value that this rule rejects.
        """
        if isinstance(base, cls) and base.name == rule_name(cls):  # else a rule of its own that inherits the settings
            return base
        shared = cls.model_fields.keys() & type(base).model_fields.keys() - {"name"}
        return cls.model_validate(base.model_dump(include=set(shared)))

    @classmethod
    def label_of(cls, settings: Mapping[str, Any]) -> str:
        """Label of a run with these settings, which may be those of an older version."""
        known = ((name, settings.get(name)) for name in cls.label_settings)
        return " ".join([cls.label, *(f"{cls.symbols[name]}={value}" for name, value in known if value is not None)])

    @classmethod
    def passes_formula(cls) -> str:
        """The passes of a step in symbols: `K + 1`; empty for a constant."""
        if not cls.passes.settings:
            return ""
        terms = [cls.symbols.get(name, name) for name in cls.passes.settings]
        return " + ".join([*terms, *([str(cls.passes.constant)] if cls.passes.constant else [])])

    @classmethod
    def declarations(cls) -> dict[str, Any]:
        """Declarations as JSON, for clients that cannot import this class."""
        return {
            "label": cls.label,
            "family": cls.family,
            "passes_per_step": {
                "gate_open": {"constant": cls.passes.constant, "settings": list(cls.passes.settings)},
                "gate_closed": 1,
            },
            "gate_signal": asdict(cls.gate_signal) if cls.gate_signal else None,
            # A list: pydantic sorts the keys of a schema, and the order is that of forms.
            "symbols": [{"setting": name, "symbol": symbol} for name, symbol in cls.symbols.items()],
        }


Depth = Annotated[int, Field(ge=2, le=1_000_000)]
Share = Annotated[float, Field(ge=0, le=1)]
_SYMBOLS = {"k": "K", "alpha": "α", "gate.threshold": "τ"}
_PAPER_THRESHOLD, _PAPER_SFPO_THRESHOLD = 0.5, 2.0
"""Thresholds of the GXPO paper for GXPO and for SFPO."""


class SfpoGateConfig(GateConfig):
    """SFPO's gate watches the policy's entropy."""

    threshold: float = Field(1.0, description="τ of the authors' scripts; the GXPO paper ran it with 2.0.")
    two_sided: bool = Field(True, description="Fire at |z| ≥ τ (the paper) instead of z ≥ τ (its script).")


class GrpoRule(RuleSettings):
    """One optimizer step per batch: one backward pass."""

    label: ClassVar[str] = "GRPO"
    family: ClassVar[Family] = "baseline"
    implementation: ClassVar[str] = "gxpo_trainer.rules.grpo:GRPO"

    name: Literal["grpo"] = "grpo"


class SfpoRule(RuleSettings):
    """Slow-Fast Policy Optimization: K fast steps, reposition, one slow step; K + 1 passes."""

    label: ClassVar[str] = "SFPO"
    family: ClassVar[Family] = "look-ahead"
    implementation: ClassVar[str] = "gxpo_trainer.rules.sfpo:SFPO"
    passes: ClassVar[PassCount] = PassCount(1, ("k",))
    gate_signal: ClassVar[GateSignal | None] = GateSignal("policy/entropy", "policy entropy")
    symbols: ClassVar[Mapping[str, str]] = _SYMBOLS
    label_settings: ClassVar[tuple[str, ...]] = ("k",)

    name: Literal["sfpo"] = "sfpo"
    k: Depth = Field(3, description="K: fast steps.")
    alpha: Share = Field(0.8, description="α: share of the way from θ⁰ to θᴷ.")
    gate: SfpoGateConfig = SfpoGateConfig()

    def shard_buffers(self, num_moments: int) -> int:
        """θ⁰."""
        return 1

    @property
    def learning_rate_factor(self) -> float | None:
        return self.alpha * self.k + 1

    @classmethod
    def adapted_from(cls, base: RuleSettings) -> SfpoRule:
        """With the base's gate made two-sided, or the paper's SFPO gate if the base has the paper's GXPO gate.

        The paper's warm-up of GXPO (90 steps, inferred) applies to corrective norms, not to a gate on entropy.
        """
        gate = base.gate_config
        if base.name == rule_name(cls) or gate is None:
            return super().adapted_from(base)
        if gate.threshold == _PAPER_THRESHOLD and gate.mode == "permanent":
            own = SfpoGateConfig(threshold=_PAPER_SFPO_THRESHOLD, window=gate.window)
        else:
            own = SfpoGateConfig.model_validate(gate.model_dump() | {"two_sided": True})
        return cls.model_validate(base.model_dump(include={"k", "alpha"}) | {"gate": own})


class GxpoRule(RuleSettings):
    """Gradient extrapolation: two probes, K virtual steps, one corrective pass; 3 passes whatever K. Default rule."""

    label: ClassVar[str] = "GXPO"
    family: ClassVar[Family] = "look-ahead"
    implementation: ClassVar[str] = "gxpo_trainer.rules.gxpo:GXPO"
    passes: ClassVar[PassCount] = PassCount(1, ("probes",))
    gate_signal: ClassVar[GateSignal | None] = GateSignal("grad/norm_slow", "corrective norm ‖g_slow‖")
    symbols: ClassVar[Mapping[str, str]] = _SYMBOLS
    label_settings: ClassVar[tuple[str, ...]] = ("k",)
    sweep_base: ClassVar[bool] = True

    name: Literal["gxpo"] = "gxpo"
    k: Depth = Field(5, description="K: virtual depth.")
    alpha: Share = Field(0.5, description="α: share of the way from θ⁰ to θᴷ.")
    delta: FiniteFloat = Field(1e-8, ge=0, description="δ: a coordinate is active where |g⁰| > δ.")
    activity: Literal["delta", "rms"] = Field(
        "delta",
        description="delta (the paper): active where |g⁰| > δ. rms: where the first gradient (displacement: the first "
        "step) exceeds activity_rms times its root mean square.",
    )
    activity_rms: FiniteFloat = Field(1e-3, ge=0, description="activity = rms only: share of the root mean square.")
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

    def shard_buffers(self, num_moments: int) -> int:
        """θ⁰; with two probes g⁰ or θ¹ as well; `rollback` keeps the moments."""
        return self.probes + (num_moments if self.probe_state == "rollback" else 0)

    @property
    def learning_rate_factor(self) -> float | None:
        return self.alpha * self.k + 1

    @classmethod
    def label_of(cls, settings: Mapping[str, Any]) -> str:
        """GXPO K=5, GXPO K=10 replay, GXPO K=10 replay 1 probe."""
        parts = [super().label_of(settings)]
        if settings.get("predictor", "gradient") != "gradient":
            parts.append(str(settings["predictor"]))
        if settings.get("probes", 2) == 1:
            parts.append("1 probe")
        return " ".join(parts)

    @property
    def scale_bounds(self) -> tuple[float, float] | None:
        """The clamp of the scale as numbers, None for the bare rule."""
        if self.scale_clip == "none":
            return None
        return (1.0, self.k / 2 + 1) if self.scale_clip == "auto" else self.scale_clip


class EpochsRule(RuleSettings):
    """Several epochs on a batch: K plain steps, θᴷ kept; K passes."""

    label: ClassVar[str] = "Epochs"
    family: ClassVar[Family] = "control"
    implementation: ClassVar[str] = "gxpo_trainer.rules.controls:Epochs"
    passes: ClassVar[PassCount] = PassCount(0, ("k",))
    symbols: ClassVar[Mapping[str, str]] = {"k": "K"}
    label_settings: ClassVar[tuple[str, ...]] = ("k",)

    name: Literal["epochs"] = "epochs"
    k: Depth = Field(3, description="K: optimizer steps on a batch.")

    def shard_buffers(self, num_moments: int) -> int:
        """θ⁰, to measure the step."""
        return 1


class ExtragradientRule(RuleSettings):
    """The gradient of a probed point, applied from θ⁰; 2 passes."""

    label: ClassVar[str] = "Extragradient"
    family: ClassVar[Family] = "control"
    implementation: ClassVar[str] = "gxpo_trainer.rules.controls:Extragradient"
    passes: ClassVar[PassCount] = PassCount(2)
    symbols: ClassVar[Mapping[str, str]] = {"alpha": "α"}

    name: Literal["extragradient"] = "extragradient"
    alpha: float = Field(1.0, gt=0, le=1, description="α: share of the way to θ¹; 0.5 is the midpoint method.")

    def shard_buffers(self, num_moments: int) -> int:
        """θ⁰, g⁰ and the moments."""
        return 2 + num_moments


RULES: list[type[RuleSettings]] = [GrpoRule, SfpoRule, GxpoRule, EpochsRule, ExtragradientRule]
"""The built-in rules, in the order of lists and charts; custom ones follow (`RULE_CHOICE.known`)."""
COMPARED_LABELS = [rule.label for rule in RULES if rule.family != "control"]
"""Of the built-in rules, for texts that are made before plug-ins may be loaded."""


def rule_name(rule: type[RuleSettings]) -> str:
    return str(rule.model_fields["name"].default)


RULE_CHOICE = Choice("rules", "learner.rule", RuleSettings, classes=RULES)
RuleConfig = Annotated[RuleSettings, RULE_CHOICE]


def compared_rules() -> list[type[RuleSettings]]:
    """The rules that sweeps and plans put side by side: all but the controls."""
    return [rule for rule in RULE_CHOICE.known() if rule.family != "control"]


def run_label(rule: Mapping[str, Any]) -> str:
    """Label of a run from its `learner.rule`, such as `GXPO K=5`; of an unknown rule the name and K."""
    name = str(rule["name"])
    settings = next((known for known in RULE_CHOICE.known() if rule_name(known) == name), None)
    if settings is not None:
        return settings.label_of(rule)
    label = name.rpartition(":")[2] if is_class_path(name) else name.upper()
    return label + (f" K={rule['k']}" if rule.get("k") is not None else "")


def in_words(names: list[str], conjunction: str = "or") -> str:
    """`a, b or c`."""
    *first, last = names
    return f"{', '.join(first)} {conjunction} {last}" if first else last
