"""Addresses that reward components may call, and the tokens for them: both are the administrator's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from gxpo_trainer.errors import ConfigError

URLS = "GXPO_REWARD_URLS"
TOKEN_FILE = "GXPO_REWARD_TOKEN_FILE"


def check_urls(urls: Sequence[str], environment: Mapping[str, str]) -> None:
    """Raises ConfigError for the first address that is not listed, character by character, in GXPO_REWARD_URLS."""
    listed = [url.strip() for url in environment.get(URLS, "").split(",") if url.strip()]
    for url in urls:
        if url not in listed:
            raise ConfigError(
                f"verifier.rewards: {url} is not an allowed address on this machine; its administrator can list it in "
                f"the environment variable {URLS} (now {', '.join(listed) or 'empty'})"
            )


def tokens(environment: Mapping[str, str]) -> dict[str, str]:
    """Address → bearer token, from the file that GXPO_REWARD_TOKEN_FILE names: lines `URL TOKEN`. Raises ConfigError.

    A file, and not the variable itself, so that no list of processes or jobs shows a token.
    """
    if not (name := environment.get(TOKEN_FILE)):
        return {}
    try:
        lines = Path(name).read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{TOKEN_FILE} = {name} cannot be read: {error}") from None
    found = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        parts = line.split()
        if len(parts) != 2:
            raise ConfigError(f"{TOKEN_FILE} = {name}, line {number}: must be an address, a blank and a token")
        found[parts[0]] = parts[1]
    return found
