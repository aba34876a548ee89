"""The parameters and responses that endpoints share that create something once per idempotency key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request, Response
from pydantic import BaseModel

from gxpo_services.api.answers import answer
from gxpo_services.api.dependencies import Settings, Submitter, WriteSession
from gxpo_services.api.errors import responses
from gxpo_services.api.idempotency import IdempotencyHeader


@dataclass(frozen=True, slots=True)
class _Submission:
    """Who creates what: principal, settings, session and idempotency key of a request."""

    principal: Submitter
    settings: Settings
    session: WriteSession
    request: Request
    key: IdempotencyHeader = None

    def created(self, body: BaseModel, is_new: bool, route: str, **path: str) -> Response:
        """201 for a new resource, 200 for one created before with this key, with its location."""
        location = self.request.url_for(route, **path).path
        return answer(body, 201 if is_new else 200, Location=location)


Submission = Annotated[_Submission, Depends(_Submission, scope="function")]


def creation_responses(model: type[BaseModel], what: str, created: str, repeated: str) -> dict[int | str, Any]:
    """Responses of such an endpoint. what: the resource that Location names."""
    headers = {"Location": {"description": f"URL of the {what}.", "schema": {"type": "string"}}}
    return {
        200: {"model": model, "description": repeated, "headers": headers},
        201: {"description": created, "headers": headers},
        **responses(400, 409, 410, 413, 429),
    }
