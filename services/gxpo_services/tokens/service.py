"""Create, list and revoke access tokens."""

from __future__ import annotations

import time

from sqlalchemy.orm import Session

from gxpo_services.access.principals import Role, hash_token, new_token
from gxpo_services.api import cursors
from gxpo_services.api.errors import Conflict, NotFound
from gxpo_services.api.ids import new_id
from gxpo_services.db.tables.tokens import AccessToken
from gxpo_services.events import repository as events
from gxpo_services.tokens import repository
from gxpo_services.tokens.schemas import NewTokenView, TokenPage, TokenRequest, TokenView

_ORDER = "+tokens"


def create(session: Session, request: TokenRequest, *, actor: str) -> NewTokenView:
    """Create a token; the response contains its secret, which is not stored."""
    secret = new_token()
    now = time.time()
    row = AccessToken(
        id=new_id("t", now),
        name=request.name,
        role=request.role,
        sha256=hash_token(secret),
        created_at=now,
        created_by=actor,
        expires_at=now + request.days * 86400 if request.days else None,
        revoked_at=None,
    )
    session.add(row)
    session.flush()
    events.record(
        session, None, actor, "token_created", f"token {request.name!r} ({request.role}) was created", token=row.id
    )
    return NewTokenView(token=secret, **view(row).model_dump())


def revoke(session: Session, token_id: str, *, actor: str) -> TokenView:
    """Revoke a token. Raises NotFound; Conflict for the last valid admin token."""
    row = session.get(AccessToken, token_id)
    if row is None:
        raise NotFound(f"there is no token {token_id}")
    if row.revoked_at is None:
        expired = row.expires_at is not None and row.expires_at <= time.time()
        if row.role == Role.ADMIN.word and not expired and repository.count_admins(session) == 1:
            raise Conflict("this is the last admin token; create another one first")
        row.revoked_at = time.time()
        events.record(session, None, actor, "token_revoked", f"token {row.name!r} was revoked", token=row.id)
    return view(row)


def list_tokens(session: Session, cursor: str | None, limit: int) -> TokenPage:
    """Oldest first. Raises Invalid for a cursor of another list."""
    after = None if cursor is None else str(cursors.decode(cursor, _ORDER, "text").value)
    found = repository.tokens_after(session, after, limit + 1)
    more = cursors.encode(_ORDER, cursors.Position(found[limit - 1].id, 0)) if len(found) > limit else None
    return TokenPage(items=[view(row) for row in found[:limit]], next_cursor=more)


def view(row: AccessToken) -> TokenView:
    return TokenView.model_validate(
        {name: getattr(row, name) for name in TokenView.model_fields},
    )
