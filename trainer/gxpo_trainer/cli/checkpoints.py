"""`gxpo checkpoints`: list a run's checkpoints, or export a policy from one."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from gxpo_trainer.cli.arguments import Subparsers, positive

if TYPE_CHECKING:
    from gxpo_trainer.training.checkpoints import CheckpointStore


def register(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("checkpoints", help="list a run's checkpoints, or export a policy from one")
    parser.add_argument("folder", metavar="RUN_DIR", type=Path, help="output folder of a run")
    parser.add_argument("--export", metavar="DIR", type=Path, help="copy the policy to this new folder")
    parser.add_argument("--step", metavar="N", type=positive, help="checkpoint to export; default the latest")
    parser.add_argument("--adapter", action="store_true", help="export the LoRA adapter alone, for PEFT")
    parser.add_argument(
        "--extrapolate",
        metavar="FACTOR",
        type=float,
        help="with --export: the initial policy plus FACTOR times the change up to the checkpoint",
    )
    parser.add_argument(
        "--line", action="store_true", help="with --extrapolate: by the least-squares line through all checkpoints"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from gxpo_trainer.config import CheckpointConfig
    from gxpo_trainer.errors import CheckpointError, ConfigError
    from gxpo_trainer.training.checkpoints import CheckpointStore

    store = CheckpointStore(args.folder / "checkpoints", CheckpointConfig())
    steps = store.steps()
    if not steps:
        raise CheckpointError(f"{args.folder} has no checkpoint; give the output folder of a run that has saved one")
    if args.extrapolate is not None and (args.export is None or args.adapter):
        raise ConfigError("--extrapolate writes a whole policy: add --export DIR, and leave out --adapter")
    if args.export is None:
        for step in steps:
            score = store.load(step).state.get("score")
            print(f"step {step}" + ("" if score is None else f"  pass@1 {score:.4f}"))
        return 0
    step = args.step or steps[-1]
    if step not in steps:
        raise CheckpointError(f"--step {step}: no such checkpoint; choose from {', '.join(map(str, steps))}")
    _export(args, store, [known for known in steps if known <= step])
    print(args.export)
    return 0


def _export(args: argparse.Namespace, store: CheckpointStore, steps: list[int]) -> None:
    """Write the policy of the last of `steps`, or one extrapolated from them. Raises CheckpointError."""
    from gxpo_trainer.cluster.disk import write_errors
    from gxpo_trainer.errors import CheckpointError
    from gxpo_trainer.training.checkpoints import export_policy

    try:
        with write_errors():
            if args.extrapolate is None:
                export_policy(store.load(steps[-1]), args.export, adapter=args.adapter)
            else:
                _extrapolate(args, store, steps)
    except OSError as error:
        # copytree collects (source, target, reason) of all files.
        reason = error.args[0][0][2] if isinstance(error, shutil.Error) else error
        raise CheckpointError(f"cannot write {args.export} ({reason}); free space or choose another folder") from error


def _extrapolate(args: argparse.Namespace, store: CheckpointStore, steps: list[int]) -> None:
    """Write the policy extrapolated from the run's initial one and the checkpoints at `steps`."""
    from gxpo_trainer.config.io import build
    from gxpo_trainer.models.extrapolate import combine, line_weights
    from gxpo_trainer.models.load import resolve_model
    from gxpo_trainer.records.reading import read_identity

    chosen = steps if args.line else steps[-1:]
    initial = Path(resolve_model(build(read_identity(args.folder)["config"]).model))
    folders = [initial, *(store.load(step).policy for step in chosen)]
    combine(folders, line_weights([0, *chosen], args.extrapolate * chosen[-1]), args.export)
