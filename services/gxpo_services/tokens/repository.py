"""SQL of access tokens."""

from __future__ import annotations

import time

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from gxpo_services.access.principals import Role
from gxpo_services.db.tables.tokens import AccessToken


def all_tokens(session: Session) -> list[AccessToken]:
    return list(session.scalars(select(AccessToken).order_by(AccessToken.id)))


def count_admins(session: Session) -> int:
    """Admin tokens that work now."""
    query = select(func.count()).where(
        AccessToken.role == Role.ADMIN.word,
        AccessToken.revoked_at.is_(None),
        (AccessToken.expires_at.is_(None)) | (AccessToken.expires_at > time.time()),
    )
    return session.scalar(query) or 0
