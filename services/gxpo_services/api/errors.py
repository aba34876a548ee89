"""Errors of the API as RFC 9457 problem details."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException

MEDIA_TYPE = "application/problem+json"
PROBLEM = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDetails"}}}
"""Content of an error response in the OpenAPI description."""


class FieldError(BaseModel):
    """One invalid part of a request."""

    field: str = Field(description="Dotted path of the setting or parameter.", examples=["config.learner.rule.k"])
    message: str = Field(description="What is wrong and how to fix it.", examples=["must be at least 2"])


class ProblemDetails(BaseModel):
    """RFC 9457 problem details."""

    model_config = ConfigDict(extra="allow")

    type: str = Field("about:blank", description="URI of the kind of problem.")
    title: str = Field(description="The kind of problem in words.", examples=["Not found"])
    status: int = Field(description="The HTTP status.", examples=[404])
    detail: str = Field("", description="This occurrence in words.", examples=["there is no run r0123"])
    errors: list[FieldError] = Field([], description="Every bad field.")


class Problem(Exception):
    """Base of all error responses; `extra` become members of the problem."""

    status: ClassVar[int]
    title: ClassVar[str]

    def __init_subclass__(cls, *, status: int, title: str) -> None:
        cls.status, cls.title = status, title

    def __init__(self, detail: str, *, errors: list[FieldError] | None = None, **extra: Any) -> None:
        super().__init__(detail)
        self.detail, self.errors, self.extra = detail, errors or [], extra


class Unauthorized(Problem, status=401, title="Sign in"):
    """No token, or one that is unknown, revoked or expired."""


class Forbidden(Problem, status=403, title="Not allowed"):
    """The token's role does not allow it."""


class NotFound(Problem, status=404, title="Not found"):
    """There is no such resource."""


class Conflict(Problem, status=409, title="Conflict"):
    """The request conflicts with the current state."""


class Gone(Problem, status=410, title="Gone"):
    """The resource was deleted."""


class TooLarge(Problem, status=413, title="Too large"):
    """The body, or a list in it, exceeds its limit."""


class TooSlow(Problem, status=408, title="Too slow"):
    """The body did not arrive in time."""


class Unavailable(Problem, status=503, title="Unavailable"):
    """A dependency is unavailable; a retry may succeed."""


class Invalid(Problem, status=422, title="Invalid request"):
    """A well-formed but invalid request; `errors` names every invalid setting."""

    @classmethod
    def of(cls, field: str, message: str) -> Invalid:
        """The error for a single invalid setting or parameter."""
        return cls(f"{field}: {message}", errors=[FieldError(field=field, message=message)])


def problem_response(
    status: int,
    title: str,
    detail: str,
    errors: list[FieldError] | None = None,
    *,
    headers: Mapping[str, str] | None = None,
    **extra: Any,
) -> JSONResponse:
    body = {
        "type": "about:blank",
        "title": title,
        "status": status,
        "detail": detail,
        "errors": [error.model_dump() for error in errors or []],
        **extra,
    }
    own = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "2"}}.get(status, {})
    return JSONResponse(body, status, headers={**own, **(headers or {})}, media_type=MEDIA_TYPE)


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Error responses of a path for the OpenAPI description."""
    titles = {kind.status: kind.title for kind in Problem.__subclasses__()} | {400: "Bad request", 405: "Not a method"}
    return {status: {"description": titles.get(status, "Error"), "content": PROBLEM} for status in statuses}


def install(app: FastAPI) -> None:
    """Convert every error into problem details."""

    @app.exception_handler(Problem)
    def _problem(_: Request, error: Problem) -> JSONResponse:
        return problem_response(error.status, error.title, error.detail, error.errors, **error.extra)

    @app.exception_handler(RequestValidationError)
    def _validation(_: Request, error: RequestValidationError) -> JSONResponse:
        found = [FieldError(field=_path(item["loc"]), message=item["msg"]) for item in error.errors()]
        named = "; ".join(f"{item.field}: {item.message}" for item in found[:5])
        return problem_response(422, Invalid.title, named, found)

    @app.exception_handler(HTTPException)
    def _http(_: Request, error: HTTPException) -> JSONResponse:
        # The headers say which methods there are (405).
        return problem_response(error.status_code, str(error.detail), str(error.detail), headers=error.headers)

    @app.exception_handler(PoolTimeout)
    def _busy(_: Request, __: PoolTimeout) -> JSONResponse:
        return problem_response(503, Unavailable.title, "every database connection is in use; retry")

    @app.exception_handler(OperationalError)
    def _database(_: Request, error: OperationalError) -> JSONResponse:
        # The statement and its values go to the log, not to the client.
        return problem_response(503, Unavailable.title, f"the database is unavailable: {type(error.orig).__name__}")


def _path(location: tuple[int | str, ...]) -> str:
    """`body.config.learner` → `config.learner`; query and path parameters by their name."""
    parts = [str(part) for part in location]
    return ".".join(parts[1:] if len(parts) > 1 and parts[0] in ("body", "query", "path", "header") else parts)
