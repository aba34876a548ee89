"""`gxpo report`: compare runs on disk; prints tables and writes figures and an HTML page."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gxpo_trainer.cli.arguments import Subparsers, share


def register(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("report", help="compare runs on disk: tables, curves and an HTML page")
    parser.add_argument("runs", metavar="RUN_DIR", type=Path, nargs="+", help="output folders of runs")
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("report"), help="default report")
    parser.add_argument(
        "--baseline", metavar="NAME", help="group to compare the others with; default: the most accurate GRPO"
    )
    parser.add_argument("--benchmark", metavar="NAME", help="default: the average of all")
    parser.add_argument(
        "--smoothing", metavar="S", type=share, default=0.0, help="weight of the exponential average; default 0"
    )
    parser.add_argument(
        "--sampling-share",
        metavar="S",
        type=share,
        help="share of a step that sampling takes, to say when a look-ahead pays; default: as measured",
    )
    parser.add_argument("--title", metavar="TEXT", default="Comparison of runs")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compare runs; those whose configs differ only in name and seed are seeds of one group."""
    from rich.console import Console

    from gxpo_trainer.errors import ConfigError
    from gxpo_trainer.records.comparison_tables import print_tables
    from gxpo_trainer.records.curves import group_runs
    from gxpo_trainer.records.figures import HTML_NAME, PNG_NAME, write_report

    groups = group_runs(args.runs, args.benchmark)
    names = [group.name for group in groups]
    if args.baseline is not None and args.baseline not in names:
        raise ConfigError(f"--baseline {args.baseline}: choose one of {', '.join(names)}")
    comparison = write_report(
        args.out,
        groups,
        baseline=args.baseline,
        smoothing=args.smoothing,
        sampling_share=args.sampling_share,
        title=args.title,
    )
    # Without a terminal rich assumes 80 columns, which would wrap the tables.
    console = Console(width=None if sys.stdout.isatty() else 120)
    print_tables(groups, comparison, console, args.sampling_share)
    print(f"\nReport: {args.out / HTML_NAME}\nCurves: {args.out / PNG_NAME}")
    return 0
