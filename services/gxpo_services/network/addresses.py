"""Checks of URLs."""

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
        host = httpx.URL(url).host
        return host == "localhost" or ip_address(host).is_loopback
    except (httpx.InvalidURL, ValueError):
        return False
