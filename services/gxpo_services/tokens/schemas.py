"""Requests and answers about access tokens."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

RoleWord = Literal["viewer", "submitter", "admin"]


class TokenRequest(BaseModel):
    """A token to make."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(min_length=1, max_length=100, description="Whose it is, for people.", examples=["ci"])
    role: RoleWord = Field("viewer", description="viewer reads, submitter runs, admin manages tokens.")
    days: float | None = Field(None, gt=0, le=36500, description="Days until it expires; none: never.")


class TokenView(BaseModel):
    """A token without its secret. Times are seconds since 1970."""

    id: str
    name: str
    role: RoleWord
    created_at: float
    created_by: str
    expires_at: float | None
    revoked_at: float | None


class NewTokenView(TokenView):
    """A token just made; the secret is shown this once."""

    token: str
