"""Commands that change runs and access tokens: cancel, pause, resume, clone, retry, edit, delete, token."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from gxpo_client.client import Json
from gxpo_client.errors import ServiceError
from gxpo_services.cli import tables
from gxpo_services.cli.common import (
    UsageError,
    confirmed,
    connect,
    message_of,
    named,
    one_line,
    output,
    resolve,
    resolve_all,
    say,
)


def clone(args: argparse.Namespace) -> int:
    body: dict[str, Any] = {"overrides": args.set}
    if args.name:
        body["name"] = args.name
    with connect(args.url, args.token_file) as client:
        run = client.act(resolve(client, args.run_id), "clone", body)
    output(args, [run], _origin(run))
    return 0


def edit(args: argparse.Namespace) -> int:
    given = {name: getattr(args, name) for name in ("name", "tags", "notes", "priority", "archived")}
    changes = {name: value for name, value in given.items() if value is not None}
    if not changes:
        raise UsageError("nothing to change; use --name, --tags, --notes, --priority, --archive or --unarchive")
    with connect(args.url, args.token_file) as client:
        run = client.change(resolve(client, args.run_id), **changes)
    output(args, [run], f"{run['id']} {one_line(run['name'])}: changed {', '.join(changes)}")
    return 0


def delete(args: argparse.Namespace) -> int:
    with connect(args.url, args.token_file) as client:
        ids = resolve_all(client, args.runs)
        names = ", ".join(f"{run_id} ({one_line(client.run(run_id)['name'], 60)})" for run_id in ids)
        if not confirmed(f"Delete {named(ids, 'run')} with metrics, samples and checkpoints: {names}?", args.yes):
            say("nothing deleted")
            return 1
        for run_id in ids:
            client.delete(run_id)
            if not args.json:
                print(f"{run_id} deleted")
    if args.json:
        output(args, ids)
    return 0


def cancel(args: argparse.Namespace) -> int:
    if args.group is None:
        if not args.runs:
            raise UsageError("name runs to cancel, or use --group")
        return _act("cancel", _state, args)
    if args.runs:
        raise UsageError("name runs or --group, not both")
    with connect(args.url, args.token_file) as client:
        group = client.cancel_group(args.group)
    states = ", ".join(f"{count} {state}" for state, count in group["by_state"].items())
    output(args, group, f"{group['id']} {one_line(group['name'])}: {states or 'no runs'}")
    return 0


def _act(action: str, line: Callable[[Json], str], args: argparse.Namespace) -> int:
    """Apply an action to every run; failures are reported and do not stop the others."""
    done, refused = [], 0
    with connect(args.url, args.token_file) as client:
        for run_id in resolve_all(client, args.runs):
            try:
                done.append(client.act(run_id, action))
            except ServiceError as error:
                if error.status is None:
                    raise
                say(f"gxpo: {run_id}: {message_of(error)}")
                refused += 1
    output(args, done, "\n".join(map(line, done)))
    return 1 if refused else 0


def _state(run: Json) -> str:
    return f"{run['id']} {one_line(run['name'])}: {run['state']}"


def _origin(run: Json) -> str:
    return f"{_state(run)}, from {run.get('parent_id')}"


pause = partial(_act, "pause", _state)
resume = partial(_act, "resume", _state)
retry = partial(_act, "retry", _origin)


def create(args: argparse.Namespace) -> int:
    """Create a token; only its secret goes to stdout, so that it can be redirected to a file."""
    body: dict[str, Any] = {"name": args.name, "role": args.role, "days": args.days}
    if args.database:
        token = _create_in_database(body)
    else:
        with connect(args.url, args.token_file) as client:
            token = client.post("/tokens", body)
    note = f"token {token['id']} ({token['role']}) for {one_line(token['name'])}; the secret is shown only once"
    output(args, token, token["token"], note)
    return 0


def _create_in_database(body: dict[str, Any]) -> dict[str, Any]:
    """Create a token without authentication: write access to the database implies it."""
    from gxpo_services.auth import tokens
    from gxpo_services.auth.tokens import TokenRequest
    from gxpo_services.db.database import Database
    from gxpo_services.db.migrate import need_current
    from gxpo_services.settings import read_settings

    settings = read_settings()
    need_current(settings.url)
    database = Database(settings.url)
    try:
        with database.writing() as session:
            return tokens.create(session, TokenRequest(**body), actor="gxpo token --database").model_dump()
    finally:
        database.close()


def list_tokens(args: argparse.Namespace) -> int:
    with connect(args.url, args.token_file) as client:
        tokens = client.tokens()
    if args.json:
        output(args, tokens)
        return 0
    header = ("id", "name", "role", "created", "by", "last used", "state")
    rows = [
        (
            token["id"],
            one_line(token["name"], 60),
            token["role"],
            tables.clock(token["created_at"]),
            one_line(token["created_by"]),
            tables.clock(token["last_used_at"]),
            _token_state(token),
        )
        for token in tokens
    ]
    tables.console().print(tables.table(header, rows, left=7))
    return 0


def _token_state(token: dict[str, Any]) -> str:
    if token["revoked_at"] is not None:
        return f"revoked {tables.clock(token['revoked_at'])}"
    expires = token["expires_at"]
    if expires is None:
        return "valid"
    return f"{'valid until' if expires > time.time() else 'expired'} {tables.clock(expires)}"


def revoke(args: argparse.Namespace) -> int:
    with connect(args.url, args.token_file) as client:
        tokens = [client.revoke_token(token) for token in args.tokens]
    output(args, tokens, "\n".join(f"{token['id']} ({one_line(token['name'])}) is revoked" for token in tokens))
    return 0
