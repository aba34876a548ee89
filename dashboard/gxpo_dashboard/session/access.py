"""Who may use this machine's own token. Pure.

On one machine the page may sign itself in with the token file that the service keeps there. That lends the
rights of whoever started the dashboard, so it is refused unless everything says that the visitor sits at this
machine: the dashboard listens on loopback only, the service is on loopback, the connection comes from loopback,
the browser asked for a loopback host name (a foreign name that resolves to loopback is an attack), and nothing
forwarded the request. What cannot be told counts as no.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from gxpo_dashboard.client import is_loopback

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
    """What is known of a visitor's connection.

    server_address: the address that the dashboard was told to listen on, None when it was not told.
    remote_ip: None stands for loopback (Streamlit reports loopback so) and only counts with the rest.
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
    """Whether this visitor may be signed in with the machine's own token."""
    return (
        is_loopback(visit.server_address)
        and is_loopback(urlsplit(service_url).hostname)
        and (visit.remote_ip is None or is_loopback(visit.remote_ip))
        and is_loopback(host_of(visit.host_header))
        and not visit.header_names & FORWARDING_HEADERS
    )


def read_local_token(file: str | None) -> str | None:
    """The token in the file, None when there is none that can be read."""
    if not file:
        return None
    try:
        return Path(file).read_text(encoding="utf-8").strip() or None
    except OSError:
        return None
