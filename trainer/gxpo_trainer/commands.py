"""The trainer's commands: arguments here, work in modules that are imported only when a command runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gxpo_trainer.config import RunConfig

Subparsers = Any  # argparse._SubParsersAction, which has no public name
LOGGERS = ("tensorboard", "wandb")


def register_train(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("train", help="train a policy on this machine or a Ray cluster")
    parser.add_argument("config", metavar="RUN.toml", type=Path, help="run file (.toml or .json)")
    _add_set(parser)
    parser.add_argument("--out", metavar="DIR", type=Path, help="output folder; default runs/<name>")
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--resume", action="store_true", help="go on from the last checkpoint in the output folder")
    start.add_argument(
        "--continue", dest="go_on", action="store_true", help="go on where the output folder holds a run, else start"
    )
    parser.add_argument("--service", metavar="FILE", type=Path, help="report to the service that wrote this file")
    parser.add_argument(
        "--log", metavar="NAMES", type=_loggers, default=(), help="also export to tensorboard,wandb (offline)"
    )
    parser.set_defaults(run=_train)


def register_eval(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("eval", help="score a model on benchmarks")
    parser.add_argument(
        "--model", metavar="DIR", required=True, help="transformers folder, PEFT adapter, hub name, or `starter`"
    )
    parser.add_argument(
        "--benchmark", metavar="NAMES", required=True, type=_names, help="comma-separated names or .jsonl files"
    )
    parser.add_argument("--samples", metavar="N", type=_positive, default=16, help="responses a problem; default 16")
    parser.add_argument("--problems", metavar="N", type=_positive, help="only the first so many problems of each")
    parser.add_argument("--max-new-tokens", metavar="N", type=_positive, help="longest response; default 3072")
    parser.add_argument("--temperature", metavar="T", type=float, default=1.0, help="default 1")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="default 0")
    parser.add_argument("--data-root", metavar="DIR", type=Path, help="folder with local copies of the benchmarks")
    parser.add_argument("--template", metavar="T", default="auto", help="plain, boxed, or a text with {problem}")
    parser.add_argument("--out", metavar="FILE", type=Path, help="also write the scores there, as JSON lines")
    parser.add_argument("--against", metavar="FILE", type=Path, help="show the difference to an earlier --out file")
    parser.add_argument("--compare-published", action="store_true", help="show the GXPO paper's numbers beside them")
    parser.set_defaults(run=_eval)


def register_grade(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("grade", help="verify answers in a file")
    parser.add_argument("file", metavar="FILE.jsonl", type=Path, help='lines of {"gold", "prediction"}')
    parser.add_argument("--workers", metavar="N", type=_positive, help="verifier processes; default: one a core")
    parser.add_argument(
        "--deadline", metavar="S", type=_positive_seconds, default=5.0, help="seconds an answer may take; default 5"
    )
    parser.add_argument("--out", metavar="FILE", type=Path, help="write verdicts there instead of standard output")
    parser.set_defaults(run=_grade)


def register_config(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("config", help="print a preset, check a run file, list all settings")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--preset", metavar="NAME", help="print this preset; --list-presets names them")
    what.add_argument("--file", metavar="FILE", type=Path, help="print this run file with all defaults filled in")
    what.add_argument("--check", metavar="FILE", type=Path, help="check this run file; exit code 0 or 2")
    what.add_argument("--schema", action="store_true", help="print the JSON schema of all settings")
    what.add_argument("--list-presets", action="store_true", help="print the names of the presets")
    _add_set(parser)
    parser.add_argument("--format", choices=("toml", "json"), default="toml", help="default toml")
    parser.set_defaults(run=_config)


def register_report(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("report", help="compare runs on disk: tables, curves and an HTML page")
    parser.add_argument("runs", metavar="RUN_DIR", type=Path, nargs="+", help="output folders of runs")
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("report"), help="default report")
    parser.add_argument("--baseline", metavar="NAME", help="what the others are compared with; default: GRPO")
    parser.add_argument("--benchmark", metavar="NAME", help="default: the average of all")
    parser.add_argument("--smoothing", metavar="S", type=_share, default=0.0, help="weight of the past; default 0")
    parser.add_argument("--title", metavar="TEXT", default="Comparison of runs")
    parser.set_defaults(run=_report)


def _train(args: argparse.Namespace) -> int:
    from gxpo_trainer.train import train_command

    return train_command(args)


def _eval(args: argparse.Namespace) -> int:
    from gxpo_trainer.eval_command import eval_command

    return eval_command(args)


def _report(args: argparse.Namespace) -> int:
    from gxpo_trainer.report_command import report_command

    return report_command(args)


def _grade(args: argparse.Namespace) -> int:
    import sys

    from gxpo_trainer.errors import ConfigError
    from gxpo_trainer.verify.command import grade_file

    if args.out is None:
        counts = grade_file(args.file, sys.stdout, workers=args.workers, deadline_s=args.deadline)
    elif args.out.resolve() == args.file.resolve():
        raise ConfigError(f"--out {args.out} is the input file; name another")
    else:
        # Written beside the target and moved at the end: bad input or an interruption overwrites nothing.
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


def _config(args: argparse.Namespace) -> int:
    import json

    from gxpo_trainer import config_io

    if args.list_presets:
        print("\n".join(config_io.preset_names()))
    elif args.schema:
        from gxpo_trainer.config import RunConfig

        print(json.dumps(RunConfig.model_json_schema(), indent=2, ensure_ascii=False))
    elif args.check is not None:
        config = config_io.load_run(args.check, args.set)
        print(f"{args.check}: {_summary(config)}")
    else:
        config = (
            config_io.load_preset(args.preset, args.set) if args.preset else config_io.load_run(args.file, args.set)
        )
        if args.format == "json":
            print(config_io.to_json(config))
        else:
            print(config_io.to_toml(config, comments=_comments(config)), end="")
    return 0


def _summary(config: RunConfig) -> str:
    budget = {name: value for name, value in config.budget.model_dump().items() if value is not None}
    bounds = ", ".join(f"{name} {value}" for name, value in budget.items())
    return f"valid, rule {config.learner.rule.name}, budget {bounds}"


def _comments(config: RunConfig) -> list[str]:
    """What the numbers alone do not say: passes a step, and when noise alone would end the look-ahead."""
    from gxpo_trainer.rules.false_alarm import describe

    rule = config.learner.rule
    if rule.name == "grpo":
        return ["GRPO: 1 backward pass a step."]
    passes = rule.k + 1 if rule.name == "sfpo" else rule.probes + 1
    return [
        f"{rule.name.upper()}: {passes} backward passes a step while the look-ahead is on, 1 after it.",
        describe(rule.gate),
    ]


def _add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", metavar="A.B=C", action="append", default=[], help="override one setting; may be repeated"
    )


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise argparse.ArgumentTypeError("must name at least one")
    return names


def _loggers(text: str) -> tuple[str, ...]:
    names = _names(text)
    unknown = [name for name in names if name not in LOGGERS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: must be among {', '.join(LOGGERS)}")
    return names


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number of at least 1")
    return int(text)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a number from 0 up to, not including, 1")
    return share


def _positive_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"{text}: must be a number of seconds above 0")
    return seconds


def register_checkpoints(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("checkpoints", help="list a run's checkpoints, or export a policy from one")
    parser.add_argument("folder", metavar="RUN_DIR", type=Path, help="output folder of a run")
    parser.add_argument("--export", metavar="DIR", type=Path, help="copy the policy to this new folder")
    parser.add_argument("--step", metavar="N", type=_positive, help="which checkpoint; default the newest")
    parser.add_argument("--adapter", action="store_true", help="export the LoRA adapter alone, for PEFT")
    parser.set_defaults(run=_checkpoints)


def _checkpoints(args: argparse.Namespace) -> int:
    from gxpo_trainer.checkpoint import CheckpointStore, export_policy
    from gxpo_trainer.config import CheckpointConfig
    from gxpo_trainer.errors import CheckpointError

    store = CheckpointStore(args.folder / "checkpoints", CheckpointConfig())
    steps = store.steps()
    if not steps:
        raise CheckpointError(f"{args.folder} has no checkpoint; name the output folder of a run that has saved one")
    if args.export is None:
        for step in steps:
            score = store.load(step).state.get("score")
            print(f"step {step}" + ("" if score is None else f"  pass@1 {score:.4f}"))
        return 0
    step = args.step or steps[-1]
    if step not in steps:
        raise CheckpointError(f"--step {step}: there is no such checkpoint; choose from {', '.join(map(str, steps))}")
    print(export_policy(store.load(step), args.export, adapter=args.adapter))
    return 0
