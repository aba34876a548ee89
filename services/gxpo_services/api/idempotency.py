"""Requests that are safe to repeat: idempotency keys, `ETag` and `If-Match`, and responses made before the commit.

With an idempotency key a request retried after a lost response returns what the first one created. With `If-Match` no
change overwrites one that its author has not seen."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Header, Request, Response
from pydantic import BaseModel
from pydantic_core import to_json
from sqlalchemy import delete, select, tuple_
from sqlalchemy.orm import Session

from gxpo_services.api.dependencies import DatabaseDep, Found, Settings, Submitter, WriteSession
from gxpo_services.api.errors import Conflict, Gone, PreconditionFailed, responses
from gxpo_services.api.fields import new_id
from gxpo_services.db.database import INSERTS
from gxpo_services.db.tables import IdempotencyKey

IdempotencyHeader = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        pattern=r"^[\x21-\x7e]{1,200}$",
        description="Makes a request safe to repeat: the same key and body get the same answer, another body 409.",
    ),
]


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


IfMatch = Annotated[str | None, Header(max_length=1000, description="ETag of the version to change, or *; else 412.")]
_ETAG_HEADER = {"ETag": {"description": "Version of what can be edited; for If-Match.", "schema": {"type": "string"}}}
WITH_ETAG: dict[int | str, Any] = {200: {"headers": _ETAG_HEADER}}
"""Response of a route whose answer has that header."""


def etag(content: Any) -> str:
    """The entity tag of what people edit, from its JSON. Progress is no part of it, or no edit of a running run
    could succeed."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=False)
    return f'"{hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:32]}"'


def check_match(if_match: str | None, present: str, what: str) -> None:
    """Raise PreconditionFailed unless `If-Match` is missing, * or the present version."""
    if if_match not in (None, "*", present):
        raise PreconditionFailed(f"{what} was changed since that version; read it again, then repeat the change")


def answer(body: BaseModel, status: int = 200, **headers: str) -> Response:
    """A JSON response, serialized before the endpoint returns.

    FastAPI serializes a plain return value in another thread of its bounded pool while the transaction is still open.
    If every thread of the pool waits for a lock of that transaction, this deadlocks.
    """
    return Response(body.model_dump_json(), status, headers, "application/json")


def plain_answer(body: Mapping[str, Any]) -> Response:
    """A JSON response from plain values, without validation, which would cost more than the query."""
    return Response(to_json(body, inf_nan_mode="strings"), media_type="application/json")


def _has_key(principal: Submitter, database: DatabaseDep, key: IdempotencyHeader = None) -> bool:
    if key is None:
        return False
    with database.reading() as session:
        return session.get(IdempotencyKey, (principal.token_id, key)) is not None


IsRepeated = Annotated[bool, Depends(_has_key)]
"""Whether the request's key was used, so that its body need not be checked: what it names may be gone by now."""


@dataclass(frozen=True, slots=True)
class Creation:
    """Who creates what: principal, settings, session and idempotency key of a request."""

    principal: Submitter
    settings: Settings
    session: WriteSession
    request: Request
    key: IdempotencyHeader = None

    def claim(self, action: str, body: BaseModel, table: type[Found]) -> tuple[str, Found | None]:
        """Id of the run or group to create; and the one that an identical request with this key created, if any.

        action: part of what the key stands for. Keys are scoped to a token. A failed request releases its key with its
        transaction. Keys expire after GXPO_IDEMPOTENCY_S (scheduling/scheduler.py). Raises Conflict when the key was
        used for a different request, Gone when what it created was deleted.
        """
        kind = table.__name__.lower()
        new = new_id(kind[0])
        if self.key is None:
            return new, None
        # A field that requests of earlier versions lack counts only where it is set: their keys stay valid.
        later = {"clone_of"} if getattr(body, "clone_of", None) is None else None
        content = json.dumps([action, body.model_dump(exclude=later)], sort_keys=True, default=str)
        sha256 = hashlib.sha256(content.encode("utf-8", "backslashreplace")).hexdigest()
        mine = {"token_id": self.principal.token_id, "key": self.key, "body_sha256": sha256}
        insert = INSERTS[self.session.get_bind().dialect.name](IdempotencyKey).on_conflict_do_nothing()
        owner = None
        while owner is None:  # the scheduler may delete an expired key between the two statements
            # Waits for the end of a concurrent transaction with the same key.
            self.session.execute(insert.values(**mine, resource_id=new, created_at=time.time()))
            owner = self.session.get(IdempotencyKey, (self.principal.token_id, self.key))
        if owner.body_sha256 != sha256:
            raise Conflict(f"Idempotency-Key {self.key!r} was used for a different request; use a new key")
        if owner.resource_id == new:
            return new, None
        earlier = self.session.scalar(select(table).where(table.id == owner.resource_id))
        if earlier is None:
            raise Gone(f"{kind} {owner.resource_id}, created with this Idempotency-Key, was deleted; use a new key")
        return owner.resource_id, earlier

    def created(self, body: BaseModel, is_new: bool, route: str, **path: str) -> Response:
        """201 for a new resource, 200 for one created before with this key, with its location."""
        location = self.request.url_for(route, **path).path
        return answer(body, 201 if is_new else 200, Location=location)


Submission = Annotated[Creation, Depends(Creation, scope="function")]


def creating(model: type[BaseModel], what: str, created: str, repeated: str, *errors: int) -> dict[str, Any]:
    """Arguments of the route of such an endpoint. what: the resource that Location names."""
    headers = {"Location": {"description": f"URL of the {what}.", "schema": {"type": "string"}}}
    answers: dict[int | str, Any] = {
        200: {"model": model, "description": repeated, "headers": headers},
        201: {"description": created, "headers": headers},
        **responses(400, 409, 410, 413, 429, *errors),
    }
    return {"status_code": 201, "response_model": model, "responses": answers}
