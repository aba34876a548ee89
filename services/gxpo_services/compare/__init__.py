"""Comparison of runs at equal cost, heat map and export."""

from __future__ import annotations
