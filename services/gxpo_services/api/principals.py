"""Principals, roles and the tokens that prove them.

Tokens are 256 random bits; only their SHA-256 is stored, because secrets of full entropy need neither salt nor key
stretching. When a token was last used is noted in memory and written periodically: a write per request would make every
reading request wait for SQLite's single writer."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import anyio
from anyio.to_thread import run_sync
from sqlalchemy import Connection, bindparam, select, update
from sqlalchemy.orm import Session

from gxpo_services.db.database import Database
from gxpo_services.db.tables import AccessToken
from gxpo_services.logging import ErrorLog


class Role(IntEnum):
    """Each role includes the permissions of the roles below it. METRICS reads `/metrics` and nothing else."""

    METRICS = 0
    VIEWER = 1
    SUBMITTER = 2
    ADMIN = 3

    @property
    def word(self) -> str:
        return self.name.lower()


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


_table = AccessToken.__table__.c
_BY_SECRET = select(_table.id, _table.name, _table.role, _table.revoked_at, _table.expires_at).where(
    _table.sha256 == bindparam("sha256")
)


def find_by_secret(database: Session | Connection, token: str) -> Principal | None:
    """The principal of a valid, unexpired secret. Runs on every request, so it takes a connection."""
    row = database.execute(_BY_SECRET, {"sha256": hash_token(token)}).one_or_none()
    if row is None or row.revoked_at is not None or (row.expires_at is not None and row.expires_at <= time.time()):
        return None
    return Principal(row.id, row.name, Role[row.role.upper()])


FLUSH_S = 30.0


class TokenUses:
    """Times of the last requests of tokens since the last write. Thread-safe: operations on a dict are atomic."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock, self._errors = clock, ErrorLog()
        self._noted: dict[str, float] = {}

    def note(self, token_id: str) -> None:
        self._noted[token_id] = self._clock()

    def write(self, database: Database) -> None:
        noted, self._noted = self._noted, {}
        if not noted:
            return
        # The times are not worth the service, or its orderly end.
        with self._errors.once("tokens", "cannot write the last uses of tokens"), database.writing() as session:
            for token_id, at in sorted(noted.items()):
                session.execute(update(AccessToken).where(AccessToken.id == token_id).values(last_used_at=at))

    async def keep_writing(self, database: Database) -> None:
        """Write every FLUSH_S seconds until cancelled; an unavailable database is tried again."""
        while True:
            await anyio.sleep(FLUSH_S)
            await run_sync(self.write, database)
