"""Requests and answers about access tokens."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from gxpo_services.api.fields import Text

RoleWord = Literal["metrics", "viewer", "submitter", "admin"]


class TokenRequest(BaseModel):
    """A token to create."""

    model_config = ConfigDict(extra="forbid")

    name: Text = Field(min_length=1, max_length=100, description="Name of its owner.", examples=["ci"])
    role: RoleWord = Field(
        "viewer",
        description="metrics: only /metrics; viewer: read; submitter: submit, control; admin: tokens too.",
    )
    days: float | None = Field(None, gt=0, le=36500, description="Days until it expires; null: never.")


class OwnTokenView(BaseModel):
    """The token of the request."""

    id: str
    name: str
    role: RoleWord


class TokenView(BaseModel):
    """A token without its secret. Times are seconds since 1970."""

    id: str
    name: str
    role: RoleWord
    created_at: float
    created_by: str
    expires_at: float | None
    revoked_at: float | None
    last_used_at: float | None = Field(description="To within a minute; null: never used.")


class TokenPage(BaseModel):
    """A page of the list of tokens, oldest first."""

    items: list[TokenView]
    next_cursor: str | None = Field(description="Cursor of the next page; null at the end.")


class NewTokenView(TokenView):
    """A new token with its secret, which is shown only once."""

    token: str
