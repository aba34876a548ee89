"""Checkpoints on disk: whole or not at all, verified, few kept; and which settings may differ when a run is resumed."""

from __future__ import annotations

import errno
import itertools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from gxpo_trainer import cli
from gxpo_trainer.config import CheckpointConfig, RunConfig
from gxpo_trainer.errors import CheckpointError
from gxpo_trainer.training import checkpoints
from gxpo_trainer.training.checkpoints import (
    Checkpoint,
    CheckpointStore,
    changed_schedule,
    check_same_data,
    check_same_model,
    check_same_run,
    export_policy,
)


def parts(content: bytes = b"weights"):
    def write(folder):
        (folder / "learner" / "rank-0.safetensors").write_bytes(content)
        (folder / "policy").mkdir()
        (folder / "policy" / "model.safetensors").write_bytes(content * 2)
        return {"gate": 1}

    return write


def store(tmp_path, **settings):
    return CheckpointStore(tmp_path / "checkpoints", CheckpointConfig(**settings))


@pytest.mark.parametrize("damage", ["truncate", "alter", "remove", "unreadable", "manifest"])
def test_a_damaged_checkpoint_is_refused_and_the_message_names_file_and_way_out(tmp_path, damage):
    subject = store(tmp_path)
    subject.save(3, {}, parts())
    subject.save(5, {}, parts())
    file = subject.path(5) / "learner" / "rank-0.safetensors"
    if damage == "truncate":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "alter":
        file.write_bytes(b"Weights")
    elif damage == "remove":
        file.unlink()
    elif damage == "unreadable":
        file.unlink()
        file.symlink_to("/proc/self/mem")  # whose first bytes cannot be read: EIO, as of a damaged disk
    else:
        (subject.path(5) / "manifest.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match="delete step-00000005 to go on from step 3"):
        subject.latest()
    valid, problems = subject.latest_valid()
    assert valid.step == 3
    assert len(problems) == 1


def test_a_full_disk_leaves_the_earlier_checkpoint_and_no_trace_of_the_failed_one(tmp_path):
    subject = store(tmp_path)
    subject.save(1, {}, parts())

    def full(folder):
        (folder / "learner" / "rank-0.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        subject.save(2, {}, full)
    assert subject.latest().step == 1
    assert [p.name for p in subject.root.iterdir()] == ["step-00000001"]


def test_a_rule_finds_its_infinite_state_again(tmp_path):
    rule = {"best": math.inf, "window": [-math.inf, 0.5], "name": "Infinite"}
    subject = store(tmp_path)
    subject.save(1, {}, lambda folder: rule)
    assert subject.load(1).state["rule"] == rule


def test_the_next_checkpoint_removes_what_a_kill_left_of_any_step(tmp_path):
    subject = store(tmp_path, keep_last=1)
    subject.save(1, {}, parts())
    for step, left in itertools.product((1, 2, 7), ("partial", "replaced", "dropped")):
        (subject.root / f".step-{step:08d}.{left}" / "learner").mkdir(parents=True)
    subject.save(2, {}, parts())
    assert [path.name for path in subject.root.iterdir()] == ["step-00000002"]


def test_last_n_and_best_are_kept_and_the_earliest_of_equal_scores_is_best(tmp_path):
    subject = store(tmp_path, keep_last=2, keep_best=1)
    for step, score in [(1, 0.2), (2, 0.9), (3, 0.9), (4, 0.1), (5, None), (6, 0.3)]:
        subject.save(step, {}, parts(), score=score)
    assert subject.steps() == [2, 5, 6]


def test_a_later_score_counts_and_a_kill_while_it_is_recorded_damages_nothing(tmp_path, monkeypatch):
    subject = store(tmp_path, keep_last=1, keep_best=1)
    for step, score in [(1, 0.4), (2, None)]:
        subject.save(step, {"attempt": 1, "evaluation_owed": True}, parts(), score=score)
    assert subject.steps() == [1, 2]
    write = checkpoints.write_json
    for writes in range(3):
        allowed = iter(range(writes))
        monkeypatch.setattr(checkpoints, "write_json", lambda *file, allowed=allowed: (next(allowed), write(*file)))
        with pytest.raises(StopIteration):
            subject.record_score(2, 0.5)
        assert subject.load(2).state["attempt"] == 1
    monkeypatch.setattr(checkpoints, "write_json", write)
    subject.record_score(2, 0.5)
    assert subject.load(2).state["score"] == subject.score(2) == 0.5
    assert not subject.load(2).state["evaluation_owed"]
    assert subject.steps() == [2]
    (subject.path(2) / "state.json").write_text("{}", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"state\.json is truncated or altered"):
        subject.load(2)


def test_checkpoints_are_listed_without_reading_their_weights(tmp_path, capsys):
    subject = store(tmp_path)
    subject.save(3, {}, parts(), score=0.25)
    subject.save(5, {}, parts())
    (subject.path(3) / "learner" / "rank-0.safetensors").write_bytes(b"")
    assert cli.main(["checkpoints", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "step 3  pass@1 0.2500\nstep 5\n"
    for more in (["--adapter"], ["--step", "3"]):
        assert cli.main(["checkpoints", str(tmp_path), *more]) == 2
        assert "--step and --adapter need --export DIR" in capsys.readouterr().err
    assert cli.main(["checkpoints", str(tmp_path), "--export", str(tmp_path / "policy")]) == 0
    assert capsys.readouterr().out == f"step 5 exported to {tmp_path / 'policy'}\n"


def test_what_is_kept_is_chosen_without_later_checkpoints_that_are_damaged(tmp_path):
    subject = store(tmp_path, keep_last=1, keep_best=1)
    for step, score in [(2, 0.5), (4, 0.4), (9, 0.8)]:
        subject.save(step, {}, parts(), score=score)
    assert subject.steps() == [9]
    subject = store(tmp_path, keep_last=2, keep_best=1)
    subject.save(12, {}, parts(), score=0.9)
    (subject.path(12) / "manifest.json").unlink()
    valid, _ = subject.latest_valid()
    assert valid.step == 9
    # The run goes on from step 9.
    subject = store(tmp_path, keep_last=1, keep_best=1)
    for step, score in [(10, 0.3), (11, 0.2)]:
        assert subject.save(step, {}, parts(), score=score).is_dir()
    assert subject.steps() == [9, 11, 12]
    subject.save(12, {}, parts(), score=0.1)
    assert subject.steps() == [9, 12]
    assert subject.latest().step == 12


def test_what_was_saved_last_is_loaded_unless_it_has_another_format(tmp_path):
    subject = store(tmp_path)
    subject.save(4, {"attempt": 1}, parts(b"old"))
    subject.save(4, {"attempt": 2}, parts(b"new"))
    loaded = subject.latest()
    assert (loaded.step, loaded.state["attempt"], loaded.state["rule"]) == (4, 2, {"gate": 1})
    assert (loaded.path / "learner" / "rank-0.safetensors").read_bytes() == b"new"
    assert (loaded.path / "policy" / "model.safetensors").read_bytes() == b"newnew"
    manifest = subject.path(4) / "manifest.json"
    body = json.loads(manifest.read_text(encoding="utf-8"))
    manifest.write_text(json.dumps({**body, "format": 99}), encoding="utf-8")
    with pytest.raises(CheckpointError, match="format 99"):
        subject.load(4)


def test_export_copies_and_never_overwrites(tmp_path):
    subject = store(tmp_path)
    subject.save(4, {}, parts())
    checkpoint: Checkpoint = subject.load(4)
    target = export_policy(checkpoint, tmp_path / "exported")
    assert (target / "model.safetensors").read_bytes() == b"weightsweights"
    with pytest.raises(CheckpointError, match="already exists"):
        export_policy(checkpoint, target)
    with pytest.raises(CheckpointError, match="no adapter"):
        export_policy(checkpoint, tmp_path / "other", adapter=True)


FIRST: dict[str, Any] = {"name": "first", "budget": {"steps": 2}, "learner": {"rule": {"name": "gxpo", "k": 3}}}


@pytest.fixture
def earlier(tmp_path: Path) -> Checkpoint:
    """A checkpoint of a run of FIRST, whose identity lies in the folder."""
    identity = {"config": RunConfig.model_validate(FIRST).model_dump(mode="json"), "attempts": [{}]}
    (tmp_path / "run.json").write_text(json.dumps(identity), encoding="utf-8")
    return Checkpoint(tmp_path / "checkpoints" / "step-00000002", 2, {})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"learner": {"rule": {"name": "sfpo"}}}, r"learner\.rule\.name = 'gxpo', this run has 'sfpo'"),
        ({"learner": {"rule": {"name": "gxpo", "k": 7}}}, r"learner\.rule\.k = 3, this run has 7"),
        ({"seed": 1}, r"seed = 0, this run has 1"),
        ({"model": {"path": "org/other"}}, r"model\.path = 'starter', this run has 'org/other'; resume"),
        ({"rollout": {"max_new_tokens": 41}}, r"rollout\.max_new_tokens"),
        ({"rollout": {"max_num_seqs": 8, "temperature": 0.9}}, r"rollout\.temperature"),
        ({"learner": {**FIRST["learner"], "packing": "padded"}}, r"learner\.packing"),
        ({"verifier": {"rewards": [{"name": "format"}]}}, r"verifier\.rewards"),
        ({"environment": {"max_turns": 5}}, r"environment\.max_turns = 4, this run has 5"),
        ({"verifier": {"answer": "boxed"}}, r"verifier\.answer = 'auto', this run has 'boxed'"),
    ],
)
def test_what_a_step_uses_is_kept(tmp_path: Path, earlier: Checkpoint, change: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        check_same_run(earlier, RunConfig.model_validate({**FIRST, **change}), tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        # What no step computes with.
        {"budget": {"steps": 4}},
        {"name": "second", "evaluation": {"every_steps": 7}, "checkpoint": {"every_steps": 1}},
        {"timeouts": {"sampling_s": 7200.0}},
        {"verifier": {"workers": 7}},
        {"environment": {"deadline_s": 9.0, "workers": 2, "memory_mb": 2048}},
        # A checkpoint is resharded.
        {"learner": {**FIRST["learner"], "zero_stage": 3}},
        {"placement": {"learner_ranks": 2}},
        # What messages say to change, memory and limits: the sums of a step are the same up to rounding.
        {"model": {"gradient_checkpointing": True}},
        {"learner": {**FIRST["learner"], "token_budget": 64}},
        {"learner": {**FIRST["learner"], "sequence_parallel": 2}, "placement": {"learner_ranks": 2}},
        {"rollout": {"max_num_seqs": 8, "gpu_memory_utilization": 0.3, "cpu_kv_cache_gib": 2}},
        {"rollout": {"logprob_gap_mean_limit": 0.1, "logprob_gap_max_limit": 9.0}},
    ],
)
def test_what_changes_steps_by_rounding_may_change(tmp_path: Path, earlier: Checkpoint, change: dict[str, Any]) -> None:
    check_same_run(earlier, RunConfig.model_validate({**FIRST, **change}), tmp_path)


def test_a_setting_that_is_newer_than_the_run_has_its_default(tmp_path: Path, earlier: Checkpoint) -> None:
    identity = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    del identity["config"]["environment"], identity["config"]["rollout"]["async_depth"]
    (tmp_path / "run.json").write_text(json.dumps(identity), encoding="utf-8")
    check_same_run(earlier, RunConfig.model_validate(FIRST), tmp_path)
    changed = RunConfig.model_validate({**FIRST, "environment": {"name": "calculator"}})
    with pytest.raises(CheckpointError, match=r"environment\.name = 'single_turn', this run has 'calculator'"):
        check_same_run(earlier, changed, tmp_path)


def test_another_number_of_steps_is_told_where_it_moves_the_learning_rate(tmp_path: Path, earlier: Checkpoint) -> None:
    longer = {**FIRST, "budget": {"steps": 4}}
    assert changed_schedule(RunConfig.model_validate(longer), tmp_path) == ""
    falling = {"learner": {**FIRST["learner"], "optimizer": {"schedule": "cosine"}}}
    assert changed_schedule(RunConfig.model_validate({**FIRST, **falling}), tmp_path) == ""
    told = changed_schedule(RunConfig.model_validate({**longer, **falling}), tmp_path)
    jumps = "the cosine learning rate jumps: it fell to 0 at budget.steps = 2, and now falls to 0 at budget.steps = 4"
    assert told == jumps
    identity = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    identity["attempts"].append({"changed": {"config": {"now": {**identity["config"], "budget": {"steps": 4}}}}})
    (tmp_path / "run.json").write_text(json.dumps(identity), encoding="utf-8")
    assert changed_schedule(RunConfig.model_validate({**longer, **falling}), tmp_path) == ""
    told = changed_schedule(RunConfig.model_validate({**FIRST, **falling}), tmp_path)
    assert told.endswith("it fell to 0 at budget.steps = 4, and now falls to 0 at budget.steps = 2")
    by_passes = {**FIRST, **falling, "budget": {"backward_passes": 9}}
    assert changed_schedule(RunConfig.model_validate(by_passes), tmp_path).endswith("at budget.backward_passes = 9")


def test_other_data_is_no_resume(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"data_sha256": {"training/a": "1", "a": "2"}}), encoding="utf-8")
    check_same_data(tmp_path, {"training/a": "1", "training/new": "3"})
    with pytest.raises(CheckpointError, match=r"began with other data: the content of training/a has changed since"):
        check_same_data(tmp_path, {"training/a": "2"})


def test_other_weights_are_no_resume(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"policy_sha256": "b" * 64}), encoding="utf-8")
    check_same_model(RunConfig(), tmp_path, "b" * 64)
    with pytest.raises(CheckpointError, match=r"began with another model: .* hash bbbbbbbbbbbb, .* aaaaaaaaaaaa; set"):
        check_same_model(RunConfig(), tmp_path, "a" * 64)


def test_an_export_that_cannot_be_written_says_so_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store(tmp_path).save(1, {}, parts())
    target = tmp_path / "exported" / "policy"

    def fill(source: Path, copy: Path) -> None:
        copy.mkdir()
        raise shutil.Error([(str(source), str(copy), "No space left on device")])

    monkeypatch.setattr(shutil, "copytree", fill)
    assert cli.main(["checkpoints", str(tmp_path), "--export", str(target)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"gxpo: cannot write {target} (No space left on device); ")
    assert list(target.parent.iterdir()) == []
