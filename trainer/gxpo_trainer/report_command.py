"""`gxpo report`: compare runs on disk; tables on stdout, figures and an HTML page in a folder."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from gxpo_trainer.errors import ConfigError
from gxpo_trainer.figures import HTML_NAME, PNG_NAME, write_report
from gxpo_trainer.runs import group_runs
from gxpo_trainer.tables import print_tables


def report_command(args: argparse.Namespace) -> int:
    """Runs whose configs differ in name and seed alone count as seeds of one group."""
    groups = group_runs(args.runs, args.benchmark)
    names = [group.name for group in groups]
    if args.baseline is not None and args.baseline not in names:
        raise ConfigError(f"--baseline {args.baseline}: choose one of {', '.join(names)}")
    comparison = write_report(args.out, groups, baseline=args.baseline, smoothing=args.smoothing, title=args.title)
    # A pipe has no width of its own, and rich would fold the tables into 80 columns.
    print_tables(groups, comparison, Console(width=None if sys.stdout.isatty() else 120))
    print(f"\nReport: {args.out / HTML_NAME}\nCurves: {args.out / PNG_NAME}")
    return 0
