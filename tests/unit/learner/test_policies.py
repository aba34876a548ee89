"""Policies made without training: an adapter merged into its base."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from gxpo_trainer.config import CheckpointConfig
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.learner.models import STARTER_FOLDER, base_of, is_adapter, merge_adapter
from gxpo_trainer.training.checkpoints import CheckpointStore

IDS = torch.arange(3, 19)[None]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA adapter of the starter policy that changes its output."""
    folder = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(STARTER_FOLDER, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def adapter(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "adapter"))


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits  # type: ignore[no-any-return]


def test_the_merged_folder_computes_what_base_and_adapter_compute(adapter: Path, tmp_path: Path) -> None:
    assert is_adapter(adapter)
    merge_adapter(adapter, tmp_path / "whole")
    base = AutoModelForCausalLM.from_pretrained(STARTER_FOLDER, dtype=torch.float32)
    plain = logits(base)
    expected = logits(PeftModel.from_pretrained(base, str(adapter)))
    merged = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "whole"))
    assert (expected - plain).abs().max() > 0.1
    assert torch.allclose(merged, expected, atol=1e-4)
    assert not is_adapter(tmp_path / "whole")
    assert (tmp_path / "whole" / "tokenizer.json").is_file()


def test_a_small_adapter_of_a_bf16_base_is_not_rounded_away(adapter: Path, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(STARTER_FOLDER, dtype=torch.bfloat16)
    base.save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(STARTER_FOLDER).save_pretrained(tmp_path / "base")
    weights = load_file(adapter / "adapter_model.safetensors")
    small = {name: tensor * (1e-3 if "lora_B" in name else 1.0) for name, tensor in weights.items()}
    save_file(small, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    merge_adapter(edit(adapter, base_model_name_or_path=str(tmp_path / "base")), tmp_path / "whole")
    name = "model.layers.0.self_attn.q_proj"
    down, up = (small[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    change = (
        load_file(tmp_path / "whole" / "model.safetensors")[f"{name}.weight"].float()
        - load_file(tmp_path / "base" / "model.safetensors")[f"{name}.weight"].float()
    )
    expected = 2 * (up @ down)
    assert float((change - expected).norm() / expected.norm()) < 1e-2


def edit(adapter: Path, **changes: object) -> Path:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return adapter


def test_a_base_that_is_missing_is_reported_with_the_setting(adapter: Path) -> None:
    assert base_of(adapter) == str(STARTER_FOLDER)
    with pytest.raises(
        ConfigError, match=r"base model cannot be used .*no/such/folder/at all.*base_model_name_or_path"
    ):
        base_of(edit(adapter, base_model_name_or_path="no/such/folder/at all"))
    with pytest.raises(ConfigError, match="names no base model"):
        base_of(edit(adapter, base_model_name_or_path=None))


def test_a_pickled_adapter_and_one_of_another_model_are_rejected(adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be merged into .* use a LoRA adapter of it"):
        merge_adapter(edit(adapter, target_modules=["no_such_layer"]), tmp_path / "whole")
    assert not (tmp_path / "whole").exists()
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"has no adapter_model\.safetensors; save the adapter in safetensors form"):
        base_of(adapter)


def test_an_export_that_cannot_be_written_says_so_and_leaves_nothing(tmp_path):
    run = tmp_path / "run"
    CheckpointStore(run / "checkpoints", CheckpointConfig()).save(
        1, {}, lambda folder: shutil.copytree(STARTER_FOLDER, folder / "policy") and {}
    )
    limited = (
        "import resource, sys; from gxpo_trainer.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (16, 16)); sys.exit(main(sys.argv[1:]))"
    )
    target = tmp_path / "exported" / "policy"
    target.parent.mkdir()
    command = ["checkpoints", str(run), "--export", str(target)]
    # -B: bytecode would be cut off as well.
    done = subprocess.run([sys.executable, "-B", "-c", limited, *command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"gxpo: cannot write {target} (")
    assert "File too large" in done.stderr
    assert list(target.parent.iterdir()) == []
