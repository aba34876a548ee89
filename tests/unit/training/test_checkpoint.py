"""Checkpoints on disk: whole or not at all, verified, few kept."""

from __future__ import annotations

import errno
import json

import pytest

from gxpo_trainer.config import CheckpointConfig
from gxpo_trainer.errors import CheckpointError
from gxpo_trainer.training.checkpoints import Checkpoint, CheckpointStore, export_policy


def parts(content: bytes = b"weights"):
    def write(folder):
        (folder / "learner" / "rank-0.safetensors").write_bytes(content)
        (folder / "policy").mkdir()
        (folder / "policy" / "model.safetensors").write_bytes(content * 2)
        return {"gate": 1}

    return write


def store(tmp_path, **settings):
    return CheckpointStore(tmp_path / "checkpoints", CheckpointConfig(**settings))


def test_what_was_saved_is_loaded(tmp_path):
    subject = store(tmp_path)
    subject.save(7, {"cursor": {"epoch": 1}}, parts())
    loaded = subject.latest()
    assert loaded.step == 7
    assert (loaded.state["cursor"], loaded.state["rule"]) == ({"epoch": 1}, {"gate": 1})
    assert (loaded.policy / "model.safetensors").read_bytes() == b"weightsweights"


@pytest.mark.parametrize("damage", ["truncate", "alter", "remove", "manifest"])
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
    else:
        (subject.path(5) / "manifest.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match="delete step-00000005 to continue from step 3"):
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


def test_an_unfinished_folder_is_not_a_checkpoint(tmp_path):
    subject = store(tmp_path)
    subject.save(1, {}, parts())
    (subject.root / ".step-00000002.partial" / "learner").mkdir(parents=True)
    assert subject.steps() == [1]


@pytest.mark.parametrize("left", ["partial", "replaced", "dropped"])
def test_the_next_checkpoint_removes_what_a_kill_left_of_any_step(tmp_path, left):
    subject = store(tmp_path, keep_last=1)
    subject.save(1, {}, parts())
    for step in (1, 2, 7):
        (subject.root / f".step-{step:08d}.{left}" / "learner").mkdir(parents=True)
    subject.save(2, {}, parts())
    assert [path.name for path in subject.root.iterdir()] == ["step-00000002"]


def test_last_n_and_best_are_kept_and_the_earliest_of_equal_scores_is_best(tmp_path):
    subject = store(tmp_path, keep_last=2, keep_best=1)
    for step, score in [(1, 0.2), (2, 0.9), (3, 0.9), (4, 0.1), (5, None), (6, 0.3)]:
        subject.save(step, {}, parts(), score=score)
    assert subject.steps() == [2, 5, 6]


def test_a_later_attempt_replaces_the_checkpoint_of_the_same_step(tmp_path):
    subject = store(tmp_path)
    subject.save(4, {"attempt": 1}, parts(b"old"))
    subject.save(4, {"attempt": 2}, parts(b"new"))
    assert subject.load(4).state["attempt"] == 2
    assert (subject.path(4) / "learner" / "rank-0.safetensors").read_bytes() == b"new"


def test_a_checkpoint_of_another_format_is_refused(tmp_path):
    subject = store(tmp_path)
    subject.save(4, {}, parts())
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
