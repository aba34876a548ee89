"""Access tokens. Only their hashes are stored."""

from __future__ import annotations

from sqlalchemy import String
from sqlalchemy.orm import Mapped, mapped_column

from gxpo_services.db import Base


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
