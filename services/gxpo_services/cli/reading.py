"""Commands that only read: runs, show, logs, compare, export."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any, TextIO

from rich.text import Text

from gxpo_client.client import Client, Json
from gxpo_client.errors import ServiceUnavailable
from gxpo_services.cli import tables
from gxpo_services.cli.common import (
    UsageError,
    connect,
    message_of,
    one_line,
    output,
    plain,
    resolve,
    resolve_all,
    say,
)
from gxpo_services.run_states import TERMINAL
from gxpo_trainer.errors import ConfigError

_LAST_EVENTS = 12


def runs(args: argparse.Namespace) -> int:
    filters: dict[str, Any] = {
        name: getattr(args, name)
        for name in ("state", "rule", "model", "tag", "group", "owner", "text", "sort", "order")
    }
    filters["archived"] = "true" if args.archived else "false"
    with connect(args.url, args.token_file) as client:
        rows = client.all_runs(limit=args.limit, **filters)
    if rows and not args.json:
        tables.console().print(tables.runs_table(rows))
    else:
        output(args, rows, note="no matching runs; submit one with `gxpo submit --preset demo`")
    return 0


def show(args: argparse.Namespace) -> int:
    with connect(args.url, args.token_file) as client:
        run = client.run(resolve(client, args.run_id))
        if args.config:
            from gxpo_trainer.config.io import build, to_toml

            print(to_toml(build(run["config"])), end="")
            return 0
        if args.json:
            output(args, run)
            return 0
        events = client.all_events(run["id"])
    console = tables.console()
    for part in tables.run_details(run, events[-_LAST_EVENTS:]):
        console.print(part)
    return 0


def logs(args: argparse.Namespace) -> int:
    """Print a log; with -f until the run has ended."""
    with connect(args.url, args.token_file) as client:
        run_id = resolve(client, args.run_id)
        last = deque[str](maxlen=args.tail)  # complete lines
        offset, text = 0, ""
        while True:
            offset, piece = _log_piece(client, run_id, offset)
            if not piece:
                break
            complete, newline, text = (text + piece).rpartition("\n")
            if args.tail is None:
                _write(sys.stdout, complete + newline)
            else:
                last.extend((complete + newline).splitlines(keepends=True))
        _write(sys.stdout, "".join(last) + text)
        if args.follow:
            _follow_log(client, run_id, offset)
    return 0


def _log_piece(client: Client, run_id: str, offset: int) -> tuple[int, str]:
    """The next offset, and the text before it."""
    section = client.logs(run_id, offset, limit=1 << 20)
    return section["next_offset"], section["text"]


def _follow_log(client: Client, run_id: str, offset: int) -> None:
    """Follow the log. The state is read before the log, so that no last lines are missed."""
    is_away = False
    while True:
        try:
            ended = client.run(run_id)["state"] in TERMINAL
            offset, piece = _log_piece(client, run_id, offset)
        except ServiceUnavailable as error:
            if not is_away:
                say(f"gxpo: {message_of(error)}; retrying; Ctrl-C stops")
            is_away = True
            time.sleep(1.0)
            continue
        is_away = False
        _write(sys.stdout, piece)
        if not piece:
            if ended:
                return
            time.sleep(1.0)


def _write(stream: TextIO, text: str) -> None:
    """Write text unchanged to a file or pipe, and without control sequences to a terminal."""
    stream.write(plain(text) if stream.isatty() else text)
    stream.flush()


def compare(args: argparse.Namespace) -> int:
    with connect(args.url, args.token_file) as client:
        ids = resolve_all(client, args.runs)
        if not ids and not args.group:
            raise UsageError("name runs to compare, or use --group")
        options = {"baseline": args.baseline, "metric": args.metric, "benchmark": args.benchmark}
        options["sampling_share"] = args.sampling_share
        comparison = client.compare(runs=ids, groups=args.group, **options)
    if args.json:
        output(args, comparison)
    else:
        print_comparison(comparison)
    return 0


def print_comparison(comparison: Json) -> None:
    """Print the tables, the excluded runs and what the evidence supports."""
    console = tables.console()
    for part in comparison["tables"]:
        rows = [[one_line(cell) for cell in row] for row in part["rows"]]
        console.print(tables.table(part["header"], rows, title=one_line(part["title"])))
    for run in comparison["left_out"]:
        console.print(Text(f"excluded: {one_line(run['name'])} ({run['run']}): {one_line(run['reason'])}"))
    console.print(Text(plain(comparison["evidence"])))


def export(args: argparse.Namespace) -> int:
    """Export to a file, written atomically through a temporary file next to it."""
    with connect(args.url, args.token_file) as client:
        ids = resolve_all(client, args.runs)
        if not ids and not args.group:
            raise UsageError("name runs to export, or use --group")
        parts = ["metrics", "evaluations", "runs", *(["samples"] if args.samples else [])]
        with client.stream("/export", runs=ids, groups=args.group, format=args.format, parts=parts) as (name, pieces):
            safe = name if name and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,100}", name) else None
            target = args.out or Path(safe or f"gxpo-export.{args.format}")
            part = target.with_name(f"{target.name}.part")
            try:
                with part.open("wb") as file:
                    for piece in pieces:
                        file.write(piece)
                size = part.stat().st_size
                part.replace(target)
            except OSError as error:
                raise ConfigError(f"cannot write --out {target}: {error.strerror}") from None
            finally:
                part.unlink(missing_ok=True)
    output(args, {"file": str(target), "bytes": size}, str(target))
    return 0
