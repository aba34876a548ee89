"""What an update rule declares in addition to its settings, for the rest of the product.

Cost preview, command line, sweeps, comparison and (through the JSON schema) the dashboard read these declarations;
their code contains no rule's name. Free of torch: `implementation` is a reference that `rules.registry` resolves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, FiniteFloat, model_validator

from gxpo_trainer.config.base import Settings

Family = Literal["baseline", "look-ahead", "control"]
SCHEMA_KEY = "x-rule"
"""Key of a rule's declarations in its part of the JSON schema."""


class GateConfig(Settings):
    """The z-score gate that ends the look-ahead."""

    threshold: float = Field(0.5, description="τ; inf never fires.")
    window: int = Field(30, ge=2, description="w: number of past values for mean and standard deviation.")
    warmup: int = Field(2, ge=2, description="Values seen before z is computed; may exceed the window.")
    epsilon: FiniteFloat = Field(1e-8, ge=0, description="ε in z = (value − mean) / (std + ε).")
    mode: Literal["permanent", "never", "rearm"] = Field(
        "permanent", description="permanent: off for good; never: only measured; rearm: returns after a cool-down."
    )
    two_sided: bool = Field(False, description="Fire at |z| ≥ τ (SFPO's paper) instead of z ≥ τ.")
    rearm_after: int = Field(20, ge=1, description="rearm only: steps of cool-down.")
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


def _add_declarations(schema: dict[str, Any], rule: type[RuleSettings]) -> None:
    schema[SCHEMA_KEY] = rule.declarations()


class RuleSettings(Settings):
    """Base of the rules' settings classes. A subclass narrows `name` to its Literal and sets the declarations.

    A rule with a gate has its settings in a field `gate`; with the gate closed a step takes one backward pass.
    """

    model_config = ConfigDict(json_schema_extra=_add_declarations)

    label: ClassVar[str]
    """Name in tables and charts."""
    family: ClassVar[Family]
    """baseline: plain optimizer steps, to compare look-ahead rules with. control: a rule that exists to tell what a
    look-ahead adds; it stands in no list of rules to choose between, but can be trained as any other."""
    implementation: ClassVar[str]
    """`module:Class` of the rule on the contract of rules/base.py; the class takes these settings."""
    passes: ClassVar[PassCount] = PassCount(1)
    gate_signal: ClassVar[GateSignal | None] = None
    symbols: ClassVar[Mapping[str, str]] = {}
    """Settings (path below `learner.rule`) with a symbol: the ones that forms show first and sweeps offer."""
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
        if isinstance(base, cls):
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
