"""Middleware of every request: request id, body size limit, access log and Prometheus metrics."""

from __future__ import annotations

import re
import secrets
import time

import structlog
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gxpo_services.api.errors import TooLarge, problem_response
from gxpo_services.observability.logs import get_logger
from gxpo_services.settings import ServiceSettings

_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_log = get_logger("gxpo_services.requests")


class HttpMetrics:
    """Prometheus metrics of the API in their own registry, so that a process can host several applications."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        labels = ("method", "path", "status")
        self.requests = Counter("gxpo_http_requests", "Requests answered.", labels, registry=self.registry)
        self.seconds = Histogram(
            "gxpo_http_request_seconds", "Time to answer.", ("method", "path"), registry=self.registry
        )


class RequestMiddleware:
    """Pure ASGI middleware; streamed responses stay streamed."""

    def __init__(self, app: ASGIApp, settings: ServiceSettings, metrics: HttpMetrics) -> None:
        self.app, self.limit, self.metrics = app, settings.max_body_bytes, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given.decode() if _ID.fullmatch(given) else secrets.token_hex(8)
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(request_id=request_id)
        begin = time.perf_counter()
        status = 500

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message.setdefault("headers", [])
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", request_id.encode()),
                    (b"x-content-type-options", b"nosniff"),
                    (b"cache-control", b"no-store"),
                ]
            await send(message)

        try:
            await self._limited(scope, receive, tagged, headers.get(b"content-length", b""))
        finally:
            seconds = time.perf_counter() - begin
            route = scope.get("route")
            path = getattr(route, "path", "unknown")
            self.metrics.requests.labels(scope["method"], path, status).inc()
            self.metrics.seconds.labels(scope["method"], path).observe(seconds)
            run = scope.get("path_params", {}).get("run_id")
            found = {"method": scope["method"], "path": scope["path"], "status": status} | ({"run": run} if run else {})
            _log.info("request", **found, ms=round(seconds * 1e3, 1))

    async def _limited(self, scope: Scope, receive: Receive, send: Send, declared: bytes) -> None:
        """Reject a body over the limit, by its declared length or while it is received."""
        if declared.isdigit() and int(declared) > self.limit:
            await self._too_large(scope, receive, send)
            return
        if declared.isdigit() or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self.app(scope, receive, send)
            return
        body = b""
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self.limit:
                await self._too_large(scope, receive, send)
                return
        sent = False

        async def replay() -> Message:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, replay, send)

    async def _too_large(self, scope: Scope, receive: Receive, send: Send) -> None:
        detail = f"the body is larger than {self.limit} bytes; send smaller requests"
        await problem_response(TooLarge.status, TooLarge.title, detail)(scope, receive, send)


def install(app: FastAPI, settings: ServiceSettings) -> None:
    app.state.http_metrics = HttpMetrics()
    app.add_middleware(RequestMiddleware, settings=settings, metrics=app.state.http_metrics)
