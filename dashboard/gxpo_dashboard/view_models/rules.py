"""The update rules that the service knows, from the declarations in the config's JSON schema. Pure.

An unknown rule (a run of a newer or older version, or no schema yet) has its name as its label, and a gate if its
settings have one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gxpo_dashboard.view_models.colors import HUES, variants

Settings = Mapping[str, Any]

_DECLARATIONS = "x-rule"


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule's declarations.

    position: its place in the schema, which gives its colour. open_passes: constant part of the passes of a step with
    the gate open, open_settings: the settings that add to it. watched: label of the metric that the gate watches, None
    without a gate. symbols: setting → symbol. defaults: of its settings.
    """

    name: str
    label: str
    position: int
    family: str = ""
    open_passes: int = 1
    open_settings: tuple[str, ...] = ()
    watched: str | None = None
    symbols: Mapping[str, str] = field(default_factory=dict)
    defaults: Settings = field(default_factory=dict)

    @property
    def color(self) -> str:
        return HUES[self.position % len(HUES)]

    def passes_per_step(self, settings: Settings) -> int:
        """Backward passes of a step with an open gate, from `settings` where they have what the rule needs and its
        defaults elsewhere."""
        return self.open_passes + sum(int(self._value(settings, name) or 0) for name in self.open_settings)

    def label_with_cost(self, settings: Settings) -> str:
        """`SFPO K=5 (6 per step)`."""
        shown = [
            f"{self.symbols[name]}={self._value(settings, name)}" for name in self.open_settings if name in self.symbols
        ]
        return " ".join([self.label, *shown, f"({self.passes_per_step(settings)} per step)"])

    def _value(self, settings: Settings, name: str) -> Any:
        value = settings.get(name)
        return self.defaults.get(name) if value is None else value


@dataclass(frozen=True, slots=True)
class Rules:
    """All rules in schema order."""

    known: tuple[Rule, ...] = ()
    settings: tuple[str, ...] = ()
    """Dotted paths of all settings of the config."""

    @property
    def names(self) -> list[str]:
        return [rule.name for rule in self.known]

    @property
    def baseline(self) -> str:
        """Label of the first baseline."""
        return next((rule.label for rule in self.known if rule.family == "baseline"), "baseline")

    @property
    def fallback_color(self) -> str:
        """Of plain steps, those of the first baseline."""
        return next((rule.color for rule in self.known if rule.family == "baseline"), HUES[0])

    def colors(self, rule_of: Mapping[str, str]) -> dict[str, str]:
        """Series → name of its rule, to series → colour: the rule's hue in a shade of its own."""
        return variants({series: self.of({"name": name}).color for series, name in rule_of.items()})

    def of(self, settings: Settings) -> Rule:
        """The rule of a run's `learner.rule`; the fall-back for an unknown one."""
        name = str(settings.get("name") or "")
        found = next((rule for rule in self.known if rule.name == name), None)
        if found is not None:
            return found
        watched = "monitored value" if settings.get("gate") is not None else None
        return Rule(name, name.upper() or "unknown rule", len(self.known), watched=watched)

    def label(self, name: str) -> str:
        return self.of({"name": name}).label


def rules_of(schema: Mapping[str, Any]) -> Rules:
    """The rules of a config schema; none if it has no `learner.rule`."""
    definitions: Mapping[str, Any] = schema.get("$defs") or {}
    part = _follow(definitions, (schema.get("properties") or {}).get("learner") or {})
    entry: Mapping[str, Any] = (part.get("properties") or {}).get("rule") or {}
    variants: Sequence[Mapping[str, Any]] = entry.get("oneOf") or []
    return Rules(tuple(_rule(_follow(definitions, variant), position) for position, variant in enumerate(variants)))


def _follow(definitions: Mapping[str, Any], entry: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = definitions.get(str(entry.get("$ref", "")).rpartition("/")[2], entry)
    return found


def _rule(schema: Mapping[str, Any], position: int) -> Rule:
    properties: Mapping[str, Any] = schema["properties"]
    declared: Mapping[str, Any] = schema.get(_DECLARATIONS) or {}
    name = str(properties["name"]["const"])
    opened = (declared.get("passes_per_step") or {}).get("gate_open") or {}
    signal = declared.get("gate_signal") or ({"label": "monitored value"} if "gate" in properties else {})
    return Rule(
        name,
        str(declared.get("label") or name.upper()),
        position,
        family=str(declared.get("family") or ""),
        open_passes=int(opened.get("constant", 1)),
        open_settings=tuple(opened.get("settings") or ()),
        watched=signal.get("label"),
        symbols={item["setting"]: item["symbol"] for item in declared.get("symbols") or ()},
        defaults={setting: part.get("default") for setting, part in properties.items()},
    )
