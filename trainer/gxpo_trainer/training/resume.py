"""Whether a config may resume a run, and as which attempt: settings that affect results must be equal.

The ZeRO stage and the number of learner ranks may change: a checkpoint is resharded as it loads (learner.rank_state).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.io import build
from gxpo_trainer.errors import CheckpointError
from gxpo_trainer.models.load import policy_shapes, saved_shapes
from gxpo_trainer.records.reading import IDENTITY, read_events, read_identity, read_metrics
from gxpo_trainer.training.checkpoints import Checkpoint

MAY_CHANGE = ("name", "budget", "checkpoint", "placement", "verifier", "evaluation", "diagnostics", "timeouts")
"""Parts that do not change what a training step computes; but `verifier.rewards` does."""
MAY_CHANGE_WITHIN = {
    "model": {"gradient_checkpointing"},
    "learner": {"zero_stage", "token_budget"},
    "rollout": {
        "logprob_gap_mean_limit",
        "logprob_gap_max_limit",
        "gpu_memory_utilization",
        "cpu_kv_cache_gib",
        "max_num_seqs",
    },
}
"""Settings of other parts that change a step by rounding at most: memory, and limits that end a run or warn."""


def check_same_run(checkpoint: Checkpoint, config: RunConfig, out_dir: Path) -> None:
    """Raises CheckpointError naming the first setting that differs from the run that wrote the checkpoint."""
    # Read as a config of today: a setting that is newer than the run has its default in both.
    begun = build(read_identity(out_dir)["config"], source=str(out_dir / IDENTITY))
    then, now = (_decisive(found.model_dump(mode="json")) for found in (begun, config))
    for part in now:
        place = _difference(part, then.get(part), now[part])
        if place is not None:
            name, before, after = place
            raise CheckpointError(
                f"{checkpoint.path} was written with {name} = {before!r}, this run has {after!r}; "
                "resume with the earlier value, or start a new run in another folder"
            )


def _decisive(config: dict[str, Any]) -> dict[str, Any]:
    kept = {part: value for part, value in config.items() if part not in MAY_CHANGE}
    for part, free in MAY_CHANGE_WITHIN.items():
        kept[part] = {name: value for name, value in config[part].items() if name not in free}
    return kept | {"verifier": {"rewards": config["verifier"].get("rewards")}}


def check_same_model(checkpoint: Checkpoint, config: RunConfig, out_dir: Path, policy_sha256: str) -> None:
    """Raises CheckpointError when `model.path` is not the model that the run began with, or that was checkpointed.

    policy_sha256: of the files at `model.path` now.
    """
    way_out = (
        f"set model.path (now {config.model.path!r}) to the model of the run, or start a new run in another folder"
    )
    begun = read_identity(out_dir).get("policy_sha256")
    if begun is not None and begun != policy_sha256:
        raise CheckpointError(
            f"{out_dir} began with another model: its files have the hash {begun[:12]}, those at model.path "
            f"{policy_sha256[:12]}; {way_out}"
        )
    saved, here = saved_shapes(checkpoint.policy), policy_shapes(config.model)
    for name in sorted({*saved, *here}):
        if saved.get(name) != here.get(name):
            then, now = (found.get(name, "nothing") for found in (saved, here))
            raise CheckpointError(
                f"{checkpoint.path} is of another model: it has {then} for {name}, that of model.path {now}; {way_out}"
            )


def next_attempt(out_dir: Path, checkpoint: Checkpoint | None) -> int:
    """Number of the next attempt: above all that have begun, including those since the checkpoint."""
    begun = [int(event["attempt"]) for event in read_events(out_dir) if event["kind"] == "attempt"]
    if checkpoint is not None:
        begun.append(int(checkpoint.state["attempt"]))
    return max(begun, default=0) + 1


def repeated_passes(out_dir: Path, checkpoint: Checkpoint | None) -> float:
    """Backward passes that all attempts so far have spent on steps which the next attempt repeats."""
    total = "update/backward_passes_total"
    rows = [row["metrics"] for row in read_metrics(out_dir) if total in row["metrics"]]
    if not rows:
        return 0.0
    kept = float(checkpoint.state["counters"]["backward_passes"]) if checkpoint is not None else 0.0
    return float(rows[-1][total] + rows[-1].get("update/repeated_passes_total", 0.0) - kept)


def _difference(name: str, then: Any, now: Any) -> tuple[str, Any, Any] | None:
    if isinstance(then, dict) and isinstance(now, dict):
        for key in sorted({*then, *now}):
            found = _difference(f"{name}.{key}", then.get(key), now.get(key))
            if found is not None:
                return found
        return None
    return None if then == now else (name, then, now)
