"""SQL of idempotency keys."""

from __future__ import annotations

from sqlalchemy import delete, select, tuple_
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from gxpo_services.db.tables.tokens import IdempotencyKey


def claim_key(session: Session, key: IdempotencyKey) -> IdempotencyKey:
    """The row that owns an idempotency key: `key` itself, or the one stored before.

    A concurrent transaction with the same key blocks here until the first one ends.
    """
    insert = sqlite.insert if session.get_bind().dialect.name == "sqlite" else postgresql.insert
    columns = IdempotencyKey.__table__.columns
    values = {column.key: getattr(key, column.key) for column in columns}
    made = session.execute(insert(IdempotencyKey).values(**values).on_conflict_do_nothing())
    if made.rowcount == 1:  # type: ignore[attr-defined]
        return key
    return session.get_one(IdempotencyKey, (key.token_id, key.key))


def delete_expired_keys(session: Session, before: float, most: int) -> int:
    """Delete at most `most` idempotency keys older than `before`; returns how many.

    Skips keys that another scheduler is deleting.
    """
    columns = (IdempotencyKey.token_id, IdempotencyKey.key)
    query = select(*columns).where(IdempotencyKey.created_at < before).limit(most).with_for_update(skip_locked=True)
    old = [tuple(row) for row in session.execute(query)]
    if old:
        gone = delete(IdempotencyKey).where(tuple_(*columns).in_(old))
        session.execute(gone.execution_options(synchronize_session=False))
    return len(old)
