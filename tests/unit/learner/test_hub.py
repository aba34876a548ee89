"""Hub names: resolved once to a folder and a revision, from a cache laid out as huggingface_hub does, offline."""

from __future__ import annotations

import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch

from gxpo_trainer.config import ModelConfig, RunConfig
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.learner.models import STARTER_FOLDER, load_policy, load_tokenizer, pin_revision, resolve_model
from gxpo_trainer.training.prepare import prepare

NAME = "org/tiny"
OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two revisions of the starter policy; `main` is the newer one, `v1` the older."""
    root = tmp_path / "hub"
    repository = root / "models--org--tiny"
    for commit in (OLD, NEW):
        shutil.copytree(STARTER_FOLDER, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(NEW)
    (repository / "refs" / "v1").write_text(OLD)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(root))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return repository


def model(revision: str | None = None, path: str = NAME) -> ModelConfig:
    return ModelConfig(path=path, revision=revision)


@pytest.mark.parametrize(("revision", "commit"), [(None, NEW), ("main", NEW), ("v1", OLD), (OLD, OLD)])
def test_a_hub_name_is_a_folder_of_one_revision(cache: Path, revision: str | None, commit: str) -> None:
    assert resolve_model(model(revision)) == str(cache / "snapshots" / commit)
    assert pin_revision(model(revision)).revision == commit


def test_the_policy_and_the_tokenizer_come_from_that_folder(cache: Path) -> None:
    policy = load_policy(model("v1"), precision="fp32")
    starter = load_policy(ModelConfig(), precision="fp32")
    for left, right in zip(policy.parameters(), starter.parameters(), strict=True):
        assert torch.equal(left, right)
    assert load_tokenizer(model("v1")).get_vocab() == load_tokenizer(ModelConfig()).get_vocab()


def test_a_run_holds_the_revision_it_started_from(cache: Path, tmp_path: Path) -> None:
    config = RunConfig.model_validate(
        {"model": {"path": NAME, "max_length": 256}, "data": {"num_problems": 8}, "evaluation": {"num_problems": 4}}
    )
    prepared = prepare(config, tmp_path / "run", resume=False)
    assert prepared.config.model.revision == NEW
    # A folder: the sampler compares every tensor that it loaded with the files there.
    assert Path(prepared.model_folder) == cache / "snapshots" / NEW
    assert Path(prepared.model_folder).is_dir()


def test_what_the_hub_does_not_have_names_both_settings(cache: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.path = 'org/other'.*model\.revision"):
        resolve_model(model(path="org/other"))
    with pytest.raises(ConfigError, match=r"model.revision = 'v9'"):
        resolve_model(model("v9"))


def test_a_run_of_a_revision_that_does_not_exist_is_refused_before_anything_starts(cache: Path, tmp_path: Path) -> None:
    config = RunConfig.model_validate({"model": {"path": NAME, "revision": "v9", "max_length": 256}})
    with pytest.raises(ConfigError, match=r"model.revision = 'v9' cannot be loaded from the hub .*; check both"):
        prepare(config, tmp_path / "run", resume=False)
    assert not (tmp_path / "run").exists()


def test_a_snapshot_without_safetensors_is_refused(cache: Path) -> None:
    (cache / "snapshots" / NEW / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor"):
        resolve_model(model())


@pytest.mark.parametrize("path", ["starter", str(STARTER_FOLDER)])
def test_a_revision_of_a_folder_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=r"model.revision = 'v1' .*hub name"):
        resolve_model(model("v1", path))
