"""`/tokens`: management of access tokens, for admins."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from gxpo_services.api.dependencies import Admin, ReadSession, ServiceRoute, Viewer, WriteSession
from gxpo_services.api.errors import responses
from gxpo_services.api.fields import Text
from gxpo_services.tokens import service
from gxpo_services.tokens.schemas import NewTokenView, OwnTokenView, RoleWord, TokenPage, TokenRequest, TokenView

router = APIRouter(route_class=ServiceRoute, prefix="/tokens", tags=["tokens"], responses=responses(401, 403, 422, 503))


@router.get("/me", summary="The current token")
def me(principal: Viewer) -> OwnTokenView:
    """Name, id and role of the current token."""
    role: RoleWord = principal.role.word  # type: ignore[assignment]
    return OwnTokenView(id=principal.token_id, name=principal.name, role=role)


@router.get("", summary="List tokens")
def list_tokens(
    _: Admin,
    session: ReadSession,
    limit: Annotated[int, Query(ge=1, le=200, description="Page size.")] = 50,
    cursor: Annotated[Text | None, Query(max_length=2000, description="`next_cursor` of the previous page.")] = None,
) -> TokenPage:
    """Tokens including revoked ones, without secrets, oldest first."""
    return service.list_tokens(session, cursor, limit)


@router.post("", status_code=201, summary="Create a token")
def create_token(request: TokenRequest, principal: Admin, session: WriteSession) -> NewTokenView:
    """The response contains the secret, which is shown only once."""
    return service.create(session, request, actor=principal.actor)


@router.delete("/{token_id}", summary="Revoke a token", responses=responses(404, 409))
def revoke_token(token_id: str, principal: Admin, session: WriteSession) -> TokenView:
    """The token is invalid immediately; its record is kept."""
    return service.revoke(session, token_id, actor=principal.actor)
