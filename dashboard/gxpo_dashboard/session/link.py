"""Sign-in by the link that `gxpo up` prints, for browsers of this machine.

The local token has the rights of the user who started the dashboard. It is used only for visitors who opened the link
with its secret (any account of this machine reaches loopback), and only for requests from this machine: the dashboard
and the service listen on loopback, the connection comes from loopback, the Host header is a loopback name (another name
that resolves to loopback is a DNS rebinding attack), and no proxy header is set. Unknown counts as no.

The server answers the link with a redirect to the same view without the secret, and with a cookie: a random value that
scripts cannot read and that names a session in this process's memory, until the visitor signs out.
"""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from gxpo_client.client import is_loopback_host, keep

UNUSED_S = 7 * 86_400.0
"""A session ends when it was not used for so long."""
_MAX_SESSIONS = 1000
FORWARDING_HEADERS = frozenset(
    {"forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip", "cf-connecting-ip"}
)


def host_of(authority: str | None) -> str | None:
    """`localhost:8501` → `localhost`; `[::1]:8501` → `::1`; None when it is malformed."""
    try:
        return urlsplit(f"//{authority or ''}").hostname
    except ValueError:
        return None


def may_use_local_token(
    service_url: str,
    server_address: str | None,
    remote_ip: str | None,
    host_header: str | None,
    header_names: Iterable[str],
) -> bool:
    """Whether to sign a visitor in with the local token. Pure.

    server_address: the configured listening address of the dashboard, if any. remote_ip: None means loopback, as
    reported by Streamlit.
    """
    return (
        is_loopback_host(server_address)
        and is_loopback_host(urlsplit(service_url).hostname)
        and (remote_ip is None or is_loopback_host(remote_ip))
        and is_loopback_host(host_of(host_header))
        and FORWARDING_HEADERS.isdisjoint(name.lower() for name in header_names)
    )


def has_secret(expected: str | None, presented: str) -> bool:
    """Whether the presented secret is the link's; never without an expected one."""
    secret = (expected or "").encode()
    return bool(secret) and secrets.compare_digest(presented.encode(), secret)


def cookie_name(authority: str | None) -> str:
    """Name of the cookie: browsers share cookies between the ports of a host."""
    return f"gxpo-session-{(authority or '').rpartition(':')[2]}"


def read_secret(file: str | None) -> str | None:
    """The token or secret in a file; None when it cannot be read."""
    if not file:
        return None
    try:
        return Path(file).read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


class LinkSessions:
    """Sessions that were opened by the link: value of the cookie → when it was last used, in seconds."""

    def __init__(self) -> None:
        self._used: dict[str, float] = {}

    def open(self, now: float) -> str:
        value = secrets.token_urlsafe(32)
        keep(self._used, value, now, _MAX_SESSIONS)
        return value

    def is_open(self, value: str | None, now: float) -> bool:
        name = value or ""
        if now - self._used.get(name, -math.inf) > UNUSED_S:
            self.close(value)
            return False
        self._used[name] = now
        return True

    def close(self, value: str | None) -> None:
        self._used.pop(value or "", None)


sessions = LinkSessions()
"""Shared by the server, which opens them, and the visitors' scripts in its threads."""


class LinkSignIn:
    """ASGI middleware that answers the link, at every path of the dashboard."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        presented = Request(scope).query_params.get("secret") if scope["type"] == "http" else None
        if presented is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        # A wrong secret leaves the address as well: it is one of an earlier start.
        response = RedirectResponse(request.url.remove_query_params("secret"), 303, {"Cache-Control": "no-store"})
        if has_secret(read_secret(os.environ.get("GXPO_LINK_SECRET_FILE")), presented):
            response.set_cookie(
                cookie_name(request.headers.get("Host")),
                sessions.open(time.monotonic()),
                httponly=True,
                samesite="strict",
                secure=request.url.scheme == "https",
            )
        await response(scope, receive, send)
