"""Making and revoking access tokens."""

from __future__ import annotations

import os
import time
from pathlib import Path

from sqlalchemy.orm import Session

from gxpo_services.auth import Role, hash_token, new_token
from gxpo_services.errors import Conflict, NotFound
from gxpo_services.ids import new_id
from gxpo_services.runs import events
from gxpo_services.tokens import repository
from gxpo_services.tokens.models import AccessToken
from gxpo_services.tokens.schemas import NewTokenView, TokenRequest, TokenView


def create(session: Session, request: TokenRequest, *, actor: str) -> NewTokenView:
    """Make a token; the answer holds its secret, which is stored nowhere."""
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
    repository.add(session, row)
    events.record(
        session, None, actor, "token_created", f"token {request.name!r} ({request.role}) was made", token=row.id
    )
    return NewTokenView(token=secret, **view(row).model_dump())


def revoke(session: Session, token_id: str, *, actor: str) -> TokenView:
    """Revoke a token. Raises NotFound; Conflict for the last admin token, without which nobody could make another."""
    row = repository.get(session, token_id)
    if row is None:
        raise NotFound(f"there is no token {token_id}")
    if row.revoked_at is None:
        expired = row.expires_at is not None and row.expires_at <= time.time()
        if row.role == Role.ADMIN.word and not expired and repository.count_admins(session) == 1:
            raise Conflict("this is the last admin token; make another one before you revoke it")
        row.revoked_at = time.time()
        events.record(session, None, actor, "token_revoked", f"token {row.name!r} was revoked", token=row.id)
    return view(row)


def list_tokens(session: Session) -> list[TokenView]:
    return [view(row) for row in repository.all_tokens(session)]


def view(row: AccessToken) -> TokenView:
    return TokenView.model_validate(
        {name: getattr(row, name) for name in TokenView.model_fields},
    )


def ensure_local_token(session: Session, file: Path) -> str:
    """The token of this machine's owner: read from its file, or made at the first start (mode 0600)."""
    if file.exists():
        secret = file.read_text(encoding="utf-8").strip()
        if repository.find_by_secret(session, secret) is not None:
            return secret
    made = create(session, TokenRequest(name="local", role="admin"), actor="first start")
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(file.name + ".part")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(made.token + "\n")
    partial.replace(file)
    return made.token
