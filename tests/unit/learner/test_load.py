"""models.load: what a model folder must have, and what is refused with the setting and the fix named."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from gxpo_trainer.config import LoraConfig, ModelConfig
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.learner.models import STARTER_FOLDER, load_policy, load_tokenizer, resolve_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, tie_word_embeddings=False, attention_dropout=0.5,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def settings(path: Path | str, **more: object) -> ModelConfig:
    return ModelConfig.model_validate({"path": str(path), **more})


def edit_weights(folder: Path, drop: str) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights[drop]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_weights_are_those_of_the_file_in_the_asked_precision(folder: Path) -> None:
    saved = load_file(folder / "model.safetensors")
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        model = load_policy(settings(folder), precision=precision)
        for name, parameter in model.named_parameters():
            assert parameter.dtype == dtype
            assert torch.equal(parameter, saved[name].to(dtype))


def test_two_passes_in_training_mode_are_equal(folder: Path) -> None:
    model = load_policy(settings(folder, gradient_checkpointing=True), precision="fp32")
    ids = torch.arange(1, 9)[None]
    assert model.training
    assert model.is_gradient_checkpointing
    assert torch.equal(model(ids).logits, model(ids).logits)


@pytest.mark.parametrize(("setting", "expected"), [("auto", False), (True, True), (False, False)])
def test_small_models_recompute_activations_only_when_asked(folder: Path, setting: object, expected: bool) -> None:
    assert (
        load_policy(settings(folder, gradient_checkpointing=setting), precision="fp32").is_gradient_checkpointing
        is expected
    )
    large = settings(folder, gradient_checkpointing=setting).recomputes_activations(1_543_714_304)
    assert large is (setting != False)  # noqa: E712


def test_only_the_adapter_is_trainable_and_it_starts_as_the_base_model(folder: Path) -> None:
    lora = LoraConfig(rank=2, target_modules=("q_proj", "down_proj"))
    base, adapted = (
        load_policy(settings(folder), precision="fp32"),
        load_policy(settings(folder), precision="fp32", lora=lora),
    )
    trainable = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert len(trainable) == 4
    assert all(".lora_" in name for name in trainable)
    ids = torch.arange(1, 9)[None]
    assert torch.equal(base(ids).logits, adapted(ids).logits)


def test_starter_and_hub_names_are_told_from_folders(folder: Path) -> None:
    assert resolve_model(settings(folder)) == str(folder)
    assert resolve_model(settings("starter")) == str(STARTER_FOLDER)


@pytest.mark.parametrize("path", ["/no/such/folder", "./missing", "a/b/c"])
def test_a_missing_folder_is_rejected(path: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.path = .*the folder does not exist; set model\.path to"):
        resolve_model(settings(path))


def test_a_file_is_no_model(folder: Path) -> None:
    with pytest.raises(ConfigError, match="is a file, not a model folder"):
        resolve_model(settings(folder / "config.json"))


def test_a_folder_without_config_is_rejected(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        resolve_model(settings(folder))


def test_pickled_weights_alone_are_rejected(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"neither model\.safetensors .*write the weights as safetensors"):
        resolve_model(settings(folder))


def test_a_missing_weight_file_of_several_is_reported(folder: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"lacks the weight file model-00002-of-00002\.safetensors"):
        resolve_model(settings(folder))


def test_an_incomplete_checkpoint_is_rejected_instead_of_filled_with_random_numbers(folder: Path) -> None:
    edit_weights(folder, "model.layers.0.mlp.up_proj.weight")
    with pytest.raises(ConfigError, match=r"lacks the weight model\.layers\.0\.mlp\.up_proj\.weight"):
        load_policy(settings(folder), precision="fp32")


def test_a_truncated_weight_file_is_rejected(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ConfigError, match=r"model\.path = .* cannot be loaded"):
        load_policy(settings(folder), precision="fp32")


def test_unknown_lora_targets_are_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"learner\.lora\.target_modules = \['nope'\]"):
        load_policy(settings(folder), precision="fp32", lora=LoraConfig(target_modules=("nope",)))


def test_a_folder_without_tokenizer_is_rejected(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path = .* has no tokenizer"):
        load_tokenizer(settings(folder))


def test_the_starter_tokenizer_has_distinct_padding_and_end() -> None:
    tokenizer = load_tokenizer(settings("starter"))
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
