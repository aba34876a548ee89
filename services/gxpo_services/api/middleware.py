"""What every request has: an id, a limited body, access log and Prometheus metrics. And the OpenAPI description."""

from __future__ import annotations

import re
import secrets
import time
from typing import Any

import anyio
import structlog
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gxpo_services.api.errors import (
    InternalError,
    ProblemDetails,
    TooLarge,
    TooSlow,
    problem_response,
    responses,
)
from gxpo_services.logging import get_logger
from gxpo_services.settings import ServiceSettings

_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_log = get_logger("gxpo_services.requests")


class HttpMetrics:
    """Prometheus metrics of the API in their own registry, so that a process can host several applications."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(namespace="gxpo", registry=self.registry)  # descriptors and memory
        labels = ("method", "path", "status")
        self.requests = Counter("gxpo_http_requests", "Requests answered.", labels, registry=self.registry)
        self.seconds = Histogram(
            "gxpo_http_request_seconds", "Time to answer.", ("method", "path"), registry=self.registry
        )


class _Refused(Exception):
    """The body was refused while it was received; nothing of the application's response is sent."""


class _Exchange:
    """One request and its response: counts the body as it arrives, whatever its headers say of its length."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, request_id: str, settings: ServiceSettings) -> None:
        self._receive, self._send, self._request_id = receive, send, request_id.encode()
        self._limit, self._body_s = settings.max_body_bytes, settings.max_body_s
        self._begin = anyio.current_time()
        self._received = 0
        # Without one of these a request has no body (RFC 9112, section 6.3), and nothing that an endpoint could read.
        self._complete = not any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])
        self.status: int | None = None
        self.refusal: JSONResponse | None = None

    async def receive(self) -> Message:
        """The next part of the body. Raises _Refused."""
        if self._complete:
            return await self._receive()
        try:
            with anyio.fail_after(self._begin + self._body_s - anyio.current_time()):
                message = await self._receive()
        except TimeoutError:
            detail = f"the body did not arrive within {self._body_s:g} s; send it again"
            self.refusal = problem_response(TooSlow, detail)
            raise _Refused from None
        self._received += len(message.get("body", b""))
        if self._received > self._limit:
            detail = f"the body is larger than {self._limit} bytes; send smaller requests"
            self.refusal = problem_response(TooLarge, detail)
            raise _Refused
        self._complete = message["type"] == "http.disconnect" or not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        """Send a part of the application's response, unless the body was refused."""
        if self.refusal is None or self.status is not None:
            await self.respond(message)

    async def respond(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [
                *message.get("headers", []),
                (b"x-request-id", self._request_id),
                (b"x-content-type-options", b"nosniff"),
                (b"cache-control", b"no-store"),
                # What is left of the body would be taken for the next request, or be awaited for ever.
                *([] if self._complete else [(b"connection", b"close")]),
            ]
        await self._send(message)


class RequestMiddleware:
    """Pure ASGI middleware; streamed responses stay streamed."""

    def __init__(self, app: ASGIApp, settings: ServiceSettings, metrics: HttpMetrics) -> None:
        self.app, self.settings, self.metrics = app, settings, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        request_id = given.decode() if _ID.fullmatch(given) else secrets.token_hex(8)
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(request_id=request_id)
        begin = time.perf_counter()
        exchange = _Exchange(scope, receive, send, request_id, self.settings)
        try:
            await self._answer(scope, exchange, request_id)
        finally:
            self._record(scope, exchange.status or 500, time.perf_counter() - begin)

    async def _answer(self, scope: Scope, exchange: _Exchange, request_id: str) -> None:
        try:
            await self.app(scope, exchange.receive, exchange.send)
        except _Refused:
            pass  # answered below
        except Exception:
            _log.exception("internal error", method=scope["method"], path=scope["path"])
            if exchange.status is not None:
                raise
            detail = f"the service failed; its log has the cause under request id {request_id}"
            problem = problem_response(InternalError, detail, request_id=request_id)
            await problem(scope, exchange.receive, exchange.respond)
        if exchange.refusal is not None and exchange.status is None:
            await exchange.refusal(scope, exchange.receive, exchange.respond)

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        # Labels come from the routes: each invented method or path would be a series for ever.
        method = scope["method"] if scope["method"] in _METHODS else "other"
        path = getattr(scope.get("route"), "path", "unknown")
        self.metrics.requests.labels(method, path, status).inc()
        self.metrics.seconds.labels(method, path).observe(seconds)
        if status < 400 and scope.get("state", {}).get("is_routine"):
            return
        run = scope.get("path_params", {}).get("run_id")
        fields = {"method": scope["method"], "path": scope["path"], "status": status} | ({"run": run} if run else {})
        _log.info("request", **fields, ms=round(seconds * 1e3, 1))


TAGS = [
    {"name": "runs", "description": "Submit, list and control runs."},
    {"name": "groups", "description": "Sweeps: a grid of settings × seeds as one group."},
    {"name": "metrics", "description": "Metrics, and what trainers report."},
    {"name": "samples", "description": "Responses, evaluations, events, logs and checkpoints of a run."},
    {"name": "comparisons", "description": "Compare runs at equal cost, with confidence intervals."},
    {"name": "tokens", "description": "Access tokens and roles."},
    {"name": "health", "description": "Health checks and Prometheus metrics."},
]


def operation_id(route: APIRoute) -> str:
    """`runs_submit`: the domain, and the endpoint's name without it. Generated clients name their methods so."""
    domain = str(route.tags[0]) if route.tags else "api"
    words = [word for word in route.name.split("_") if word not in (domain, domain.removesuffix("s"))]
    return "_".join([domain, *(words or ["list"])])


def describe(app: FastAPI) -> None:
    """Make `app.openapi()` return the complete description."""

    def build() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        schema = FastAPI.openapi(app)
        components = schema["components"]["schemas"]
        problem = ProblemDetails.model_json_schema(ref_template="#/components/schemas/{model}")
        components.update(problem.pop("$defs"))
        components["ProblemDetails"] = problem
        for path in schema["paths"].values():
            for operation in path.values():
                # Any body can be malformed or too large.
                more = responses(400, 408, 413) if "requestBody" in operation else {}
                if "401" in operation["responses"]:
                    more |= responses(403)  # a token for /metrics alone
                operation["responses"] = {str(status): more[status] for status in more} | operation["responses"]
        return schema

    app.openapi = build  # type: ignore[method-assign]
