"""Errors of the API as RFC 9457 problem details. `type` is a link to the kind's paragraph at `/api/v1/problems`."""

from __future__ import annotations

import html
import re
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from psycopg.errors import DiskFull
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.exc import DBAPIError, TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from gxpo_services.db.database import UNAVAILABLE, ServerSilent
from gxpo_services.logging import get_logger
from gxpo_trainer.config.messages import phrase

MEDIA_TYPE = "application/problem+json"
_log = get_logger(__name__)
PROBLEM = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDetails"}}}


class FieldError(BaseModel):
    """One invalid part of a request."""

    field: str = Field(description="Dotted path of the setting or parameter.", examples=["config.learner.rule.k"])
    message: str = Field(description="What is wrong and how to fix it.", examples=["must be at least 2"])


class ProblemDetails(BaseModel):
    """RFC 9457 problem details."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(
        "about:blank",
        description="URI of the kind of problem, relative to the service: where it is explained.",
        examples=["/api/v1/problems#not-found"],
    )
    title: str = Field(description="The kind of problem in words.", examples=["Not found"])
    status: int = Field(description="The HTTP status.", examples=[404])
    detail: str = Field("", description="This occurrence in words.", examples=["there is no run r0123"])
    errors: list[FieldError] = Field([], description="Every bad field.")


PROBLEMS = "/api/v1/problems"


class Problem(Exception):
    """Base of all error responses; `extra` become members of the problem.

    The docstring of a kind is its explanation at PROBLEMS.
    """

    status: ClassVar[int]
    title: ClassVar[str]
    type: ClassVar[str]

    def __init_subclass__(cls, *, status: int, title: str) -> None:
        cls.status, cls.title = status, title
        cls.type = PROBLEMS + "#" + re.sub(r"(?<!^)(?=[A-Z])", "-", cls.__name__).lower()

    def __init__(self, detail: str, *, errors: list[FieldError] | None = None, **extra: Any) -> None:
        super().__init__(detail)
        self.detail, self.errors, self.extra = detail, errors or [], extra


class Unauthorized(Problem, status=401, title="Sign in"):
    """No token, or one that is unknown, revoked or expired."""


class Forbidden(Problem, status=403, title="Not allowed"):
    """The token's role does not allow it."""


class BadRequest(Problem, status=400, title="Bad request"):
    """The request is not valid HTTP."""


class MethodNotAllowed(Problem, status=405, title="Method not allowed"):
    """The address has other methods; the header Allow names them."""


class NotFound(Problem, status=404, title="Not found"):
    """There is no such resource."""


class Conflict(Problem, status=409, title="Conflict"):
    """The request conflicts with the current state."""


class Gone(Problem, status=410, title="Gone"):
    """The resource was deleted."""


class PreconditionFailed(Problem, status=412, title="Changed meanwhile"):
    """The resource is not the one that If-Match names: read it again, and repeat the change."""


class RangeNotSatisfiable(Problem, status=416, title="Range not satisfiable"):
    """The requested range lies behind the end of the file."""


class LimitReached(Problem, status=429, title="Limit reached"):
    """The token has too many queued runs or open streams, or the service has too many open streams."""


class InternalError(Problem, status=500, title="Internal error"):
    """The service failed. Its log has the cause under the request id."""


class TooLarge(Problem, status=413, title="Too large"):
    """The body, or a list in it, exceeds its limit."""


class TooSlow(Problem, status=408, title="Too slow"):
    """The head or the body of the request did not arrive in time."""


class HeadTooLarge(Problem, status=431, title="Head too large"):
    """The address and the headers together are too long."""


class Unavailable(Problem, status=503, title="Unavailable"):
    """A dependency is unavailable; a retry may succeed."""


class Invalid(Problem, status=422, title="Invalid request"):
    """The request is invalid, or its body is not JSON; `errors` names every invalid setting."""

    @classmethod
    def of(cls, field: str, message: str) -> Invalid:
        """The error for a single invalid setting or parameter."""
        return cls(f"{field}: {message}", errors=[FieldError(field=field, message=message)])


def problem_response(
    kind: type[Problem],
    detail: str,
    errors: Sequence[FieldError] = (),
    *,
    headers: Mapping[str, str] | None = None,
    **extra: Any,
) -> JSONResponse:
    about = {"type": kind.type, "title": kind.title, "status": kind.status}
    body = {**about, "detail": detail, "errors": [error.model_dump() for error in errors], **extra}
    own = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "2"}}.get(kind.status, {})
    return JSONResponse(body, kind.status, headers={**own, **(headers or {})}, media_type=MEDIA_TYPE)


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Error responses of a path for the OpenAPI description."""
    return {status: {"description": _BY_STATUS[status].title, "content": PROBLEM} for status in statuses}


def install(app: FastAPI) -> None:
    """Convert every error into problem details."""

    @app.exception_handler(Problem)
    def _problem(_: Request, error: Problem) -> JSONResponse:
        return problem_response(type(error), error.detail, error.errors, **error.extra)

    @app.exception_handler(RequestValidationError)
    def _validation(_: Request, error: RequestValidationError) -> JSONResponse:
        errors = [FieldError(field=_path(item["loc"]), message=describe_error(item)) for item in error.errors()]
        named = "; ".join(f"{item.field}: {item.message}" for item in errors[:5])
        return problem_response(Invalid, named, errors)

    @app.exception_handler(HTTPException)
    def _http(request: Request, error: HTTPException) -> JSONResponse:
        kind, headers = _BY_STATUS[error.status_code], dict(error.headers or {})
        if kind is MethodNotAllowed:  # Starlette names the methods of one route, and each route here has one
            matching = (route for route in request.app.routes if isinstance(route, Route))
            matching = (route for route in matching if route.matches(request.scope)[0] is not Match.NONE)
            headers["Allow"] = ", ".join(sorted({method for route in matching for method in route.methods or ()}))
        return problem_response(kind, str(error.detail), headers=headers)

    def _database(_: Request, error: PoolTimeout | DBAPIError) -> JSONResponse:
        if isinstance(error, PoolTimeout):
            return problem_response(Unavailable, "every database connection is in use; retry")
        # The statement and its values go to the log, not to the client.
        _log.warning("the database is unavailable", error=str(error))
        return problem_response(Unavailable, f"the database is unavailable: {_reason(error.orig)}")

    for kind in (PoolTimeout, *UNAVAILABLE):
        app.exception_handler(kind)(_database)

    @app.get(PROBLEMS, include_in_schema=False)
    async def problems() -> HTMLResponse:
        """What each kind of problem means."""
        return HTMLResponse(_PAGE)


_BY_STATUS: dict[int, type[Problem]] = {kind.status: kind for kind in Problem.__subclasses__()}


_PAGE = '<!doctype html><html lang="en"><meta charset="utf-8"><title>gxpo: problems</title><h1>Problems</h1>' + "".join(
    f'<h2 id="{kind.type.rpartition("#")[2]}">{status} {kind.title}</h2><p>{html.escape(kind.__doc__ or "")}</p>'
    for status, kind in sorted(_BY_STATUS.items())
)


def _reason(error: BaseException | None) -> object:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_FULL or isinstance(error, DiskFull):
        return "its disk is full; free space"
    if code == sqlite3.SQLITE_READONLY:
        return "it is read-only; check the owner of its file"
    return error if isinstance(error, ServerSilent) else type(error).__name__


def describe_error(error: Mapping[str, Any]) -> str:
    """Describe one of pydantic's errors of a request."""
    if error["type"] == "json_invalid":
        return f"is not valid JSON: {error['ctx']['error']}"
    if isinstance(error.get("input"), bytes):  # left unread
        return 'is not JSON; send the header "Content-Type: application/json"'
    no_object = error["type"] in ("dict_type", "model_type", "dataclass_type", "model_attributes_type")
    return "must be a JSON object" if no_object else phrase(error)


def _path(location: tuple[int | str, ...]) -> str:
    """`body.config.learner` → `config.learner`; query and path parameters by their name."""
    parts = [str(part) for part in location]
    return ".".join(parts[1:] if len(parts) > 1 and parts[0] in ("body", "query", "path", "header") else parts)
