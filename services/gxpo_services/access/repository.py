"""SQL of token look-ups."""

from __future__ import annotations

import time

from sqlalchemy import Connection, bindparam, select
from sqlalchemy.orm import Session

from gxpo_services.access.principals import Principal, Role, hash_token
from gxpo_services.db.tables.tokens import AccessToken

_table = AccessToken.__table__.c
_BY_SECRET = select(_table.id, _table.name, _table.role, _table.revoked_at, _table.expires_at).where(
    _table.sha256 == bindparam("sha256")
)


def find_by_secret(database: Session | Connection, token: str) -> Principal | None:
    """The principal of a valid, unexpired secret. Runs on every request, so it takes a connection."""
    row = database.execute(_BY_SECRET, {"sha256": hash_token(token)}).one_or_none()
    if row is None or row.revoked_at is not None or (row.expires_at is not None and row.expires_at <= time.time()):
        return None
    return Principal(row.id, row.name, Role.of(row.role))
