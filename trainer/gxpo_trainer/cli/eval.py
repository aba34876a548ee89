"""`gxpo eval`: evaluate a model on benchmarks, without a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from gxpo_trainer.cli.arguments import Subparsers, add_set, names, positive


def register(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("eval", help="score a model on benchmarks")
    parser.add_argument(
        "--model", metavar="DIR", required=True, help="transformers folder, PEFT adapter, hub name, or `starter`"
    )
    parser.add_argument(
        "--benchmark", metavar="NAMES", required=True, type=names, help="comma-separated names or .jsonl files"
    )
    parser.add_argument("--samples", metavar="N", type=positive, default=16, help="responses per problem; default 16")
    parser.add_argument("--problems", metavar="N", type=positive, help="use the first N problems of each benchmark")
    parser.add_argument("--max-new-tokens", metavar="N", type=positive, help="longest response; default 3072")
    parser.add_argument("--temperature", metavar="T", type=float, default=1.0, help="default 1")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="default 0")
    parser.add_argument("--data-root", metavar="DIR", type=Path, help="folder with local copies of the benchmarks")
    parser.add_argument("--template", metavar="T", default="auto", help="plain, boxed, or a text with {problem}")
    add_set(parser)
    parser.add_argument("--out", metavar="FILE", type=Path, help="also write the scores to this file, as JSON lines")
    parser.add_argument("--against", metavar="FILE", type=Path, help="show the difference to an earlier --out file")
    parser.add_argument("--compare-published", action="store_true", help="also show the GXPO paper's results")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from gxpo_trainer.cli.eval_model import evaluate_model

    return evaluate_model(args)
