"""Checkpoints of a run."""

from __future__ import annotations

from typing import BinaryIO

from gxpo_services.api.errors import Conflict, NotFound
from gxpo_services.artifacts.run_files import RunFiles
from gxpo_services.checkpoints import files
from gxpo_services.checkpoints.schemas import CheckpointsView, CheckpointView
from gxpo_services.settings import ServiceSettings


def list_checkpoints(settings: ServiceSettings, run_id: str) -> CheckpointsView:
    found = files.checkpoints(RunFiles(settings.artifacts, run_id))
    best = files.best(found)
    items = [
        CheckpointView(
            step=checkpoint.step,
            score=checkpoint.score,
            size_bytes=checkpoint.size_bytes,
            created_at=checkpoint.created_at,
            best=checkpoint is best,
            newest=checkpoint is found[-1],
        )
        for checkpoint in found
    ]
    return CheckpointsView(items=items)


def open_policy(settings: ServiceSettings, run_id: str, step: int) -> list[tuple[str, BinaryIO]]:
    """Raises NotFound, Conflict."""
    try:
        return files.open_policy(RunFiles(settings.artifacts, run_id), step)
    except FileNotFoundError:
        raise NotFound(f"run {run_id} has no checkpoint at step {step}") from None
    except files.TooManyFiles as error:
        raise Conflict(str(error)) from None
