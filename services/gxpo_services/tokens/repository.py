"""SQL of access tokens."""

from __future__ import annotations

import time

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from gxpo_services.access.principals import Role
from gxpo_services.db.tables.tokens import AccessToken


def tokens_after(session: Session, after: str | None, limit: int) -> list[AccessToken]:
    """Tokens in order of their ids, which is that of creation; after: only those with a greater id."""
    query = select(AccessToken).order_by(AccessToken.id).limit(limit)
    return list(session.scalars(query if after is None else query.where(AccessToken.id > after)))


def count_admins(session: Session) -> int:
    """Admin tokens that work now."""
    query = select(func.count()).where(
        AccessToken.role == Role.ADMIN.word,
        AccessToken.revoked_at.is_(None),
        (AccessToken.expires_at.is_(None)) | (AccessToken.expires_at > time.time()),
    )
    return session.scalar(query) or 0
