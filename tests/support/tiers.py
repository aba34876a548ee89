"""Which tests `make test` runs, and which only `make test-all`: docs/tests.md.

`long` marks what repeats a property in further combinations, or takes long for what it adds. What runs on each database
is long on PostgreSQL, unless it is marked `each_database`: then databases differ in it (locks, JSON, upserts, order,
time zones, bulk).
"""

from __future__ import annotations

from typing import Literal

import pytest

Tier = Literal["short", "long"]
SELECTIONS = {"short": "what `make test` runs", "long": "what only `make test-all` runs", "all": "everything"}


def long_reason(item: pytest.Item) -> str | None:
    """Why `make test` leaves a test out; None for one that it runs."""
    if mark := item.get_closest_marker("long"):
        return str(mark.args[0])
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    if parameters.get("database_url") == "postgresql" and not item.get_closest_marker("each_database"):
        return "repeated on PostgreSQL"
    return None


def tier(item: pytest.Item) -> Tier:
    return "long" if long_reason(item) else "short"
