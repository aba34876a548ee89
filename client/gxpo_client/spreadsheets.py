"""CSV cells that no spreadsheet executes. Pure."""

from __future__ import annotations

from typing import Any

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""First characters of a cell that spreadsheets execute. Names and notes are free text of other people."""


def literal(value: Any) -> Any:
    """A text that a spreadsheet would take for a formula with ' before it; any other value as it is."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
