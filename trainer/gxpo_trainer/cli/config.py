"""`gxpo config`: print a preset, check a run file, list all settings."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from gxpo_trainer.cli.arguments import Subparsers, add_set

if TYPE_CHECKING:
    from gxpo_trainer.config import PlacementConfig, RunConfig


def register(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("config", help="print a preset, check a run file, list all settings")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--preset", metavar="NAME", help="print this preset; --list-presets names them")
    what.add_argument("--file", metavar="FILE", type=Path, help="print this run file with all defaults filled in")
    what.add_argument("--check", metavar="FILE", type=Path, help="check this run file; exit code 0 or 2")
    what.add_argument("--schema", action="store_true", help="print the JSON schema of all settings")
    what.add_argument("--list-presets", action="store_true", help="print the names of the presets")
    add_set(parser)
    parser.add_argument("--format", choices=("toml", "json"), default="toml", help="default toml")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import json

    from gxpo_trainer.config import io as config_io

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


def _gpus(p: PlacementConfig) -> str:
    """GPUs that a run needs, and where sharing them is possible."""
    separate = f"{p.learner_ranks} for the learner and {p.sampler_devices} for the samplers"
    shared, apart = p.num_gpus(colocated=True), p.num_gpus(colocated=False)
    if p.can_colocate and p.colocate is True:
        return f"Needs {shared} GPUs, which learner and samplers share."
    if p.can_colocate:
        return f"Needs {shared} GPUs, which learner and samplers share, or {apart}: {separate}."
    return f"Needs {apart} GPUs: {separate}."


def _comments(config: RunConfig) -> list[str]:
    """Backward passes per step, and the expected step at which noise alone fires the gate."""
    from gxpo_trainer.rules.false_alarm import describe

    rule = config.learner.rule
    needs = [_gpus(config.placement)] if config.placement.device == "gpu" else []
    passes, gate = rule.passes_per_step(gate_open=True), rule.gate_config
    cost = f"{rule.label}: {passes} backward pass{'es' if passes > 1 else ''} per step"
    if gate is None:
        return [f"{cost}.", *needs]
    closed = rule.passes_per_step(gate_open=False)
    return [f"{cost} while the look-ahead is on, {closed} after it.", describe(gate), *needs]
