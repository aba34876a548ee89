"""May this config continue that run? What can change a result must be the same; a budget may grow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gxpo_trainer.checkpoint import Checkpoint
from gxpo_trainer.config import RunConfig
from gxpo_trainer.errors import CheckpointError
from gxpo_trainer.report import read_identity

MAY_CHANGE = ("name", "budget", "checkpoint", "placement", "verifier", "evaluation", "diagnostics")
"""Parts that do not change what a training step computes."""


def check_same_run(checkpoint: Checkpoint, config: RunConfig, out_dir: Path) -> None:
    """Raises CheckpointError naming the first setting that differs from the run that wrote the checkpoint."""
    then: dict[str, Any] = read_identity(out_dir)["config"]
    now = config.model_dump(mode="json")
    for part in now:
        if part in MAY_CHANGE:
            continue
        place = _difference(part, then.get(part), now[part])
        if place is not None:
            name, before, after = place
            raise CheckpointError(
                f"{checkpoint.path} was written with {name} = {before!r}, this run has {after!r}; "
                "resume with the earlier value, or start a new run in another folder"
            )


def _difference(name: str, then: Any, now: Any) -> tuple[str, Any, Any] | None:
    if isinstance(then, dict) and isinstance(now, dict):
        for key in sorted({*then, *now}):
            found = _difference(f"{name}.{key}", then.get(key), now.get(key))
            if found is not None:
                return found
        return None
    return None if then == now else (name, then, now)
