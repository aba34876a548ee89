"""Arguments and argument types shared by several commands."""

from __future__ import annotations

import argparse
from typing import Any

Subparsers = Any  # argparse._SubParsersAction, which has no public name


def add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", metavar="A.B=C", action="append", default=[], help="override one setting; may be repeated"
    )


def names(text: str) -> tuple[str, ...]:
    found = tuple(name.strip() for name in text.split(",") if name.strip())
    if not found:
        raise argparse.ArgumentTypeError("must contain at least one name")
    return found


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number of at least 1")
    return int(text)


def share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a number from 0 up to, not including, 1")
    return value


def positive_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"{text}: must be a number of seconds above 0")
    return seconds
