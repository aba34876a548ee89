"""learner.models: what a model folder and a hub name must have, and what is refused with the setting and the fix named.

The hub is a cache laid out as huggingface_hub does, offline.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpointed import save_checkpoint
from support.tiny_policy import qwen2

from gxpo_trainer.config import LoraConfig, ModelConfig, RunConfig
from gxpo_trainer.data.checks import check_files
from gxpo_trainer.errors import CheckpointError, ConfigError
from gxpo_trainer.learner.models import STARTER_FOLDER, load_policy, load_tokenizer, pin_revision, resolve_model
from gxpo_trainer.learner.setup import Reference
from gxpo_trainer.planner.architectures import check_heads, check_sequence_parallel, uneven_split
from gxpo_trainer.training.prepare import prepare

NAME, WEIGHTS = "org/tiny", "model.safetensors"
OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    more = {"max_position_embeddings": 32, "tie_word_embeddings": False, "attention_dropout": 0.5}
    qwen2(31, 16, 24, 1, 2, 1, **more).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def settings(path: Path | str, **more: object) -> ModelConfig:
    return ModelConfig.model_validate({"path": str(path), **more})


def test_weights_are_those_of_the_file_in_the_asked_precision(folder: Path) -> None:
    saved = load_file(folder / "model.safetensors")
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        model = load_policy(settings(folder), precision=precision)
        for name, parameter in model.named_parameters():
            assert parameter.dtype == dtype
            assert torch.equal(parameter, saved[name].to(dtype))


def test_only_the_adapter_is_trainable_and_it_starts_as_the_base_model(folder: Path) -> None:
    lora = LoraConfig(rank=2, target_modules=("q_proj", "down_proj"))
    base, adapted = (load_policy(settings(folder), precision="fp32", lora=chosen) for chosen in (None, lora))
    trainable = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert len(trainable) == 4
    assert all(".lora_" in name for name in trainable)
    ids = torch.arange(1, 9)[None]
    assert torch.equal(base(ids).logits, adapted(ids).logits)
    with pytest.raises(ConfigError, match=r"learner\.lora\.target_modules = \['nope'\]"):
        load_policy(settings(folder), precision="fp32", lora=LoraConfig(target_modules=("nope",)))


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_an_adapter_of_the_head_or_of_the_embeddings_is_refused(folder: Path, name: str) -> None:
    refused = (
        rf"learner\.lora\.target_modules = \['q_proj', '{name}'\] .*embeddings or of the head is not supported; name"
    )
    with pytest.raises(ConfigError, match=refused):
        load_policy(settings(folder), precision="fp32", lora=LoraConfig(target_modules=("q_proj", name)))


MISSING_SHARD = json.dumps({"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}})


def shard_index(folder: Path, text: str = MISSING_SHARD) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), r"has no config\.json"),
        (lambda folder: (folder / WEIGHTS).rename(folder / "x.bin"), r"neither .*write the weights as safetensors"),
        (shard_index, r"lacks the weight file model-00002-of-00002\.safetensors"),
        (partial(shard_index, text=""), r"index\.json cannot be read .*; restore it"),
        (partial(shard_index, text="[]"), r"index\.json is not a JSON object; restore it"),
        (partial(shard_index, text='{"weight_map": null}'), "has no weight_map; restore it"),
        (lambda folder: shutil.rmtree(folder) or folder.write_text(""), "is a file, not a model folder"),
    ],
)
def test_a_folder_that_is_incomplete_is_rejected(folder: Path, damage: Callable[[Path], Any], message: str) -> None:
    for path in ("/no/such/folder", "./missing", "a/b/c"):
        with pytest.raises(ConfigError, match=r"model\.path = .*the folder does not exist; set model\.path to"):
            resolve_model(settings(path))
    assert resolve_model(settings(folder)) == str(folder)
    damage(folder)
    with pytest.raises(ConfigError, match=message):
        resolve_model(settings(folder))


def test_an_incomplete_checkpoint_is_rejected_instead_of_filled_with_random_numbers(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks the weight model\.layers\.0\.mlp\.up_proj\.weight"):
        load_policy(settings(folder), precision="fp32")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ConfigError, match=r"model\.path = .* cannot be loaded"):
        load_policy(settings(folder), precision="fp32")
    with pytest.raises(ConfigError, match=r"model\.path = .* has no tokenizer"):
        load_tokenizer(settings(folder))
    tokenizer = load_tokenizer(settings("starter"))
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


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


@pytest.mark.parametrize(("revision", "commit"), [(None, NEW), ("main", NEW), ("v1", OLD), (OLD, OLD)])
def test_a_hub_name_is_a_folder_of_one_revision(cache: Path, revision: str | None, commit: str) -> None:
    model = settings(NAME, revision=revision)
    assert resolve_model(model) == str(cache / "snapshots" / commit)
    assert pin_revision(model).revision == commit


def test_a_run_holds_the_revision_it_started_from(cache: Path, tmp_path: Path) -> None:
    body: dict[str, Any] = {"model": {"path": NAME, "max_length": 256}, "data": {"num_problems": 8}}
    config = RunConfig.model_validate({**body, "evaluation": {"num_problems": 4}})
    prepared = prepare(config, tmp_path / "run", resume=False)
    assert prepared.config.model.revision == NEW
    # A folder: the sampler compares every tensor that it loaded with the files there.
    assert Path(prepared.model_folder) == cache / "snapshots" / NEW
    assert Path(prepared.model_folder).is_dir()
    body["model"]["revision"] = "v9"
    with pytest.raises(ConfigError, match=r"model.revision = 'v9' cannot be loaded from the hub .*; check both"):
        prepare(RunConfig.model_validate(body), tmp_path / "other", resume=False)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("revision", [None, "main"])
def test_a_resumed_run_keeps_its_commits_when_the_branch_moves(
    cache: Path, tmp_path: Path, revision: str | None
) -> None:
    model = {"path": NAME, "revision": revision}
    body: dict[str, Any] = {"data": {"num_problems": 8}, "evaluation": {"num_problems": 4}, "teacher": model}
    body |= {"model": {**model, "max_length": 256}, "rollout": {"source": "teacher"}}
    out = tmp_path / "run"
    save_checkpoint(prepare(RunConfig.model_validate(body), out))
    (cache / "refs" / "main").write_text(OLD)
    config = RunConfig.model_validate(body)
    for resumed in (prepare(config, out, resume=True), prepare(config, out, continue_run=True)):
        assert (resumed.config.model.revision, resumed.placement.config.model.revision) == (NEW, NEW)
        assert resumed.config.teacher is not None
        assert resumed.config.teacher.revision == NEW
        assert Path(resumed.model_folder) == cache / "snapshots" / NEW
    for part in ("model", "teacher"):
        other = RunConfig.model_validate({**body, part: {**body[part], "revision": OLD}})
        with pytest.raises(CheckpointError, match=rf"with {part}\.revision = '{NEW}', this run has '{OLD}'; resume"):
            prepare(other, out, resume=True)
    # Without a checkpoint it starts from the beginning, with the same commit.
    shutil.rmtree(out / "checkpoints")
    assert prepare(config, out, continue_run=True).config.model.revision == NEW


def taught_by(path: Path | str) -> RunConfig:
    return RunConfig.model_validate({"teacher": {"path": str(path)}, "rollout": {"source": "teacher"}})


def test_a_teacher_that_cannot_work_is_named_before_it_is_downloaded(
    cache: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = r"^teacher\.path = 'org/none' with teacher\.revision = None cannot be loaded from the hub"
    with pytest.raises(ConfigError, match=unknown):
        prepare(taught_by("org/none"), tmp_path / "run")
    with pytest.raises(ConfigError, match=rf"^teacher\.path = '{folder}' has no tokenizer"):
        prepare(taught_by(folder), tmp_path / "run")
    (note,) = (note for note in check_files(taught_by(NAME)).notes if NAME in note)
    assert note.startswith(f"teacher.path = '{NAME}' is no folder here")
    config = cache / "snapshots" / NEW / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": {}}))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("downloaded"))
    with pytest.raises(ConfigError, match=rf"^teacher\.path = '{NAME}': the architecture qwen2 is quantized"):
        prepare(taught_by(NAME), tmp_path / "run")


def test_a_teacher_that_lacks_a_weight_is_named(folder: Path) -> None:
    shard = load_file(folder / WEIGHTS)
    del shard["model.norm.weight"]
    save_file(shard, folder / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=rf"^teacher\.path = '{folder}' lacks the weight model\.norm\.weight"):
        Reference(taught_by(folder).of_reference, "sdpa", "cpu", torch.device("cpu"))


@pytest.mark.parametrize("path", ["starter", str(STARTER_FOLDER)])
def test_a_revision_of_a_folder_is_refused(path: str) -> None:
    assert resolve_model(settings(path)) == str(STARTER_FOLDER)
    with pytest.raises(ConfigError, match=r"model.revision = 'v1' .*hub name"):
        resolve_model(settings(path, revision="v1"))


def test_the_random_starter_has_the_starters_shape_and_tokenizer_and_the_same_weights_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []
    for cache in ("one", "two"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / cache))
        state = torch.get_rng_state()
        folder = Path(resolve_model(settings("starter-random")))
        assert torch.get_rng_state().equal(state), "a run's own random numbers stay"
        assert folder == Path(resolve_model(settings("starter-random"))), "built once"
        assert (folder / "tokenizer.json").read_bytes() == (STARTER_FOLDER / "tokenizer.json").read_bytes()
        built.append(load_file(folder / "model.safetensors"))
    starter = load_file(STARTER_FOLDER / "model.safetensors")
    assert {name: t.shape for name, t in built[0].items()} == {name: t.shape for name, t in starter.items()}
    for name, tensor in built[0].items():
        assert built[1][name].equal(tensor)
        assert name.endswith("norm.weight") or not tensor.allclose(starter[name], atol=1e-3), name
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    with pytest.raises(ConfigError, match=r"starter-random.*XDG_CACHE_HOME"):
        resolve_model(settings("starter-random"))


def on(devices: int) -> RunConfig:
    return RunConfig.model_validate({"placement": {"tensor_parallel": devices}})


def test_key_value_heads_may_be_replicated_but_not_split_unevenly() -> None:
    # Qwen2.5-1.5B: 12 heads, 2 key/value heads.
    model = {"num_attention_heads": 12, "num_key_value_heads": 2}
    for devices in (1, 2, 4, 6, 12):
        check_heads(model, on(devices))
    with pytest.raises(ConfigError, match="tensor_parallel = 3 does not divide the 12 attention heads and 2 key/value"):
        check_heads(model, on(3))
    with pytest.raises(ConfigError, match=r"tensor_parallel = 8 .*set it to one of 1, 2, 4, 6, 12$"):
        check_heads(model, on(8))
    # A vast number of heads has its divisors at once.
    assert str(uneven_split(10**15, 10**15, 3, "m")).endswith(" 800, 1000, 1024")
    # Heads are those of the language model, each with its own key unless it says otherwise.
    inner = {"num_attention_heads": 8, "num_key_value_heads": 4}
    for body, devices in (({"num_attention_heads": 5, "text_config": inner}, 8), ({"n_head": 6}, 6)):
        check_heads(body, on(devices))
        with pytest.raises(ConfigError, match=r"set it to one of 1, .*"):
            check_heads(body, on(7))
    check_heads({"model_type": "strange"}, on(1))
    with pytest.raises(ConfigError, match=r"has no num_attention_heads.*set it to 1"):
        check_heads({"model_type": "strange"}, on(2))


def test_heads_that_vllm_cannot_compute_on_a_cpu_are_refused_before_an_engine_starts() -> None:
    small, named = {"num_attention_heads": 4, "hidden_size": 64}, {"num_attention_heads": 4, "head_dim": 16}
    for body in (small, named, {"text_config": named}):
        check_heads(body, on(1))
        check_heads(body, on(1), "gpu")
        with pytest.raises(ConfigError, match=r"model\.path .* heads of 16 values on a CPU; .* heads of 32, 64, "):
            check_heads(body, on(1), "cpu")
    on_cpu = {"placement": {"device": "cpu"}}
    with pytest.raises(ConfigError, match="heads of 16 values"):
        check_heads(small, RunConfig.model_validate(on_cpu))
    check_heads({**small, "head_dim": 32}, on(1), "cpu")
    supervised = {"rollout": {"source": "dataset"}, "evaluation": {"benchmarks": []}}
    check_heads(small, RunConfig.model_validate(on_cpu | supervised))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"layer_types": ["linear_attention", "full_attention"]},
            "'m' has linear_attention layers, which need whole r",
        ),
        ({"rope_scaling": {"type": "dynamic"}}, "the frequencies of 'm' (dynamic) depend on the longest position of a"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "longrope"}}},
            "(longrope) depend on the longest position",
        ),
        (
            {"num_key_value_heads": 3},
            "learner.sequence_parallel = 4 does not divide the 12 attention heads and 3 key/val",
        ),
        (
            {"num_attention_heads": None},
            "learner.sequence_parallel: config.json of 'm' has no num_attention_heads; set",
        ),
        ({}, None),
        ({"num_key_value_heads": None, "rope_parameters": {"rope_type": "default"}}, None),
        # Of a damaged config.json: the trainer's own message comes from transformers.
        ({"layer_types": 3, "rope_scaling": "linear"}, None),
        ({"layer_types": [["full_attention"]], "rope_scaling": [1]}, "'m' has ['full_attention'] layers"),
    ],
)
def test_models_that_need_whole_rows_are_not_parallel_over_sequences(
    changes: dict[str, Any], problem: str | None
) -> None:
    body = {"num_attention_heads": 12, "num_key_value_heads": 2, **changes}

    def config(size: int, attention: str = "auto") -> RunConfig:
        model, learner = {"path": "m", "attention": attention}, {"sequence_parallel": size}
        placement = {"learner_ranks": size}
        return RunConfig.model_validate({"model": model, "learner": learner, "placement": placement})

    check_sequence_parallel(body, config(1, "eager"))
    if problem is None:
        check_sequence_parallel(body, config(4))
        problem = 'model.attention = "eager" cannot exchange columns for heads; set it to 1'
    with pytest.raises(ConfigError, match=re.escape(problem)):
        check_sequence_parallel(body, config(4, "eager" if "eager" in problem else "auto"))
