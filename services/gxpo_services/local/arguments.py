"""Arguments of the commands that run the service or its parts on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from gxpo_services.cli.arguments import Subparsers, lazy, positive


def register_up(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("up", help="start API, scheduler, Ray and dashboard on this machine")
    parser.add_argument(
        "--home", metavar="DIR", type=Path, help="folder for database, runs and token; default ./gxpo-home"
    )
    parser.add_argument("--port", metavar="N", type=_port, help="port of the API; default 8000 or the next free one")
    parser.add_argument(
        "--dashboard-port", metavar="N", type=_port, default=8501, help="default 8501 or the next free one"
    )
    parser.add_argument("--no-dashboard", action="store_true", help="do not start the dashboard")
    parser.set_defaults(run=lazy("local.commands:up"))


def register_demo(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "demo", help="train with each rule on the embedded task and compare them at equal backward passes"
    )
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("runs/demo"), help="default runs/demo")
    parser.add_argument(
        "--passes", metavar="N", type=positive, default=30, help="backward passes of each run; default 30"
    )
    parser.add_argument("--no-dashboard", action="store_true", help="do not start the dashboard")
    parser.set_defaults(run=lazy("local.commands:demo"))


def register_serve(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("serve", help="start the API; settings from GXPO_… (docs/service.md)")
    parser.add_argument("--host", metavar="ADDRESS", help="default GXPO_HOST, else 127.0.0.1")
    parser.add_argument("--port", metavar="N", type=_port, help="default GXPO_PORT, else 8000")
    parser.set_defaults(run=lazy("local.commands:serve"))


def register_scheduler(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("scheduler", help="start the scheduler; settings from GXPO_… (docs/service.md)")
    parser.add_argument(
        "--check", action="store_true", help="only check that one works in this home; exit code 0 if so, else 1"
    )
    parser.set_defaults(run=lazy("local.commands:scheduler"))


def register_migrate(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("migrate", help="migrate the database to this version's schema")
    parser.add_argument("--check", action="store_true", help="only check; exit code 0 if current, else 1")
    parser.set_defaults(run=lazy("local.commands:migrate"))


def register_backup(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("backup", help="copy the SQLite database of a service, which may be in use")
    parser.add_argument("file", metavar="FILE", type=Path, help="new file; an existing one is replaced")
    _home(parser)
    parser.set_defaults(run=lazy("local.commands:backup"))


def register_restore(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("restore", help="replace the SQLite database of a stopped service by a back-up")
    parser.add_argument(
        "file", metavar="FILE", type=Path, help="made by `gxpo backup`, of this version or an older one"
    )
    parser.add_argument("--yes", action="store_true", help="skip the confirmation")
    _home(parser)
    parser.set_defaults(run=lazy("local.commands:restore"))


def _home(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--home", metavar="DIR", type=Path, help="home of the service; default GXPO_HOME, ./gxpo-home")


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text}: must be a port, 1 to 65535")
    return int(text)
