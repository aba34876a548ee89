"""One key, one deed: a request that is repeated after a lost answer finds what the first one made."""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import suppress
from typing import Annotated

from fastapi import Header
from pydantic import BaseModel
from sqlalchemy.exc import NoResultFound
from sqlalchemy.orm import Session

from gxpo_services.access.principals import Principal
from gxpo_services.api.errors import Conflict
from gxpo_services.api.idempotency_keys import claim_key
from gxpo_services.db.tables.tokens import IdempotencyKey

IdempotencyHeader = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        pattern=r"^[\x21-\x7e]{1,200}$",
        description="Makes a request safe to repeat: the same key and body get the same answer, another body 409.",
    ),
]


def claim(session: Session, principal: Principal, key: str | None, deed: str, body: BaseModel, new: str) -> str:
    """Id of what this request is about to make (`new`), or of what an equal request with this key has made.

    deed: what is asked, so that one key cannot mean two things. Keys belong to their token. A request that fails
    gives its key back with its transaction. A key is forgotten after GXPO_IDEMPOTENCY_S (scheduling/scheduler.py).
    Raises Conflict when the key was used for another request.
    """
    if key is None:
        return new
    said = json.dumps([deed, body.model_dump()], sort_keys=True, default=str)
    sha256 = hashlib.sha256(said.encode("utf-8", "backslashreplace")).hexdigest()
    mine = IdempotencyKey(
        token_id=principal.token_id, key=key, body_sha256=sha256, resource_id=new, created_at=time.time()
    )
    owner = None
    while owner is None:
        # The scheduler may delete an old key between the two looks of claim_key: then it is free.
        with suppress(NoResultFound):
            owner = claim_key(session, mine)
    if owner.body_sha256 != sha256:
        raise Conflict(f"Idempotency-Key {key!r} was used for another request; use a new key, or repeat that request")
    return owner.resource_id
