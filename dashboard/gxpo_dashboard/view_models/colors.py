"""Colours of update rules: one hue a rule, shades for its variants. Pure."""

from __future__ import annotations

import colorsys
from collections.abc import Mapping

HUES = ("#3f7fbf", "#b8621b", "#2b8a6e", "#8a63c9", "#b0478a", "#7a7f1c", "#a3593f", "#5f7a8c")
"""By order of the rules in the schema. Contrast of 3:1 or better on light and dark pages, as of their shades."""
_LUMINANCES = (None, 0.29, 0.13)
"""Of the first, second and third variant of a rule; further ones start again and differ in dash and shape."""


def luminance(color: str) -> float:
    """Relative luminance of `#rrggbb` as in WCAG 2."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def shade(color: str, variant: int) -> str:
    """The colour of a rule's variant, counted from 0: the same hue, lighter or darker."""
    target = _LUMINANCES[variant % len(_LUMINANCES)]
    if target is None:
        return color
    hue, _, saturation = colorsys.rgb_to_hls(*(int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)))
    low, high = 0.0, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if luminance(_hex(hue, middle, saturation)) < target else (low, middle)
    return _hex(hue, low, saturation)


def variants(bases: Mapping[str, str]) -> dict[str, str]:
    """Series → colour of its rule, to series → shade: equal colours are told apart by order."""
    seen: dict[str, int] = {}
    found = {}
    for series, base in bases.items():
        found[series] = shade(base, seen.get(base, 0))
        seen[base] = seen.get(base, 0) + 1
    return found


def _hex(hue: float, lightness: float, saturation: float) -> str:
    return "#" + "".join(f"{round(255 * c):02x}" for c in colorsys.hls_to_rgb(hue, lightness, saturation))
