"""Arguments of the commands that speak with a service. Imports nothing but argparse: `gxpo --help` loads this."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

Subparsers = Any  # argparse._SubParsersAction, which has no public name
STATES = (
    "queued starting running recovering pausing paused cancelling succeeded failed cancelled".split()
)  # run_states.py; a test holds them equal


def register_submit(subparsers: Subparsers) -> None:
    parser = _command(subparsers, "submit", "submit:submit", "hand a run to the service")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("config", metavar="RUN.toml", nargs="?", type=Path, help="run file (.toml or .json)")
    what.add_argument("--preset", metavar="NAME", help="start from this preset; `gxpo config --list-presets`")
    _set(parser)
    _about(parser)
    parser.add_argument("--group", metavar="ID", help="put it into this group")
    parser.add_argument("--key", metavar="TEXT", help="idempotency key: submitting twice with one key makes one run")
    parser.add_argument("--check", action="store_true", help="only check it, and say what it will cost")
    parser.add_argument("--watch", action="store_true", help="stay and watch it to its end")


def register_sweep(subparsers: Subparsers) -> None:
    parser = _command(subparsers, "sweep", "submit:sweep", "hand a grid of runs to the service; the cost comes first")
    parser.add_argument("config", metavar="RUN.toml", nargs="?", type=Path, help="base run file (.toml or .json)")
    parser.add_argument("--base", metavar="NAME", help="base preset instead of a file")
    _set(parser)
    parser.add_argument(
        "--grid", metavar="A.B=X,Y", action="append", default=[], help="a setting and its values; may be repeated"
    )
    parser.add_argument("--seeds", metavar="N,N", type=_whole_numbers, help="seeds of each point, such as 0,1,2 or 0-4")
    parser.add_argument("--preset", metavar="NAME", help="a ready grid, such as alpha, k, tau or rules")
    parser.add_argument("--control", action="store_true", help="add GRPO at learning rate × (αK + 1)")
    _about(parser)
    parser.add_argument("--check", action="store_true", help="only show what it would cost")
    parser.add_argument("--yes", action="store_true", help="do not ask")


def register_runs(subparsers: Subparsers) -> None:
    parser = _command(subparsers, "runs", "reading:runs", "list runs")
    parser.add_argument("--state", metavar="STATE", action="append", choices=STATES, help="only these; may be repeated")
    parser.add_argument("--rule", metavar="NAME", help="only this rule: grpo, sfpo, gxpo")
    parser.add_argument("--model", metavar="PATH", help="only this model")
    parser.add_argument("--tag", metavar="TAG", action="append", help="only with this tag; may be repeated")
    parser.add_argument("--group", metavar="ID", help="only of this group")
    parser.add_argument("--text", metavar="WORDS", help="only with this in name, notes, id, model or tags")
    parser.add_argument("--archived", action="store_true", help="the archived ones")
    parser.add_argument("--sort", metavar="NAME", help="a column, or metric:<name>; default: newest first")
    parser.add_argument("--order", choices=("asc", "desc"), help="default desc")
    parser.add_argument("--limit", metavar="N", type=positive, default=30, help="most runs to list; default 30")


def register_show(subparsers: Subparsers) -> None:
    parser = _command(subparsers, "show", "reading:show", "all about one run")
    _run(parser)
    parser.add_argument("--config", action="store_true", help="print its settings as TOML and nothing else")


def register_watch(subparsers: Subparsers) -> None:
    parser = _command(subparsers, "watch", "watch:watch", "follow runs to their end; exit code 1 when one failed")
    parser.add_argument("runs", metavar="RUN", nargs="*", help="ids, beginnings of ids, or names")
    parser.add_argument("--group", metavar="ID", help="all runs of this group")
    parser.add_argument(
        "--every", metavar="S", type=_positive_seconds, default=1.0, help="seconds between looks; default 1"
    )


def register_logs(subparsers: Subparsers) -> None:
    parser = _command(subparsers, "logs", "reading:logs", "what a run's trainer printed")
    _run(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="stay and print what comes, to the run's end")
    parser.add_argument("--tail", metavar="N", type=positive, help="only the last N lines so far")


def register_cancel(subparsers: Subparsers) -> None:
    _runs(_command(subparsers, "cancel", "changing:cancel", "end runs at their next step"))


def register_pause(subparsers: Subparsers) -> None:
    _runs(_command(subparsers, "pause", "changing:pause", "stop runs with a checkpoint, to be resumed"))


def register_resume(subparsers: Subparsers) -> None:
    _runs(_command(subparsers, "resume", "changing:resume", "put paused runs back into the queue"))


def register_clone(subparsers: Subparsers) -> None:
    parser = _command(subparsers, "clone", "changing:clone", "a new run like an old one, with other settings")
    _run(parser)
    _set(parser)
    parser.add_argument("--name", metavar="NAME", help="name of the new run")


def register_retry(subparsers: Subparsers) -> None:
    _runs(_command(subparsers, "retry", "changing:retry", "run failed or cancelled runs again, as new runs"))


def register_edit(subparsers: Subparsers) -> None:
    parser = _command(subparsers, "edit", "changing:edit", "change a run's name, tags, notes, priority; archive it")
    _run(parser)
    parser.add_argument("--name", metavar="NAME")
    parser.add_argument("--tags", metavar="A,B", type=_words, help="these tags and no others; '' for none")
    parser.add_argument("--notes", metavar="TEXT")
    parser.add_argument("--priority", metavar="N", type=int, help="counts while it waits; higher goes first")
    archive = parser.add_mutually_exclusive_group()
    archive.add_argument("--archive", dest="archived", action="store_true", default=None, help="hide it from lists")
    archive.add_argument("--unarchive", dest="archived", action="store_false", default=None, help="show it again")


def register_delete(subparsers: Subparsers) -> None:
    parser = _command(subparsers, "delete", "changing:delete", "remove ended runs with all their files")
    _runs(parser)
    parser.add_argument("--yes", action="store_true", help="do not ask")


def register_compare(subparsers: Subparsers) -> None:
    parser = _command(subparsers, "compare", "reading:compare", "which runs are better at the same cost")
    parser.add_argument("runs", metavar="RUN", nargs="*", help="ids, beginnings of ids, or names")
    parser.add_argument("--group", metavar="ID", action="append", default=[], help="all runs of it; may be repeated")
    parser.add_argument("--baseline", metavar="NAME", help="what the others are compared with; default: GRPO")
    parser.add_argument("--metric", metavar="NAME", help="default pass@1")
    parser.add_argument("--benchmark", metavar="NAME", help="default: the average of all")


def register_export(subparsers: Subparsers) -> None:
    parser = _command(subparsers, "export", "reading:export", "metrics and evaluations of runs as files")
    parser.add_argument("runs", metavar="RUN", nargs="*", help="ids, beginnings of ids, or names")
    parser.add_argument("--group", metavar="ID", action="append", default=[], help="all runs of it; may be repeated")
    parser.add_argument("--format", choices=("csv", "parquet", "jsonl"), default="csv", help="default csv")
    parser.add_argument("--out", metavar="FILE", type=Path, help="default: the name that the service gives")


def register_token(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("token", help="make, list and revoke access tokens")
    deeds = parser.add_subparsers(title="deeds", metavar="DEED", required=True)
    create = _command(deeds, "create", "tokens:create", "make a token; its secret is printed once")
    create.add_argument("name", metavar="NAME", help="whose it is")
    create.add_argument("--role", choices=("viewer", "submitter", "admin"), default="viewer", help="default viewer")
    create.add_argument("--days", metavar="N", type=_positive_seconds, help="days until it expires; default: never")
    create.add_argument(
        "--database",
        action="store_true",
        help="write straight into the database of the settings: the first token of a new service",
    )
    _command(deeds, "list", "tokens:list_tokens", "list tokens without their secrets")
    revoke = _command(deeds, "revoke", "tokens:revoke", "make a token useless")
    revoke.add_argument("tokens", metavar="ID", nargs="+", help="ids, as `gxpo token list` shows them")


def lazy(target: str) -> Callable[[argparse.Namespace], int | None]:
    """`module:function` of gxpo_services as something to run, imported when it runs."""
    module, function = target.split(":")

    def run(args: argparse.Namespace) -> int | None:
        code: int | None = getattr(import_module(f"gxpo_services.{module}"), function)(args)
        return code

    return run


def _command(subparsers: Subparsers, name: str, target: str, words: str) -> argparse.ArgumentParser:
    """A parser with what every command of a service's client takes."""
    parser: argparse.ArgumentParser = subparsers.add_parser(name, help=words)
    parser.set_defaults(run=lazy(f"cli.{target}"))
    service = parser.add_argument_group("the service")
    service.add_argument("--url", metavar="URL", help="default GXPO_URL, else that of `gxpo up` on this machine")
    service.add_argument("--token-file", metavar="FILE", type=Path, help="default GXPO_TOKEN, else the home's token")
    service.add_argument("--json", action="store_true", help="print the service's answer as JSON")
    return parser


def _run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_id", metavar="RUN", help="id, unique beginning or end of an id, or unique name")


def _runs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", help="ids, unique beginnings or ends of ids, or unique names")


def _set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", metavar="A.B=C", action="append", default=[], help="override one setting; may be repeated"
    )


def _about(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", metavar="NAME", help="default: the config's")
    parser.add_argument("--tags", metavar="A,B", type=_words, default=[], help="words to find it by")
    parser.add_argument("--notes", metavar="TEXT", default="")
    parser.add_argument("--priority", metavar="N", type=int, default=0, help="higher goes first; default 0")


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number of at least 1")
    return int(text)


def _positive_seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be a number above 0")
    return value


def _whole_numbers(text: str) -> list[int]:
    """`0,1,2` and `0-4`, together or alone."""
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise argparse.ArgumentTypeError(f"{text}: must be whole numbers such as 0,1,2 or 0-4")
        numbers += range(int(first), int(last if dash else first) + 1)
    return numbers
