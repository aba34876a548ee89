"""Shared by the client commands: connect, resolve runs, confirm, print, report errors."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gxpo_client.client import Client, connect as connect_http, is_http, is_loopback
from gxpo_client.errors import InvalidRequest, NotFound, NotSignedIn, ServiceError, ServiceUnavailable
from gxpo_trainer.errors import ConfigError, GxpoError

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_HOME = Path("gxpo-home")
TOKEN_FILE = "token"
STATE_FILE = "up.json"
"""Written by `gxpo up` into its home: addresses and processes."""
_PATIENCE_S = 3.0
_ID = re.compile(r"[a-z][0-9a-hjkmnp-tv-z]{20}")  # api/fields.py
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_NOT_UTF_8 = re.compile(r"[^\s\"',]*[\ud800-\udfff][^\s\"',]*")
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


def connect(url: str | None = None, token_file: Path | None = None, *, patience_s: float = _PATIENCE_S) -> Client:
    """The client that arguments and environment name.

    Address: `url`, GXPO_URL, the service of `gxpo up` in the home, or 127.0.0.1:8000. Token: `token_file`, GXPO_TOKEN,
    or the home's token, which is only sent to a service on this machine.
    """
    home = Path(os.environ.get("GXPO_HOME") or DEFAULT_HOME)
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


class CommandFailed(GxpoError):
    """An error of the service; exit code 2 for an invalid request, else 1."""

    def __init__(self, error: ServiceError) -> None:
        super().__init__(message_of(error))
        self.exit_code = 2 if isinstance(error, InvalidRequest) else 1


@contextmanager
def translated_errors() -> Iterator[None]:
    """Raise errors of the service and of its database as GxpoError, which the command line reports."""
    try:
        yield
    except ServiceError as error:
        raise CommandFailed(error) from error
    except UnicodeEncodeError as error:
        word = _NOT_UTF_8.search(error.object)
        if word is None:
            raise
        raise ConfigError(f"{word[0]!r} is not UTF-8 text; check the command's arguments") from error
    except Exception as error:
        translated = _of_database(error)
        if translated is None:
            raise
        raise translated from error


def _of_database(error: Exception) -> ConfigError | None:
    """The error of a command that works on the database itself; None for any other."""
    # Imported here: the commands that only send requests start without them.
    from pydantic import ValidationError
    from sqlalchemy.exc import ArgumentError, DatabaseError

    from gxpo_trainer.config.messages import phrase

    if isinstance(error, DatabaseError):
        reason = one_line(str(error.orig))
        if type(error) is DatabaseError:  # of SQLite, when the file is none of its own
            return ConfigError(f"the database is damaged ({reason}); `gxpo restore` replaces it by a back-up")
        return ConfigError(f"cannot use the database ({reason}); check GXPO_DATABASE_URL and its server")
    if isinstance(error, ArgumentError):
        return ConfigError(f"GXPO_DATABASE_URL: {error}")
    if isinstance(error, ValidationError):
        lines = [f"  {'.'.join(str(part) for part in e['loc'])}: {phrase(e)}" for e in error.errors()]
        return ConfigError("\n".join(["invalid values:", *lines]))
    return None


def message_of(error: ServiceError) -> str:
    """An error as text with a hint, and a line for every invalid setting."""
    detail = str(error)
    if isinstance(error, NotSignedIn):
        detail += " (--token-file FILE or GXPO_TOKEN)"
    elif error.status is None and isinstance(error, ServiceUnavailable):
        detail += "; start one with `gxpo up`, or name another with --url"
    elif error.status is not None and (error.status == 413 or error.status >= 500):
        detail = f"the service responded with {error.status}: {detail}"
    if error.errors and error.errors[0][1] in detail:
        detail = error.title  # the detail repeats the list
    return "\n".join([detail, *(f"  {field}: {message}" for field, message in error.errors)])


def resolve(client: Client, words: Iterable[str]) -> list[str]:
    """The ids of the runs that words name, each once: an id, the end of one, or a name.

    Raises NotFound for no match, ConfigError with the candidates for several.
    """
    ids: dict[str, None] = {}
    for word in words:
        if _ID.fullmatch(word):
            ids[word] = None
            continue
        runs = client.all_of("/runs", text=word, archived="any")
        # An exact name takes precedence over a part of an id, whose end is random and whose beginning is a time.
        matches = [run for run in runs if run["name"] == word]
        matches = matches or [run for run in runs if len(word) >= 4 and run["id"].endswith(word)]
        if not matches:
            raise NotFound(f"there is no run {word!r}; `gxpo runs` lists them")
        if len(matches) > 1:
            lines = [f"  {run['id']}  {plain(run['name'])}" for run in matches[:10]]
            raise ConfigError("\n".join([f"{word!r} matches {len(matches)} runs; use an id:", *lines]))
        ids[matches[0]["id"]] = None
    return list(ids)


def output(args: argparse.Namespace, response: Any, text: str = "", note: str = "") -> None:
    """Print the response as JSON with --json, otherwise `text` to stdout and `note` to stderr."""
    if args.json:
        print(json.dumps(response, indent=2, ensure_ascii=False))
        return
    if text:
        print(text)
    if note:
        say(note)


def plain(text: str) -> str:
    """Text without terminal escape sequences and control characters."""
    return _CONTROL.sub("�", _ESCAPE.sub("", text.replace("\r\n", "\n")))


def one_line(text: str, most: int = 200) -> str:
    line = " ".join(plain(text).split())
    return line if len(line) <= most else line[: most - 1] + "…"


def confirm(question: str, yes: bool, done: str) -> None:
    """Ask the user for confirmation. Raises GxpoError when it is denied, ConfigError without a terminal."""
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigError(f"{question} No terminal to confirm on; add --yes")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise GxpoError(f"nothing {done}")


def say(text: str) -> None:
    """Print a message to stderr; results go to stdout."""
    print(text, file=sys.stderr, flush=True)
