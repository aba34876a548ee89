"""What can be told from an address without asking it."""

from __future__ import annotations

from ipaddress import ip_address

import httpx


def is_http(url: str) -> bool:
    """Whether requests can be sent there."""
    try:
        found = httpx.URL(url)
    except httpx.InvalidURL:
        return False
    return found.scheme in ("http", "https") and bool(found.host) and (found.port or 80) < 65536


def is_loopback(url: str) -> bool:
    """Whether it is this machine's own; a proxy of the environment cannot reach that."""
    try:
        host = httpx.URL(url).host
        return host == "localhost" or ip_address(host).is_loopback
    except (httpx.InvalidURL, ValueError):
        return False
