"""Automatic sign-in with this machine's local token. Pure.

The local token has the rights of the user who started the dashboard. It is used only for visitors who present the
secret of the link that `gxpo up` prints (any account of this machine reaches loopback), and only for requests from this
machine: the dashboard and the service listen on loopback, the connection comes from loopback, the Host header is a
loopback name (a foreign name that resolves to loopback is a DNS rebinding attack), and no proxy header is set. Unknown
counts as no.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from gxpo_client.addresses import is_loopback_host

FORWARDING_HEADERS = frozenset(
    {"forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip", "cf-connecting-ip"}
)


def host_of(authority: str | None) -> str | None:
    """`localhost:8501` → `localhost`; `[::1]:8501` → `::1`; None when it is malformed."""
    if not authority:
        return None
    try:
        return urlsplit(f"//{authority}").hostname
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class Visit:
    """Properties of a visitor's connection.

    server_address: the configured listening address of the dashboard, if any.
    remote_ip: None means loopback, as reported by Streamlit.
    """

    server_address: str | None
    remote_ip: str | None
    host_header: str | None
    header_names: frozenset[str]

    @classmethod
    def of(
        cls, server_address: str | None, remote_ip: str | None, host_header: str | None, header_names: Iterable[str]
    ) -> Visit:
        return cls(server_address, remote_ip, host_header, frozenset(name.lower() for name in header_names))


def may_use_local_token(visit: Visit, service_url: str) -> bool:
    """Whether to sign this visitor in with the local token."""
    return (
        is_loopback_host(visit.server_address)
        and is_loopback_host(urlsplit(service_url).hostname)
        and (visit.remote_ip is None or is_loopback_host(visit.remote_ip))
        and is_loopback_host(host_of(visit.host_header))
        and not visit.header_names & FORWARDING_HEADERS
    )


def has_secret(expected: str | None, *presented: str | None) -> bool:
    """Whether one of the presented secrets is the link's; never without an expected one."""
    given = [one.encode() for one in presented if one]
    return expected is not None and any(secrets.compare_digest(one, expected.encode()) for one in given)


def cookie_name(authority: str | None) -> str:
    """Name of the cookie that keeps the secret: browsers share cookies between the ports of a host."""
    return f"gxpo-link-{(authority or '').rpartition(':')[2]}"


def read_local_token(file: str | None) -> str | None:
    """The token in a file; None when it cannot be read."""
    if not file:
        return None
    try:
        return Path(file).read_text(encoding="utf-8").strip() or None
    except OSError:
        return None
