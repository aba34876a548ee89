"""Colours, markers and dashes of the lines in pictures: one hue an update rule, as in the dashboard.

Lines of one rule differ in shade, and all lines in marker and dash, so that grayscale prints are legible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib.colors import to_hex, to_rgb

from gxpo_trainer.config.rules import RULES

HUES = ("#3f7fbf", "#b8621b", "#2b8a6e", "#8a63c9", "#b0478a", "#7a7f1c", "#a3593f", "#5f7a8c")
"""By order of the rules, then for those that are unknown. A test holds that the dashboard has the same."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)))
_TONES = (0.0, 0.35, -0.35, 0.55, -0.6)
"""Of the first, second, … line of a rule: the share of white, or below 0 of black, mixed into its hue."""


class LineStyle(NamedTuple):
    """A line's colour (`#rrggbb`), marker and dash, as matplotlib takes them."""

    color: str
    marker: str
    dash: Any


def line_styles(rules: Sequence[str]) -> list[LineStyle]:
    """The style of each line, given the label of its rule, such as `GXPO K=5`."""
    seen: Counter[int] = Counter()
    found = []
    for number, label in enumerate(rules):
        position = _position(label)
        color = _toned(HUES[position % len(HUES)], _TONES[seen[position] % len(_TONES)])
        found.append(LineStyle(color, MARKERS[number % len(MARKERS)], DASHES[number % len(DASHES)]))
        seen[position] += 1
    return found


def _position(label: str) -> int:
    """Place of the label's rule in the registry; the one after the last for an unknown rule."""
    known = (number for number, rule in enumerate(RULES) if f"{label} ".startswith(f"{rule.label} "))
    return next(known, len(RULES))


def _toned(color: str, tone: float) -> str:
    target = 1.0 if tone > 0 else 0.0
    return to_hex([channel + abs(tone) * (target - channel) for channel in to_rgb(color)])
