"""Contrast of colours, for tests of what is readable."""

from __future__ import annotations

from gxpo_dashboard.view_models.rules import luminance


def contrast(first: str, second: str) -> float:
    """Contrast ratio of two colours as in WCAG 2, from 1 to 21."""
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)
