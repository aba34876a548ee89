"""Principals and roles. Tokens are 256 random bits; only their SHA-256 is stored.

Secrets of full entropy need neither salt nor key stretching.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from enum import IntEnum


class Role(IntEnum):
    """Each role includes the permissions of the roles below it. METRICS reads `/metrics` and nothing else."""

    METRICS = 0
    VIEWER = 1
    SUBMITTER = 2
    ADMIN = 3

    @property
    def word(self) -> str:
        return self.name.lower()

    @classmethod
    def of(cls, word: str) -> Role:
        """Raises KeyError for an unknown word."""
        return cls[word.upper()]


@dataclass(frozen=True, slots=True)
class Principal:
    """The holder of an access token."""

    token_id: str
    name: str
    role: Role

    @property
    def actor(self) -> str:
        return f"token:{self.name}"


def new_token(kind: str = "gxpo") -> str:
    """A new secret; `kind` is a prefix that names its purpose."""
    return f"{kind}_{secrets.token_urlsafe(32)}"


def hash_token(token: str) -> str:
    """SHA-256 of a token."""
    return hashlib.sha256(token.encode()).hexdigest()


def same_hash(token: str, stored: str | None) -> bool:
    """Whether a token matches the stored hash, compared in constant time."""
    return stored is not None and secrets.compare_digest(hash_token(token), stored)
