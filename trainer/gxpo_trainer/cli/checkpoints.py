"""`gxpo checkpoints`: list a run's checkpoints, or export a policy from one."""

from __future__ import annotations

import argparse
from pathlib import Path

from gxpo_trainer.cli.arguments import Subparsers, positive


def register(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("checkpoints", help="list a run's checkpoints, or export a policy from one")
    parser.add_argument("folder", metavar="RUN_DIR", type=Path, help="output folder of a run")
    parser.add_argument("--export", metavar="DIR", type=Path, help="copy the policy to this new folder")
    parser.add_argument("--step", metavar="N", type=positive, help="checkpoint to export; default the latest")
    parser.add_argument("--adapter", action="store_true", help="export the LoRA adapter alone, for PEFT")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from gxpo_trainer.config import CheckpointConfig
    from gxpo_trainer.errors import CheckpointError
    from gxpo_trainer.training.checkpoints import CheckpointStore, export_policy

    store = CheckpointStore(args.folder / "checkpoints", CheckpointConfig())
    steps = store.steps()
    if not steps:
        raise CheckpointError(f"{args.folder} has no checkpoint; give the output folder of a run that has saved one")
    if args.export is None:
        for step in steps:
            score = store.load(step).state.get("score")
            print(f"step {step}" + ("" if score is None else f"  pass@1 {score:.4f}"))
        return 0
    step = args.step or steps[-1]
    if step not in steps:
        raise CheckpointError(f"--step {step}: no such checkpoint; choose from {', '.join(map(str, steps))}")
    print(export_policy(store.load(step), args.export, adapter=args.adapter))
    return 0
