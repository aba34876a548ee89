"""Bounded stores of a visitor's session. Pure."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def keep(store: dict[K, V], key: K, value: V, most: int) -> V:
    """Store a value as the newest; the oldest ones beyond `most` are dropped."""
    store.pop(key, None)
    store[key] = value
    while len(store) > most:
        store.pop(next(iter(store)))
    return value
