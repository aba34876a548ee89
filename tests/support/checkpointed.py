"""The folder of a run that has saved a checkpoint, without its steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gxpo_trainer.reporting.identity import run_identity
from gxpo_trainer.reporting.reporter import RunReporter
from gxpo_trainer.training.prepare import Prepared
from gxpo_trainer.training.run import Fit, build_runtime


def save_checkpoint(prepared: Prepared) -> None:
    """Write run.json and the checkpoint of step 1, with the data cursor that the run would have at its start."""
    config, problems = prepared.config, prepared.problems
    with RunReporter(prepared.out_dir) as reporter:
        files = prepared.training_sha256
        reporter.write_identity(run_identity(config, data_sha256=files, policy_sha256=prepared.policy_sha256))
        runtime = build_runtime(
            config,
            prepared.placement,
            prepared.model_folder,
            problems.prompts,
            reporter.log_event,
            fit=Fit(),
            rows=problems.rows,
        )
    prepared.store.save(1, {"cursor": runtime.rollouts.state_dict()}, _no_parts)


def _no_parts(folder: Path) -> dict[str, Any]:
    return {}
