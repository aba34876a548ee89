"""Tables of access tokens, of which only hashes are stored, and of their idempotency keys."""

from __future__ import annotations

from sqlalchemy import String
from sqlalchemy.orm import Mapped, mapped_column

from gxpo_services.db.base import Base


class AccessToken(Base):
    """A bearer token of a person or a program."""

    __tablename__ = "tokens"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    name: Mapped[str] = mapped_column(String(100))
    role: Mapped[str] = mapped_column(String(20))
    sha256: Mapped[str] = mapped_column(String(64), unique=True)
    created_at: Mapped[float]
    created_by: Mapped[str] = mapped_column(String(100))
    expires_at: Mapped[float | None]
    revoked_at: Mapped[float | None]
    last_used_at: Mapped[float | None]
    """Written every TokenUses.FLUSH_S, so it may be that much older than the last request."""


class IdempotencyKey(Base):
    """Use of an idempotency key: the same key and body get the same response, another body is rejected."""

    __tablename__ = "idempotency_keys"

    token_id: Mapped[str] = mapped_column(String(32), primary_key=True)
    key: Mapped[str] = mapped_column(String(200), primary_key=True)
    body_sha256: Mapped[str] = mapped_column(String(64))
    resource_id: Mapped[str] = mapped_column(String(32))
    created_at: Mapped[float]
