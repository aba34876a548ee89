"""Contrast of colours, for tests of what is readable; apart from the product's own calculation."""

from __future__ import annotations


def contrast(first: str, second: str) -> float:
    """Contrast ratio of two colours `#rrggbb` as in WCAG 2.2, from 1 to 21."""
    low, high = sorted((_relative_luminance(first), _relative_luminance(second)))
    return (high + 0.05) / (low + 0.05)


def _relative_luminance(color: str) -> float:
    red, green, blue = (_linear(channel / 255) for channel in bytes.fromhex(color[1:]))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _linear(channel: float) -> float:
    return channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4
