"""`gxpo grade`: verify the answers of a file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gxpo_trainer.cli.arguments import Subparsers, positive, positive_seconds


def register(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("grade", help="verify answers in a file")
    parser.add_argument("file", metavar="FILE.jsonl", type=Path, help='lines of {"gold", "prediction"}')
    parser.add_argument("--workers", metavar="N", type=positive, help="verifier processes; default: one per core")
    parser.add_argument(
        "--deadline",
        metavar="S",
        type=positive_seconds,
        default=5.0,
        help="time limit per answer in seconds; default 5",
    )
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help="write verdicts to this file instead of standard output"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from gxpo_trainer.cli.grade_file import grade_file
    from gxpo_trainer.errors import ConfigError

    if args.out is None:
        counts = grade_file(args.file, sys.stdout, workers=args.workers, deadline_s=args.deadline)
    elif args.out.resolve() == args.file.resolve():
        raise ConfigError(f"--out {args.out} is the input file; choose another")
    else:
        # Renamed at the end, so that bad input or an interruption does not overwrite the target.
        part = args.out.with_name(f"{args.out.name}.part")
        try:
            with part.open("w", encoding="utf-8") as stream:
                counts = grade_file(args.file, stream, workers=args.workers, deadline_s=args.deadline)
            part.replace(args.out)
        except OSError as error:
            raise ConfigError(f"--out {args.out} cannot be written: {error.strerror}") from None
        finally:
            part.unlink(missing_ok=True)
    print(", ".join(f"{number} {verdict}" for verdict, number in counts.items()), file=sys.stderr)
    return 0
