"""`/tokens`: create, list and revoke access tokens; and the local admin token of the first start on one machine."""

from __future__ import annotations

import time
from contextlib import closing
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from gxpo_services.api.dependencies import Admin, ReadSession, ServiceRoute, Viewer, WriteSession
from gxpo_services.api.errors import Conflict, NotFound, responses
from gxpo_services.api.fields import Body, Page, PageQuery, Text, TokenId, decode_cursor, encode_cursor, new_id
from gxpo_services.api.principals import find_by_secret, hash_token, new_token
from gxpo_services.db.database import Database
from gxpo_services.db.migrate import upgrade
from gxpo_services.db.tables import AccessToken
from gxpo_services.outputs import events
from gxpo_services.settings import ServiceSettings, make_home
from gxpo_trainer.jsonl import replace_file

RoleWord = Literal["metrics", "viewer", "submitter", "admin"]


class TokenRequest(Body):
    """A token to create."""

    name: Text = Field(min_length=1, max_length=100, description="Name of its owner.", examples=["ci"])
    role: RoleWord = Field("viewer", description="Each role includes those before it; metrics reads only /metrics.")
    days: float | None = Field(None, gt=0, le=36500, description="Days until it expires; null: never.")


class OwnTokenView(BaseModel):
    """The token of the request."""

    id: str
    name: str
    role: RoleWord


class TokenView(BaseModel):
    """A token without its secret. Times are seconds since 1970."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    name: str
    role: RoleWord
    created_at: float
    created_by: str
    expires_at: float | None
    revoked_at: float | None
    last_used_at: float | None = Field(description="To within a minute; null: never used.")


class TokenPage(Page[TokenView]):
    """A page of the list of tokens, oldest first."""


class NewTokenView(TokenView):
    """A new token with its secret, which is shown only once."""

    token: str


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
        created_by=actor[:100],  # as long as the column: an actor is longer than its token's name
        expires_at=now + request.days * 86400 if request.days else None,
        revoked_at=None,
    )
    session.add(row)
    session.flush()
    events.record(
        session, None, actor, "token_created", f"token {request.name!r} ({request.role}) was created", token=row.id
    )
    return NewTokenView(token=secret, **TokenView.model_validate(row).model_dump())


router = APIRouter(route_class=ServiceRoute, prefix="/tokens", tags=["tokens"], responses=responses(401, 422, 503))


@router.get("/me", summary="The current token")
def me(principal: Viewer) -> OwnTokenView:
    """Name, id and role of the current token."""
    role: RoleWord = principal.role.word  # type: ignore[assignment]
    return OwnTokenView(id=principal.token_id, name=principal.name, role=role)


@router.get("", summary="List tokens")
def list_tokens(page: Annotated[PageQuery, Query()], _: Admin, session: ReadSession) -> TokenPage:
    """Tokens including revoked ones, without secrets, oldest first."""
    query = select(AccessToken).order_by(AccessToken.id).limit(page.limit + 1)  # ids ascend with their creation
    if page.cursor is not None:
        query = query.where(AccessToken.id > str(decode_cursor(page.cursor, _ORDER, "text")[0]))
    rows = session.scalars(query).all()
    more = encode_cursor(_ORDER, rows[page.limit - 1].id, 0) if len(rows) > page.limit else None
    return TokenPage(items=[TokenView.model_validate(row) for row in rows[: page.limit]], next_cursor=more)


@router.post("", status_code=201, summary="Create a token")
def create_token(request: TokenRequest, principal: Admin, session: WriteSession) -> NewTokenView:
    """The response contains the secret, which is shown only once."""
    return create(session, request, actor=principal.actor)


@router.delete("/{token_id}", summary="Revoke a token", responses=responses(404, 409))
def revoke_token(token_id: TokenId, principal: Admin, session: WriteSession) -> TokenView:
    """The token is invalid immediately; its record is kept."""
    row = session.get(AccessToken, token_id)
    if row is None:
        raise NotFound(f"there is no token {token_id}")
    if row.revoked_at is None:
        now = time.time()
        valid = or_(AccessToken.expires_at.is_(None), AccessToken.expires_at > now)
        admins = select(AccessToken.id).where(AccessToken.role == "admin", AccessToken.revoked_at.is_(None), valid)
        # Locked, or two who revoke each other at once would each see the other one.
        admins = admins.order_by(AccessToken.id).with_for_update()
        if row.role == "admin" and session.scalars(admins).all() == [token_id]:
            raise Conflict("this is the last admin token; create another one first")
        row.revoked_at = now
        events.record(session, None, principal.actor, "token_revoked", f"token {row.name!r} was revoked", token=row.id)
    return TokenView.model_validate(row)


def prepare_local(settings: ServiceSettings) -> None:
    """Migrate the database and create the local admin token (mode 0600) unless there is a valid one. Idempotent."""
    make_home(settings)
    upgrade(settings.url)
    file = settings.local_token_file
    with closing(Database(settings.url, settings.database_timeout_s)) as database, database.writing() as session:
        if not file.exists() or find_by_secret(session, file.read_text(encoding="utf-8").strip()) is None:
            made = create(session, TokenRequest(name="local", role="admin"), actor="first start")
            replace_file(file, made.token + "\n", 0o600)
