"""Commands on runs, and those on access tokens."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from functools import partial
from typing import Any, TypeVar

from gxpo_client.client import Client, Json
from gxpo_client.errors import ServiceError, ServiceUnavailable
from gxpo_client.formats import number_of
from gxpo_services.cli import tables
from gxpo_services.cli.common import confirm, message_of, one_line, output, plain, resolve, say
from gxpo_services.run_states import TERMINAL
from gxpo_trainer.errors import ConfigError

T = TypeVar("T")
_LAST_EVENTS = 12


def runs(args: argparse.Namespace, client: Client) -> None:
    names = ("state", "rule", "model", "tag", "group", "owner", "text", "sort", "order", "archived")
    query = {name: getattr(args, name) for name in names}
    rows = client.all_of("/runs", limit=args.limit, **query)
    if rows and not args.json:
        tables.print_headline(client.get("/runs", limit=1, **query)["headline"]["text"])
        tables.SCREEN.print(tables.table(tables.RUN_HEADER, list(map(tables.run_row, rows)), left=5))
    else:
        output(args, rows, note="no matching runs; submit one with `gxpo submit --preset demo`")


def show(args: argparse.Namespace, client: Client) -> None:
    run = client.run(*resolve(client, args.runs))
    if args.json:
        output(args, run["config"] if args.config else run)
        return
    if args.config:
        from gxpo_trainer.config.io import build, to_toml

        print(to_toml(build(run["config"])), end="")
        return
    newest = client.all_of("/runs", run["id"], "events", limit=_LAST_EVENTS, order="desc")
    headline = client.get("/runs", run["id"], "headline")["text"]
    for part in tables.run_details(run, headline, newest[::-1]):
        tables.SCREEN.print(part)


def logs(args: argparse.Namespace, client: Client) -> None:
    """Print a log; with -f until the run has ended. The state is read before the log, so that no last lines are missed.

    With -f an outage of the service is waited for. With --json each section is a line.
    """
    (run_id,) = resolve(client, args.runs)
    offset, is_away = 0, False
    while True:
        try:
            ended = not args.follow or client.run(run_id)["state"] in TERMINAL
            section = client.get("/runs", run_id, "logs", offset=offset, limit=1 << 20)
        except ServiceUnavailable as error:
            if not args.follow:
                raise
            if not is_away:
                say(f"gxpo: {message_of(error)}; retrying; Ctrl-C stops")
            is_away = True
            time.sleep(1.0)
            continue
        is_away, offset = False, section["next_offset"]
        if not args.json:
            # Unchanged to a file or pipe, and without control sequences to a terminal.
            print(plain(section["text"]) if sys.stdout.isatty() else section["text"], end="", flush=True)
        elif section["text"]:
            print(json.dumps(section, ensure_ascii=False), flush=True)
        if not section["text"]:
            if ended:
                return
            time.sleep(1.0)


def compare(args: argparse.Namespace, client: Client) -> None:
    ids = resolve(client, args.runs)
    options = {name: getattr(args, name) for name in ("baseline", "metric", "benchmark", "sampling_share")}
    comparison = client.get("/compare", runs=ids, groups=args.group, **options)
    if args.json:
        output(args, comparison)
    else:
        tables.print_comparison(comparison)


def export(args: argparse.Namespace, client: Client) -> None:
    """Export several tables to a zip file, written atomically through a temporary file next to it."""
    ids = resolve(client, args.runs)
    parts = ["metrics", "evaluations", "runs", *(["samples"] if args.samples else [])]
    target = args.out
    if target.is_dir():
        raise ConfigError(f"cannot write --out {target}: it is a folder; name a file in it")
    part = target.with_name(f"{target.name}.part")
    with client.stream("/export", runs=ids, groups=args.group, format=args.format, parts=parts) as (_, pieces):
        try:
            with part.open("wb") as file:
                for piece in pieces:
                    file.write(piece)
            size = part.stat().st_size
            part.replace(target)
        except OSError as error:
            raise ConfigError(f"cannot write --out {target}: {error.strerror}") from None
        finally:
            with suppress(OSError):
                part.unlink()
    output(args, {"file": str(target), "bytes": size}, str(target))


def clone(args: argparse.Namespace, client: Client) -> None:
    from gxpo_services.cli.submit import absolute_overrides

    (original,) = resolve(client, args.runs)
    run = client.act(original, "clone", {"overrides": absolute_overrides(args.set, client), "name": args.name})
    output(args, [run], _origin(run))


def edit(args: argparse.Namespace, client: Client) -> None:
    given = {name: getattr(args, name) for name in ("name", "tags", "notes", "priority", "archived")}
    changes = {name: value for name, value in given.items() if value is not None}
    if not changes:
        raise ConfigError("nothing to change; use --name, --tags, --notes, --priority, --archive or --unarchive")
    run = client.change(*resolve(client, args.runs), **changes)
    output(args, [run], f"{run['id']} {one_line(run['name'])}: changed {', '.join(changes)}")


def delete(args: argparse.Namespace, client: Client) -> int:
    ids = resolve(client, args.runs)
    names = ", ".join(f"{run_id} ({one_line(client.run(run_id)['name'], 60)})" for run_id in ids)
    confirm(f"Delete {number_of(len(ids), 'run')} with metrics, samples and checkpoints: {names}?", args.yes, "deleted")

    def delete_one(run_id: str) -> str:
        client.request("DELETE", "/runs", run_id)
        return run_id

    return _each(ids, delete_one, "{} deleted".format, args)


def cancel(args: argparse.Namespace, client: Client) -> int:
    if args.group is None:
        if not args.runs:
            raise ConfigError("name runs to cancel, or use --group")
        return _act("cancel", _state, args, client)
    if args.runs:
        raise ConfigError("name runs or --group, not both")
    group = client.post("/groups", args.group, "cancel")
    states = ", ".join(f"{count} {state}" for state, count in group["by_state"].items())
    output(args, group, f"{group['id']} {one_line(group['name'])}: {states or 'no runs'}")
    return 0


def _act(action: str, line: Callable[[Json], str], args: argparse.Namespace, client: Client) -> int:
    return _each(resolve(client, args.runs), lambda run_id: client.act(run_id, action), line, args)


def _each(ids: Iterable[str], act: Callable[[str], T], line: Callable[[T], str], args: argparse.Namespace) -> int:
    """Act on each of these, and print what was done; failures are reported and do not stop the others."""
    done, refused = [], 0
    try:
        for one in ids:
            try:
                done.append(act(one))
            except ServiceError as error:
                if error.status is None:
                    raise
                say(f"gxpo: {one}: {message_of(error)}")
                refused += 1
    finally:  # also when the service goes away
        output(args, done, "\n".join(map(line, done)))
    return 1 if refused else 0


def _state(run: Json) -> str:
    return f"{run['id']} {one_line(run['name'])}: {run['state']}"


def _origin(run: Json) -> str:
    return f"{_state(run)}, from {run.get('parent_id')}"


pause = partial(_act, "pause", _state)
resume = partial(_act, "resume", _state)
retry = partial(_act, "retry", _origin)


def create(args: argparse.Namespace, client: Client) -> None:
    """Create a token; only its secret goes to stdout, so that it can be redirected to a file."""
    body: dict[str, Any] = {"name": args.name, "role": args.role, "days": args.days}
    token = _create_in_database(body) if args.database else client.post("/tokens", body=body)
    note = f"token {token['id']} ({token['role']}) for {one_line(token['name'])}; the secret is shown only once"
    output(args, token, token["token"], note)


def _create_in_database(body: dict[str, Any]) -> dict[str, Any]:
    """Create a token without authentication: write access to the database implies it."""
    from gxpo_services.auth.tokens import TokenRequest, create as create_token
    from gxpo_services.db.database import Database
    from gxpo_services.db.migrate import need_current
    from gxpo_services.settings import read_settings

    settings = read_settings()
    need_current(settings.url)
    with closing(Database(settings.url)) as database, database.writing() as session:
        return create_token(session, TokenRequest(**body), actor="gxpo token --database").model_dump()


def list_tokens(args: argparse.Namespace, client: Client) -> None:
    tokens = client.all_of("/tokens")
    if args.json:
        output(args, tokens)
        return
    moments = ("created_at", "last_used_at", "expires_at", "revoked_at")
    words = ("id", "name", "role", "created_by")
    rows = [
        (*(one_line(t[word], 60) for word in words), *(tables.clock(t[moment]) for moment in moments)) for t in tokens
    ]
    header = ("id", "name", "role", "created by", "created", "last used", "expires", "revoked")
    tables.SCREEN.print(tables.table(header, rows, left=8))


def revoke(args: argparse.Namespace, client: Client) -> int:
    def line(token: Json) -> str:
        return f"{token['id']} ({one_line(token['name'])}) is revoked"

    return _each(args.tokens, lambda token: client.send("DELETE", "/tokens", token), line, args)
