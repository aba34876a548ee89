"""`gxpo token`: access tokens, over HTTP or, for the first one, directly in the database."""

from __future__ import annotations

import argparse
import time
from typing import Any

from gxpo_services.cli import tables
from gxpo_services.cli.common import client_of, one_line, print_json, say


def create(args: argparse.Namespace) -> int:
    """Create a token; only its secret goes to stdout, so that it can be redirected to a file."""
    body: dict[str, Any] = {"name": args.name, "role": args.role, "days": args.days}
    if args.database:
        made = _create_in_database(body)
    else:
        with client_of(args) as client:
            made = client.post("/tokens", body)
    if args.json:
        print_json(made)
    else:
        print(made["token"])
        say(f"token {made['id']} ({made['role']}) for {one_line(made['name'])}; the secret is shown only once")
    return 0


def _create_in_database(body: dict[str, Any]) -> dict[str, Any]:
    """Create a token without authentication: write access to the database implies it."""
    from gxpo_services.db.database import Database
    from gxpo_services.db.migrate import need_current
    from gxpo_services.settings import read_settings
    from gxpo_services.tokens import service
    from gxpo_services.tokens.schemas import TokenRequest

    settings = read_settings()
    need_current(settings.url)
    database = Database(settings.url)
    try:
        with database.writing() as session:
            return service.create(session, TokenRequest(**body), actor="gxpo token --database").model_dump()
    finally:
        database.close()


def list_tokens(args: argparse.Namespace) -> int:
    with client_of(args) as client:
        found = client.tokens()
    if args.json:
        print_json(found)
        return 0
    header = ("id", "name", "role", "created", "by", "last used", "state")
    rows = [
        (
            t["id"],
            one_line(t["name"], 60),
            t["role"],
            tables.clock(t["created_at"]),
            one_line(t["created_by"]),
            tables.clock(t["last_used_at"]),
            _state(t),
        )
        for t in found
    ]
    tables.console().print(tables.table(header, rows, left=7))
    return 0


def _state(token: dict[str, Any]) -> str:
    if token["revoked_at"] is not None:
        return f"revoked {tables.clock(token['revoked_at'])}"
    expires = token["expires_at"]
    if expires is None:
        return "valid"
    return f"{'valid until' if expires > time.time() else 'expired'} {tables.clock(expires)}"


def revoke(args: argparse.Namespace) -> int:
    with client_of(args) as client:
        revoked = [client.revoke_token(token) for token in args.tokens]
    if args.json:
        print_json(revoked)
    else:
        for token in revoked:
            print(f"{token['id']} ({one_line(token['name'])}) is revoked")
    return 0
