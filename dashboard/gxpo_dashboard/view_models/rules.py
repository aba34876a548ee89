"""Update rules and their colours, from the declarations in the config's JSON schema. Pure.

An unknown rule (a run of a newer or older version, or no schema yet) has its name as its label, and a gate if its
settings have one. A rule has one hue, its variants have shades of it.
"""

from __future__ import annotations

import colorsys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

HUES = ("#3f7fbf", "#b8621b", "#2b8a6e", "#8a63c9", "#b0478a", "#7a7f1c", "#a3593f", "#5f7a8c")
"""By order of the rules in the schema. Contrast of 3:1 or better on light and dark pages, as of their shades."""
_LUMINANCES = (None, 0.29, 0.13)
"""Of the first, second and third variant of a rule."""
_TURN = 0.07
"""Part of the circle of hues between a rule's first three variants and the next three, to either side in turn."""


def luminance(color: str) -> float:
    """Relative luminance of `#rrggbb` as in WCAG 2."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def shade(color: str, variant: int) -> str:
    """The colour of a rule's variant, counted from 0: the same hue, lighter or darker; after three a hue beside it."""
    turn, variant = divmod(variant, len(_LUMINANCES))
    target = _LUMINANCES[variant]
    if target is None:
        if not turn:
            return color
        target = luminance(color)
    hue, _, saturation = colorsys.rgb_to_hls(*(int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)))
    hue = (hue + _TURN * ((turn + 1) // 2) * (-1) ** turn) % 1.0
    low, high = 0.0, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if luminance(_hex(hue, middle, saturation)) < target else (low, middle)
    return _hex(hue, low, saturation)


def _hex(hue: float, lightness: float, saturation: float) -> str:
    return "#" + "".join(f"{round(255 * c):02x}" for c in colorsys.hls_to_rgb(hue, lightness, saturation))


Settings = Mapping[str, Any]


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
        costly = [name for name in self.open_settings if name in self.symbols]
        words = [f"{self.symbols[name]}={self._value(settings, name)}" for name in costly]
        return " ".join([self.label, *words, f"({self.passes_per_step(settings)} per step)"])

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
    def baseline(self) -> Rule:
        """The first baseline."""
        return next((rule for rule in self.known if rule.family == "baseline"), Rule("", "baseline", 0))

    def colors(self, rule_of: Mapping[str, str]) -> dict[str, str]:
        """Series → name of its rule, to series → colour: the rule's hue, in shades by order."""
        hues = [self.of({"name": name}).color for name in rule_of.values()]
        return {series: shade(hues[i], hues[:i].count(hues[i])) for i, series in enumerate(rule_of)}

    def of(self, settings: Settings) -> Rule:
        """The rule of a run's `learner.rule`; the fall-back for an unknown one."""
        name = str(settings.get("name") or "")
        watched = "monitored value" if settings.get("gate") is not None else None
        unknown = Rule(name, name.upper() or "unknown rule", len(self.known), watched=watched)
        return next((rule for rule in self.known if rule.name == name), unknown)


def rules_of(schema: Mapping[str, Any]) -> Rules:
    """The rules of a config schema; none if it has no `learner.rule`."""
    learner = follow(schema, (schema.get("properties") or {}).get("learner") or {})
    entry: Mapping[str, Any] = (learner.get("properties") or {}).get("rule") or {}
    variants: Sequence[Mapping[str, Any]] = entry.get("oneOf") or []
    return Rules(tuple(_rule(follow(schema, variant), position) for position, variant in enumerate(variants)))


def follow(schema: Mapping[str, Any], entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """The definition in the schema that an entry refers to, or the entry itself."""
    definitions: Mapping[str, Mapping[str, Any]] = schema.get("$defs") or {}
    return definitions.get(str(entry.get("$ref", "")).rpartition("/")[2], entry)


def _rule(schema: Mapping[str, Any], position: int) -> Rule:
    properties: Mapping[str, Any] = schema["properties"]
    declared: Mapping[str, Any] = schema.get("x-rule") or {}
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
