"""Checks of URLs and hosts."""

from __future__ import annotations

from ipaddress import ip_address

import httpx


def is_http(url: str) -> bool:
    """Whether this is an HTTP URL with a valid host and port."""
    try:
        found = httpx.URL(url)
    except httpx.InvalidURL:
        return False
    return found.scheme in ("http", "https") and bool(found.host) and (found.port or 80) < 65536


def is_loopback(url: str) -> bool:
    """Whether the URL points to this machine, which no proxy can reach."""
    try:
        return is_loopback_host(httpx.URL(url).host)
    except httpx.InvalidURL:
        return False


def is_loopback_host(host: str | None) -> bool:
    """Whether a host name or address is this machine's own; None and empty are not."""
    name = (host or "").strip().strip("[]").lower()
    try:
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False
