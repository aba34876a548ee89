"""Arguments of the commands on a service, and of those that run one.

Imports next to nothing besides argparse: `gxpo --help` loads this module.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from gxpo_client.formats import comma_separated
from gxpo_services.run_states import RunState

_MOST_SEEDS = 100
"""As the service accepts (sweeps/grid.py)."""
_MOST_DAYS = 36_500
"""As the service accepts (auth/tokens.py)."""
Subparsers = Any  # argparse._SubParsersAction, which has no public name
_SET: Any = {"metavar": "A.B=C", "action": "append", "default": [], "help": "override a setting; repeatable"}
_NO_DASHBOARD: Any = {"action": "store_true", "help": "do not start the dashboard"}
_HOME: Any = {"metavar": "DIR", "type": Path, "help": "home of the service; default GXPO_HOME, ./gxpo-home"}


def register(subparsers: Subparsers) -> None:
    """Add the commands to those of `gxpo`: first the clients of a service, then the service and its parts."""
    parser = _command(subparsers, "submit", "submit:submit", "submit a run")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("config", metavar="RUN.toml", nargs="?", type=Path, help="run file (.toml or .json)")
    what.add_argument("--preset", metavar="NAME", help="start from a preset (see `gxpo config --list-presets`)")
    parser.add_argument("--set", **_SET)
    _about(parser)
    parser.add_argument("--group", metavar="ID", help="add it to this group")
    parser.add_argument("--key", metavar="TEXT", help="idempotency key: submitting again with it creates no second run")
    parser.add_argument("--check", action="store_true", help="validate only, and print the expected cost")
    parser.add_argument("--watch", action="store_true", help="watch it until it ends")

    parser = _command(subparsers, "sweep", "submit:sweep", "submit a grid of runs after showing its cost")
    parser.add_argument("config", metavar="RUN.toml", nargs="?", type=Path, help="base run file (.toml or .json)")
    parser.add_argument("--preset", metavar="NAME", help="base preset instead of a file")
    parser.add_argument("--study", metavar="STUDY.toml", type=Path, help="a study file instead (docs/studies.md)")
    parser.add_argument("--set", **_SET)
    parser.add_argument("--grid", metavar="A.B=X,Y", action="append", default=[], help="setting and values; repeatable")
    parser.add_argument(
        "--seeds", metavar="N,N", type=_whole_numbers, default=[], help="seeds per grid point, e.g. 0,1,2 or 0-4"
    )
    parser.add_argument("--predefined", metavar="NAME", help="predefined grid: alpha, k, tau or rules")
    parser.add_argument("--control", action="store_true", help="add GRPO at learning rate × (αK + 1)")
    _about(parser)
    parser.add_argument("--check", action="store_true", help="show the cost only")
    parser.add_argument("--yes", action="store_true", help="skip the confirmation")

    parser = _command(subparsers, "runs", "commands:runs", "list runs")
    states = [state.value for state in RunState]
    parser.add_argument("--state", metavar="STATE", action="append", choices=states, help="filter by state; repeatable")
    parser.add_argument("--rule", metavar="NAME", help="filter by rule, a value of learner.rule.name")
    parser.add_argument("--model", metavar="PATH", help="filter by model")
    parser.add_argument("--tag", metavar="TAG", action="append", help="filter by tag; repeatable")
    parser.add_argument("--group", metavar="ID", help="filter by group")
    parser.add_argument("--owner", metavar="NAME", help="filter by the token that submitted them")
    parser.add_argument("--text", metavar="WORDS", help="search name, notes, id, model and tags")
    parser.add_argument("--archived", action="store_true", default=None, help="only archived runs")
    parser.add_argument("--sort", metavar="NAME", help="a column, or metric:<name>; default: newest first")
    parser.add_argument("--order", choices=("asc", "desc"), help="default desc")
    parser.add_argument("--limit", metavar="N", type=int, default=30, help="maximum number of runs; default 30")

    parser = _command(subparsers, "show", "commands:show", "show a run")
    _runs(parser, 1)
    parser.add_argument("--config", action="store_true", help="print only its config, as TOML")

    parser = _command(subparsers, "watch", "watch:watch", "follow runs until they end; exit code 1 if one failed")
    _runs(parser, "*")
    parser.add_argument("--group", metavar="ID", help="all runs of this group")

    parser = _command(subparsers, "logs", "commands:logs", "print a run's log")
    _runs(parser, 1)
    parser.add_argument("-f", "--follow", action="store_true", help="follow the log until the run ends")

    parser = _command(subparsers, "cancel", "commands:cancel", "cancel runs at the end of their step")
    _runs(parser, "*")
    parser.add_argument("--group", metavar="ID", help="all runs of this group; a study queues no more")

    _runs(_command(subparsers, "pause", "commands:pause", "pause runs with a checkpoint"))
    _runs(_command(subparsers, "resume", "commands:resume", "resume paused runs"))

    parser = _command(subparsers, "clone", "commands:clone", "submit a copy of a run with changed settings")
    _runs(parser, 1)
    parser.add_argument("--set", **_SET)
    parser.add_argument("--name", metavar="NAME", help="name of the clone")

    _runs(_command(subparsers, "retry", "commands:retry", "retry failed or cancelled runs as new runs"))

    parser = _command(subparsers, "edit", "commands:edit", "change a run's name, tags, notes, priority; archive it")
    _runs(parser, 1)
    parser.add_argument("--name", metavar="NAME")
    parser.add_argument("--tags", metavar="A,B", type=comma_separated, help="replace the tags; '' for none")
    parser.add_argument("--notes", metavar="TEXT")
    parser.add_argument("--priority", metavar="N", type=int, help="higher starts first")
    archive = parser.add_mutually_exclusive_group()
    archive.add_argument("--archive", dest="archived", action="store_true", default=None, help="hide from lists")
    archive.add_argument("--unarchive", dest="archived", action="store_false", default=None, help="show in lists")

    parser = _command(subparsers, "delete", "commands:delete", "delete ended runs with all their files")
    _runs(parser)
    parser.add_argument("--yes", action="store_true", help="skip the confirmation")

    parser = _command(subparsers, "compare", "commands:compare", "compare runs at equal cost")
    _runs_or_groups(parser, "all runs of this group, or only the reported ones of a study")
    parser.add_argument("--baseline", metavar="NAME", help="default: a study's own, else the most accurate GRPO")
    parser.add_argument("--metric", metavar="NAME", help="default pass@1")
    parser.add_argument("--benchmark", metavar="NAME", help="default: the average of all")
    words = "share of a step that sampling takes, to say when it pays; default: measured"
    parser.add_argument("--sampling-share", metavar="S", help=words)

    parser = _command(subparsers, "export", "commands:export", "export metrics and evaluations")
    _runs_or_groups(parser, "all runs of this group")
    parser.add_argument("--format", choices=("csv", "jsonl"), default="csv", help="default csv")
    parser.add_argument("--samples", action="store_true", help="also the responses with their verdicts and turns")
    out = Path("gxpo-export.zip")
    parser.add_argument("--out", metavar="FILE", type=Path, default=out, help=f"zip file; default {out}")

    parser = subparsers.add_parser("token", help="create, list and revoke access tokens")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    create = _command(actions, "create", "commands:create", "create a token; its secret is printed once")
    create.add_argument("name", metavar="NAME", help="name of its owner")
    roles = ("metrics", "viewer", "submitter", "admin")
    create.add_argument("--role", choices=roles, default="viewer", help="default viewer")
    create.add_argument("--days", metavar="N", type=_days, help="days until it expires; default: never")
    create.add_argument("--database", action="store_true", help="write to the database, for a service's first token")
    _command(actions, "list", "commands:list_tokens", "list tokens, without secrets")
    revoke = _command(actions, "revoke", "commands:revoke", "revoke tokens")
    revoke.add_argument("tokens", metavar="ID", nargs="+", help="ids, as `gxpo token list` shows them")

    parser = _process(subparsers, "up", "up:up", "start API, scheduler, Ray and dashboard on this machine")
    parser.add_argument("--home", metavar="DIR", type=Path, help="for database, runs and token; default ./gxpo-home")
    free = "default 8501 or the next free"
    parser.add_argument("--port", metavar="N", type=_up_to(65535), help="of the API; default 8000 or the next free")
    parser.add_argument("--dashboard-port", metavar="N", type=_up_to(65535), default=8501, help=free)
    parser.add_argument("--no-dashboard", **_NO_DASHBOARD)

    parser = _process(subparsers, "demo", "demo:demo", "train with several rules on an embedded task, at equal passes")
    tasks = ("word_problems", "arithmetic_skill")
    words = "default word_problems, whose policy guesses too often; that of arithmetic_skill miscalculates"
    parser.add_argument("--task", choices=tasks, default=tasks[0], help=words)
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("runs/demo"), help="default runs/demo")
    words = "a run's passes; default 30, arithmetic_skill 60"
    parser.add_argument("--passes", metavar="N", type=_up_to(10**6), help=words)
    parser.add_argument("--no-dashboard", **_NO_DASHBOARD)

    settings = "settings from GXPO_… (docs/service.md)"
    parser = _process(subparsers, "serve", "commands:serve", f"start the API; {settings}")
    parser.add_argument("--host", metavar="ADDRESS", help="default GXPO_HOST, else 127.0.0.1")
    parser.add_argument("--port", metavar="N", type=_up_to(65535), help="default GXPO_PORT, else 8000")

    parser = _process(subparsers, "scheduler", "commands:scheduler", f"start the scheduler; {settings}")
    parser.add_argument("--check", action="store_true", help="only check that one runs here; exit code 0 if so, else 1")

    parser = _process(subparsers, "migrate", "commands:migrate", "migrate the database to this version's schema")
    parser.add_argument("--check", action="store_true", help="only check; exit code 0 if current, else 1")

    words = "copy the SQLite database of a service, which may be in use"
    parser = _process(subparsers, "backup", "commands:backup", words)
    parser.add_argument("file", metavar="FILE", type=Path, help="new file; an existing one is replaced")
    parser.add_argument("--home", **_HOME)

    words = "replace the SQLite database of a stopped service by a back-up"
    parser = _process(subparsers, "restore", "commands:restore", words)
    parser.add_argument("file", metavar="FILE", type=Path, help="made by `gxpo backup` of this or an older version")
    parser.add_argument("--yes", action="store_true", help="skip the confirmation")
    parser.add_argument("--home", **_HOME)


def _lazy(target: str, *, connects: bool = False) -> Callable[[argparse.Namespace], int | None]:
    """A command that imports `module:function` of gxpo_services when it runs. connects: whether it gets a client."""
    module, function = target.split(":")

    def run(args: argparse.Namespace) -> int | None:
        common = import_module("gxpo_services.cli.common")
        with common.translated_errors():
            command: Callable[..., int | None] = getattr(import_module(f"gxpo_services.{module}"), function)
            if not connects:
                return command(args)
            with common.connect(args.url, args.token_file) as client:
                return command(args, client)

    return run


def _command(subparsers: Subparsers, name: str, target: str, words: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(name, help=words)
    parser.set_defaults(run=_lazy(f"cli.{target}", connects=True))
    service = parser.add_argument_group("the service")
    service.add_argument("--url", metavar="URL", help="default: GXPO_URL, else the local `gxpo up`")
    service.add_argument("--token-file", metavar="FILE", type=Path, help="default: GXPO_TOKEN, else the home's token")
    service.add_argument("--json", action="store_true", help="print the response as JSON")
    return parser


def _process(subparsers: Subparsers, name: str, target: str, words: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(name, help=words)
    parser.set_defaults(run=_lazy(f"local.{target}"))
    return parser


def _runs(parser: argparse.ArgumentParser, nargs: str | int = "+") -> None:
    words = "ids, unique ends of ids, or unique names" if nargs != 1 else "id, unique end of an id, or unique name"
    parser.add_argument("runs", metavar="RUN", nargs=nargs, help=words)


def _runs_or_groups(parser: argparse.ArgumentParser, of_group: str) -> None:
    _runs(parser, "*")
    parser.add_argument("--group", metavar="ID", action="append", default=[], help=f"{of_group}; repeatable")


def _about(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", metavar="NAME", help="default: the config's")
    parser.add_argument("--tags", metavar="A,B", type=comma_separated, default=[], help="tags")
    parser.add_argument("--notes", metavar="TEXT", default="")
    parser.add_argument("--priority", metavar="N", type=int, default=0, help="higher starts first; default 0")


def _whole_numbers(text: str) -> list[int]:
    """`0,1,2` and `0-4`, together or alone."""
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise argparse.ArgumentTypeError(f"{text}: must be integers such as 0,1,2 or 0-4")
        begin, end = int(first), int(last if dash else first)
        if end - begin >= _MOST_SEEDS:
            raise argparse.ArgumentTypeError(f"{text}: must be at most {_MOST_SEEDS} seeds")
        numbers += range(begin, end + 1)
    return numbers


def _days(text: str) -> float:
    with suppress(ValueError):
        if 0 < (days := float(text)) <= _MOST_DAYS:
            return days
    raise argparse.ArgumentTypeError(f"{text}: must be a number above 0, at most {_MOST_DAYS}")


def _up_to(most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text}: must be a whole number from 1 to {most}")
        return int(text)

    return parse
