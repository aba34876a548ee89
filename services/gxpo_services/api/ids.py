"""Public ids: one letter for the kind, a timestamp and random bits; they sort by creation time."""

from __future__ import annotations

import secrets
import time

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base 32: without i, l, o, u


def new_id(kind: str, now: float | None = None) -> str:
    """`kind` + 10 characters of milliseconds since 1970 + 10 random characters (50 bits)."""
    millis = int((time.time() if now is None else now) * 1000)
    return kind + _encode(millis, 10) + _encode(secrets.randbits(50), 10)


def _encode(value: int, length: int) -> str:
    digits = []
    for _ in range(length):
        value, rest = divmod(value, 32)
        digits.append(_ALPHABET[rest])
    return "".join(reversed(digits))
