"""The `gxpo` command. Arguments are parsed before heavy modules are imported.

Each package registers its commands in the entry-point group `gxpo.commands`; an entry point is a function
`register(subparsers)` that adds one command and sets its default `run` to a function `run(args) -> int | None`.

Exit codes: 0 success, 1 failure, 2 invalid usage, config or data, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points

from gxpo_trainer import __version__
from gxpo_trainer.errors import GxpoError

COMMAND_GROUP = "gxpo.commands"


def build_parser() -> argparse.ArgumentParser:
    """The parser with the commands of every installed package."""
    parser = argparse.ArgumentParser(
        prog="gxpo", description="Post-train language models on verifiable problems with GRPO, SFPO and GXPO."
    )
    parser.add_argument("--version", action="version", version=f"gxpo {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for entry in entry_points(group=COMMAND_GROUP):
        entry.load()(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = build_parser().parse_args(argv)
    try:
        return args.run(args) or 0
    except GxpoError as error:
        print(f"gxpo: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("gxpo: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of a pipe (`gxpo config … | head`) has exited; prevent a failing flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
