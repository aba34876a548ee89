"""Connect the commands with the service that arguments and environment name."""

from __future__ import annotations

import json
import os
from pathlib import Path

from gxpo_client.addresses import is_http, is_loopback
from gxpo_client.client import Client
from gxpo_client.client import connect as connect_http
from gxpo_trainer.errors import ConfigError

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_HOME = Path("gxpo-home")
TOKEN_FILE = "token"
STATE_FILE = "up.json"
"""Written by `gxpo up` into its home: addresses and processes."""


def connect(
    url: str | None = None, token_file: Path | None = None, *, patience_s: float = 3.0, home: Path | None = None
) -> Client:
    """The client that arguments and environment name.

    Address: `url`, GXPO_URL, the service of `gxpo up` in this home, or 127.0.0.1:8000. Token: `token_file`,
    GXPO_TOKEN, or the home's token, which is only sent to a service on this machine.
    """
    home = home or Path(os.environ.get("GXPO_HOME") or DEFAULT_HOME)
    address = url or os.environ.get("GXPO_URL") or running_url(home) or DEFAULT_URL
    if not is_http(address):
        raise ConfigError(f"the service's address {address!r} must look like {DEFAULT_URL}; check --url or GXPO_URL")
    return Client(connect_http(address), _token(address, token_file, home), patience_s=patience_s)


def _token(address: str, token_file: Path | None, home: Path) -> str | None:
    if token_file is None and os.environ.get("GXPO_TOKEN"):
        return os.environ["GXPO_TOKEN"].strip()
    if token_file is None:
        token_file = home / TOKEN_FILE
        if not is_loopback(address) or not token_file.exists():
            return None
    try:
        return token_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the token file {token_file} ({error}); check --token-file") from None


def running_url(home: Path) -> str | None:
    """URL of the running `gxpo up` of a home, if any."""
    try:
        url = json.loads((home / STATE_FILE).read_text(encoding="utf-8")).get("url")
    except (OSError, ValueError, AttributeError):
        return None
    return url if isinstance(url, str) else None
