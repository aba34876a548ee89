"""Base class, constraint names and column types of all tables."""

from __future__ import annotations

from sqlalchemy import JSON, BigInteger, Integer, MetaData
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase

# Names for every constraint, so that migrations can drop them on both engines.
NAMING = {
    "ix": "ix_%(column_0_label)s",
    "uq": "uq_%(table_name)s_%(column_0_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s",
    "pk": "pk_%(table_name)s",
}

Json = JSON().with_variant(JSONB(), "postgresql")
NullableJson = JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")
"""None is SQL's NULL, not JSON's null."""
Number = BigInteger().with_variant(Integer(), "sqlite")
"""Row numbers; SQLite auto-increments only INTEGER columns."""


class Base(DeclarativeBase):
    """Base of all tables."""

    metadata = MetaData(naming_convention=NAMING)
