"""`gxpo train`: train a policy on this machine or a Ray cluster."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gxpo_trainer.cli.arguments import Subparsers, add_set, names

LOGGERS = ("tensorboard", "wandb")


def register(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("train", help="train a policy on this machine or a Ray cluster")
    parser.add_argument("config", metavar="RUN.toml", type=Path, help="run file (.toml or .json)")
    add_set(parser)
    parser.add_argument("--out", metavar="DIR", type=Path, help="output folder; default runs/<name>")
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--resume", action="store_true", help="resume from the last checkpoint in the output folder")
    start.add_argument(
        "--continue",
        dest="continue_run",
        action="store_true",
        help="resume if the output folder contains a run, else start",
    )
    parser.add_argument(
        "--service", metavar="FILE", type=Path, help="service.json of the launch: report to that service"
    )
    parser.add_argument(
        "--log", metavar="NAMES", type=_loggers, default=(), help="also export to tensorboard,wandb (offline)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train; exit code 0 when a budget was reached or a pause or cancel request was fulfilled."""
    from gxpo_trainer.config.io import load_run
    from gxpo_trainer.errors import ConfigError
    from gxpo_trainer.records.uploader import take_service
    from gxpo_trainer.training.launch import Launch
    from gxpo_trainer.training.run import describe_end, train_in_launch

    if args.service is not None and args.out is None:
        raise ConfigError("--service requires --out, the folder that the service created for the run")
    service = take_service(args.service) if args.service else None
    # The service must be told about an invalid config; without a service nothing is created for one.
    config = load_run(args.config, args.set) if service is None else None
    with Launch(args.out or Path("runs") / safe_name(config.name if config else ""), service) as launch:
        config = config or load_run(args.config, args.set)
        ended = train_in_launch(config, launch, resume=args.resume, continue_run=args.continue_run, loggers=args.log)
    print(f"{config.name}: {describe_end(ended, launch)}; results in {launch.out_dir}", file=sys.stderr)
    return launch.exit_code


def safe_name(name: str) -> str:
    """A folder name from a run's name: letters, digits, dot, dash and underscore, without a leading dot."""
    kept = "".join(c if c.isalnum() or c in "._-" else "-" for c in name).lstrip(".")
    return kept or "run"


def _loggers(text: str) -> tuple[str, ...]:
    chosen = names(text)
    unknown = [name for name in chosen if name not in LOGGERS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: must be among {', '.join(LOGGERS)}")
    return chosen
