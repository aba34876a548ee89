"""Checkpoints: written whole or not at all, verified by hash before use, few kept; and whether a config may resume one.

    checkpoints/step-00000040/
        manifest.json             sha256 of every other file; written last
        state.json                counters, data cursor, rule and gate state, attempt, config hash
        learner/rank-<r>.safetensors, rank-<r>.json     fp32 shards, moments, RNG of each rank (learner/checkpoint.py)
        policy/                   a plain transformers folder (weights merged under LoRA)
        adapter/                  the adapter alone, under LoRA

A checkpoint is built in a hidden folder and renamed, so a crash or a full disk does not affect earlier ones. The ranks
write their own files. A run resumes with equal values of all settings that affect results; the ZeRO stage and the
number of learner ranks may change, because a checkpoint is resharded as it loads (learner.checkpoint).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gxpo_trainer.config import CheckpointConfig, RunConfig
from gxpo_trainer.config.io import build
from gxpo_trainer.data.records import sha256_of_file
from gxpo_trainer.errors import CheckpointError
from gxpo_trainer.jsonl import restored, sync_folder, write_json
from gxpo_trainer.reporting.identity import hash_path
from gxpo_trainer.reporting.reading import IDENTITY, read_events, read_identity, read_metrics
from gxpo_trainer.reporting.trackers import current_config

CHECKPOINTS = "checkpoints"
MANIFEST, STATE, LEARNER, POLICY, ADAPTER = "manifest.json", "state.json", "learner", "policy", "adapter"
_PREFIX = "step-"
_HIDDEN = ("partial", "replaced", "dropped")
"""Suffixes of hidden folders: being written, replaced by the same step's next checkpoint, being deleted."""
_COMMIT = re.compile("[0-9a-f]{40}")
FORMAT = 2
MAY_CHANGE = {
    *("name", "budget", "checkpoint", "placement", "verifier"),
    *("evaluation", "diagnostics", "timeouts", "logging"),
}
"""Parts that do not change what a training step computes; but the rewards and `verifier.answer` do."""
MAY_CHANGE_WITHIN = {
    "model": {"gradient_checkpointing"},
    "learner": {"zero_stage", "token_budget", "sequence_parallel"},
    "rollout": {
        *("logprob_gap_mean_limit", "logprob_gap_max_limit"),
        *("gpu_memory_utilization", "enforce_eager", "cpu_kv_cache_gib", "max_num_seqs"),
    },
    "environment": {"deadline_s", "workers", "memory_mb", "host"},
}
"""Settings of other parts that change a step by rounding at most: memory, and limits that end a run or warn; and limits
of environments, which a run may have failed on."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose files have been verified."""

    path: Path
    step: int
    state: dict[str, Any]


class CheckpointStore:
    """The `checkpoints/` folder of one run."""

    def __init__(self, root: Path, settings: CheckpointConfig) -> None:
        self.root = root
        self.settings = settings

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, ascending; unfinished ones do not count."""
        if not self.root.is_dir():
            return []
        names = (path.name.removeprefix(_PREFIX) for path in self.root.glob(f"{_PREFIX}*") if path.is_dir())
        return sorted(int(name) for name in names if name.isdigit())

    def path(self, step: int) -> Path:
        return self.root / f"{_PREFIX}{step:08d}"

    def _hidden(self, step: int, suffix: str) -> Path:
        """A name of a step's folder under which it does not count as a checkpoint."""
        return self.root / f".{self.path(step).name}.{suffix}"

    def save(
        self,
        step: int,
        state: dict[str, Any],
        write_parts: Callable[[Path], dict[str, Any]],
        *,
        score: float | None = None,
    ) -> Path:
        """Write one checkpoint atomically and delete those that need not be kept, and what a killed process has left.

        write_parts(folder) fills `learner/` and `policy/` and returns the state of the rule. score: what `keep_best`
        ranks by. Raises OSError when the disk is full; earlier checkpoints are unchanged.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        for suffix in _HIDDEN:
            for unfinished in self.root.glob(f".{_PREFIX}*.{suffix}"):
                shutil.rmtree(unfinished, ignore_errors=True)
        work = self._hidden(step, "partial")
        try:
            (work / LEARNER).mkdir(parents=True)
            rule = write_parts(work)
            write_json(work / STATE, {**state, "rule": rule, "step": step, "score": score})
            hashes = {str(p.relative_to(work)): hash_path(p) for p in sorted(work.rglob("*")) if p.is_file()}
            write_json(work / MANIFEST, {"format": FORMAT, "step": step, "sha256": hashes})
            _sync_tree(work)
            target = self.path(step)
            retired = self._hidden(step, "replaced")
            if target.exists():  # a later attempt reached the same step again
                target.rename(retired)
            work.rename(target)
            sync_folder(self.root)
            shutil.rmtree(retired, ignore_errors=True)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
        self._retain(step)
        return target

    def load(self, step: int) -> Checkpoint:
        """The checkpoint of a step, every file compared with the manifest.

        Raises CheckpointError, naming the file and the fix, when it is incomplete or altered.
        """
        path = self.path(step)
        others = [other for other in self.steps() if other != step]
        fix = f"delete {path.name} to go on from step {others[-1]}" if others else "start a new run in another folder"
        try:
            manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
            state = json.loads((path / STATE).read_text(encoding="utf-8"))
            expected = dict(manifest["sha256"])
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"checkpoint {path} is incomplete ({error}); {fix}") from error
        if manifest.get("format") != FORMAT:
            raise CheckpointError(
                f"checkpoint {path} has format {manifest.get('format')!r}, this version reads {FORMAT}; "
                "resume with the version that wrote it"
            )
        for name, digest in expected.items():
            file = path / name
            if not file.is_file():
                raise CheckpointError(f"checkpoint {path} lacks {name}; {fix}")
            try:
                intact = sha256_of_file(file) == digest
            except OSError as error:
                raise CheckpointError(f"checkpoint {path}: {name} cannot be read ({error.strerror}); {fix}") from error
            if not intact:
                raise CheckpointError(f"checkpoint {path}: {name} is truncated or altered; {fix}")
        return Checkpoint(path, step, {**state, "rule": restored(state["rule"])})

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint, verified; None when there is none. Raises CheckpointError as `load`."""
        steps = self.steps()
        return self.load(steps[-1]) if steps else None

    def latest_valid(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest valid checkpoint, and why newer ones were skipped."""
        problems: list[str] = []
        for step in reversed(self.steps()):
            try:
                return self.load(step), problems
            except CheckpointError as error:
                problems.append(str(error))
        return None, problems

    def _retain(self, newest: int) -> None:
        """Delete the checkpoints up to `newest` that need not be kept. Later ones are damaged, since the run was not
        resumed from them: they do not count, and are replaced when it reaches their steps."""
        steps = [step for step in self.steps() if step <= newest]
        keep = set(steps[-self.settings.keep_last :])
        scores = {step: score for step in steps if (score := self.score(step)) is not None}
        # Of equal scores the earliest is the best, because it cost least.
        best = sorted(scores, key=lambda step: (-scores[step], step))[: self.settings.keep_best]
        for step in set(steps) - keep - set(best):
            dropped = self._hidden(step, "dropped")
            self.path(step).rename(dropped)  # a partly deleted checkpoint must not have a checkpoint's name
            shutil.rmtree(dropped, ignore_errors=True)

    def record_score(self, step: int, score: float) -> None:
        """Add the score of an evaluation after the checkpoint, which is valid at every moment. Raises OSError."""
        path = self.path(step)
        manifest, state = (json.loads((path / name).read_text(encoding="utf-8")) for name in (MANIFEST, STATE))
        manifest["sha256"].pop(STATE, None)  # what has no hash is not compared
        write_json(path / MANIFEST, manifest)
        write_json(path / STATE, {**state, "score": score, "evaluation_owed": False})
        manifest["sha256"][STATE] = hash_path(path / STATE)
        write_json(path / MANIFEST, manifest)
        self._retain(step)

    def score(self, step: int) -> float | None:
        """The score of a checkpoint, whose files are not verified; None without an evaluation."""
        try:
            score = json.loads((self.path(step) / STATE).read_text(encoding="utf-8")).get("score")
        except (OSError, ValueError):
            return None
        return float(score) if isinstance(score, (int, float)) else None


def export_policy(checkpoint: Checkpoint, target: Path, *, adapter: bool = False) -> Path:
    """Copy a checkpoint's policy (or its adapter) to a new folder that transformers (or PEFT) loads as it is.

    Raises CheckpointError when the target exists or the checkpoint has no adapter, and OSError.
    """
    source = checkpoint.path / (ADAPTER if adapter else POLICY)
    if not source.is_dir():
        raise CheckpointError(f"{checkpoint.path} has no {source.name}; only LoRA runs have an adapter")
    if target.exists():
        raise CheckpointError(f"{target} already exists; choose a new folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        shutil.copytree(source, Path(folder) / "policy").rename(target)
    return target


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        else:
            sync_folder(path)
    sync_folder(folder)


def check_same_run(checkpoint: Checkpoint | None, config: RunConfig, out_dir: Path) -> None:
    """Raises CheckpointError naming the first setting that differs from the run in the folder, which may have no
    checkpoint yet."""
    if (difference := first_difference(config, out_dir)) is not None:
        name, before, after = difference
        written = checkpoint.path if checkpoint else out_dir / IDENTITY
        raise CheckpointError(
            f"{written} was written with {name} = {before!r}, this run has {after!r}; "
            "resume with the earlier value, or start a new run in another folder"
        )


def first_difference(config: RunConfig, out_dir: Path, more: Collection[str] = ()) -> tuple[str, Any, Any] | None:
    """The first setting in which a folder's run differs in what its steps compute: name, value then and now.

    more: parts of MAY_CHANGE that count as well.
    """
    # Read as a config of today: a setting that is newer than the run has its default in both.
    begun = build(read_identity(out_dir)["config"], source=str(out_dir / IDENTITY))
    then, now = (_decisive(c.model_dump(mode="json"), more) for c in (begun, config))
    return next((found for part in now if (found := _difference(part, then.get(part), now[part]))), None)


def _decisive(config: dict[str, Any], more: Collection[str]) -> dict[str, Any]:
    kept = {part: value for part, value in config.items() if part not in MAY_CHANGE or part in more}
    for part, free in MAY_CHANGE_WITHIN.items():
        kept[part] = {name: value for name, value in config[part].items() if name not in free}
    return kept | {"verifier": {name: config["verifier"].get(name) for name in ("answer", "rewards")}}


def _difference(name: str, then: Any, now: Any) -> tuple[str, Any, Any] | None:
    if isinstance(then, dict) and isinstance(now, dict):
        # The choice of a rule or a loss first: the others follow from it.
        for key in sorted({*then, *now}, key=lambda key: (key not in ("name", "surrogate"), key)):
            difference = _difference(f"{name}.{key}", then.get(key), now.get(key))
            if difference is not None:
                return difference
        return None
    return None if then == now else (name, then, now)


def with_run_commits(config: RunConfig, out_dir: Path) -> RunConfig:
    """With the commits that a folder's run began with, for models of the same hub names and without another commit."""
    begun = read_identity(out_dir)["config"]
    for part in ("model", "teacher"):
        own, earlier = getattr(config, part), begun.get(part)
        if own is None or not earlier or earlier["path"] != own.path or _COMMIT.fullmatch(own.revision or ""):
            continue
        if (commit := earlier.get("revision")) is not None:
            config = config.model_copy(update={part: own.model_copy(update={"revision": commit})})
    return config


def check_same_model(config: RunConfig, out_dir: Path, policy_sha256: str) -> None:
    """Raises CheckpointError when `model.path` is not the model that the run began with.

    policy_sha256: of the files at `model.path` now.
    """
    begun = read_identity(out_dir)["policy_sha256"]
    if begun != policy_sha256:
        raise CheckpointError(
            f"{out_dir} began with another model: its files have the hash {begun[:12]}, those at model.path "
            f"{policy_sha256[:12]}; set model.path (now {config.model.path!r}) to the model of the run, or start a new "
            "run in another folder"
        )


def check_same_data(out_dir: Path, sha256: Mapping[str, str]) -> None:
    """Raises CheckpointError when training data has changed since the run began. sha256: of its files now, by name."""
    begun = read_identity(out_dir).get("data_sha256", {})
    if changed := sorted(name for name, now in sha256.items() if begun.get(name, now) != now):
        raise CheckpointError(
            f"{out_dir} began with other data: the content of {changed[0]} has changed since; restore it, or start a "
            "new run in another folder"
        )


def changed_schedule(config: RunConfig, out_dir: Path) -> str:
    """What another end of the budget than at the last launch means for a run's learning rate; empty for nothing."""
    schedule, ends = config.learner.optimizer.schedule, []
    for budget in (current_config(out_dir)["budget"], config.budget.model_dump()):
        name = "steps" if budget["steps"] is not None else "backward_passes"
        ends.append(f"budget.{name} = {budget[name]}")
    if schedule == "constant" or ends[0] == ends[1]:
        return ""
    return f"the {schedule} learning rate jumps: it fell to 0 at {ends[0]}, and now falls to 0 at {ends[1]}"


def next_attempt(out_dir: Path, checkpoint: Checkpoint | None, *, after: int = 0) -> int:
    """Number of the next attempt: above all that have begun, including those since the checkpoint.

    after: the newest one that the service has rows of; a lost or restored folder no longer shows it.
    """
    begun = [after, *(int(event["attempt"]) for event in read_events(out_dir) if event["kind"] == "attempt")]
    if checkpoint is not None:
        begun.append(int(checkpoint.state["attempt"]))
    return max(begun) + 1


def repeated_passes(out_dir: Path, checkpoint: Checkpoint | None) -> float:
    """Backward passes that all attempts so far have spent on steps which the next attempt repeats."""
    total = "update/backward_passes_total"
    rows = [row["metrics"] for row in read_metrics(out_dir) if total in row["metrics"]]
    if not rows:
        return 0.0
    kept = float(checkpoint.state["counters"]["backward_passes"]) if checkpoint is not None else 0.0
    return float(rows[-1][total] + rows[-1].get("update/repeated_passes_total", 0.0) - kept)
