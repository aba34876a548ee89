"""Idempotency keys: a request retried after a lost response returns what the first one created."""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import suppress
from typing import Annotated

from fastapi import Header
from pydantic import BaseModel
from sqlalchemy import delete, select, tuple_
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import NoResultFound
from sqlalchemy.orm import Session

from gxpo_services.access.principals import Principal
from gxpo_services.api.errors import Conflict
from gxpo_services.db.tables.tokens import IdempotencyKey

IdempotencyHeader = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        pattern=r"^[\x21-\x7e]{1,200}$",
        description="Makes a request safe to repeat: the same key and body get the same answer, another body 409.",
    ),
]


def claim(session: Session, principal: Principal, key: str | None, action: str, body: BaseModel, new: str) -> str:
    """Id of the resource to create (`new`), or of the one that an identical request with this key created.

    action: part of what the key stands for. Keys are scoped to a token. A failed request releases its key with its
    transaction. Keys expire after GXPO_IDEMPOTENCY_S (scheduling/scheduler.py). Raises Conflict when the key was used
    for a different request.
    """
    if key is None:
        return new
    content = json.dumps([action, body.model_dump()], sort_keys=True, default=str)
    sha256 = hashlib.sha256(content.encode("utf-8", "backslashreplace")).hexdigest()
    mine = IdempotencyKey(
        token_id=principal.token_id, key=key, body_sha256=sha256, resource_id=new, created_at=time.time()
    )
    owner = None
    while owner is None:
        # The scheduler may delete an expired key between the two statements of _claim_key.
        with suppress(NoResultFound):
            owner = _claim_key(session, mine)
    if owner.body_sha256 != sha256:
        raise Conflict(f"Idempotency-Key {key!r} was used for a different request; use a new key")
    return owner.resource_id


def _claim_key(session: Session, key: IdempotencyKey) -> IdempotencyKey:
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
