"""When tokens were last used: noted in memory by each request, written to the database periodically.

A write per request would make every reading request wait for SQLite's single writer.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import anyio
from anyio.to_thread import run_sync
from sqlalchemy import or_, update

from gxpo_services.access.principals import hash_token
from gxpo_services.db.database import Database
from gxpo_services.db.tables.tokens import AccessToken
from gxpo_services.observability.logs import get_logger

FLUSH_S = 30.0
MOST_NOTED = 10_000
"""Distinct tokens between two writes; invented ones beyond it are not noted."""
_log = get_logger(__name__)


class TokenUses:
    """Hashes of the secrets that requests carried since the last write, valid or not. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._noted: dict[str, float] = {}

    def note(self, secret: str) -> None:
        """Note a use of a secret. An operation on a dict is atomic under the GIL."""
        sha256 = hash_token(secret)
        if sha256 in self._noted or len(self._noted) < MOST_NOTED:
            self._noted[sha256] = self._clock()

    def write(self, database: Database) -> None:
        """Write the noted uses of valid tokens; other secrets match no row."""
        noted, self._noted = self._noted, {}
        if not noted:
            return
        with database.writing() as session:
            for sha256, at in sorted(noted.items()):
                valid = (
                    AccessToken.revoked_at.is_(None),
                    or_(AccessToken.expires_at.is_(None), AccessToken.expires_at > at),
                )
                query = update(AccessToken).where(AccessToken.sha256 == sha256, *valid).values(last_used_at=at)
                session.execute(query.execution_options(synchronize_session=False))

    async def keep_writing(self, database: Database) -> None:
        """Write every FLUSH_S seconds until cancelled; an unavailable database is tried again."""
        while True:
            await anyio.sleep(FLUSH_S)
            try:
                await run_sync(self.write, database)
            except Exception:  # last uses are not worth the service
                _log.exception("cannot write the last uses of tokens")
