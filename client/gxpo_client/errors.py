"""Errors of calls to the service."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx


class ServiceError(Exception):
    """An error response, or none (status None).

    errors: (dotted path, message) of every invalid setting. left_out: runs that a comparison could not use, each
    {"run", "name", "reason"}.
    """

    def __init__(
        self,
        detail: str,
        *,
        status: int | None = None,
        title: str = "",
        errors: Sequence[tuple[str, str]] = (),
        left_out: Sequence[dict[str, Any]] = (),
    ) -> None:
        super().__init__(detail or title)
        self.left_out = list(left_out)
        self.status, self.title, self.detail, self.errors = status, title, detail, list(errors)


class ServiceUnavailable(ServiceError):
    """No response, or 502, 503 or 504: a retry may succeed."""


class NotSignedIn(ServiceError):
    """401, or no request: the token is missing, malformed, unknown, revoked or expired."""


class Refused(ServiceError):
    """Any other error response, or one that is not the service's."""


class InvalidRequest(Refused):
    """400 or 422: the request is invalid."""


class NotFound(Refused):
    """404 or 410: there is no such resource."""


def error_of(response: httpx.Response) -> ServiceError:
    """Problem details as an error; so is the success of another server."""
    try:
        body = response.json()
    except ValueError:
        body = None
    body = body if isinstance(body, dict) else {}
    # Another server may have something else under these names.
    errors, left_out = (value if isinstance(value := body.get(name), list) else [] for name in ("errors", "left_out"))
    named = [(str(e.get("field", "")), str(e.get("message", ""))) for e in errors if isinstance(e, dict)]
    status, title = response.status_code, str(body.get("title") or response.reason_phrase or "error")
    if response.is_success:
        where = response.url.copy_with(query=None)
        title = f"the answer of {where} is not from a gxpo service; check --url or GXPO_URL"
    kinds: dict[int, type[ServiceError]] = {
        **dict.fromkeys((400, 422), InvalidRequest),
        **dict.fromkeys((404, 410), NotFound),
        **dict.fromkeys((502, 503, 504), ServiceUnavailable),
        401: NotSignedIn,
    }
    detail = str(body.get("detail") or "")
    return kinds.get(status, Refused)(detail, status=status, title=title, errors=named, left_out=left_out)
