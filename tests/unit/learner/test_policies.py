"""Policies made without training: an adapter merged into its base, and points on a line through several policies."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from gxpo_trainer.cli import main
from gxpo_trainer.config import CheckpointConfig, RunConfig
from gxpo_trainer.errors import CheckpointError, ConfigError
from gxpo_trainer.learner.models import STARTER_FOLDER
from gxpo_trainer.learner.policies import base_of, combine, is_adapter, line_weights, merge_adapter
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
    with pytest.raises(ConfigError, match=r"cannot be merged into .* it must be a LoRA adapter of that model"):
        merge_adapter(edit(adapter, target_modules=["no_such_layer"]), tmp_path / "whole")
    assert not (tmp_path / "whole").exists()
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"has no adapter_model\.safetensors; save the adapter in safetensors form"):
        base_of(adapter)


def policy(folder, values, dtype=torch.float32, files=1):
    folder.mkdir()
    tensors = {f"t{number}": torch.tensor(value, dtype=dtype) for number, value in enumerate(values)}
    for number in range(files):
        part = {name: tensor for index, (name, tensor) in enumerate(tensors.items()) if index % files == number}
        save_file(part, folder / ("model.safetensors" if files == 1 else f"model-{number}.safetensors"))
    (folder / "config.json").write_text(json.dumps({"name": folder.name}))
    return folder


def test_two_policies_by_hand(tmp_path):
    start = policy(tmp_path / "start", [[1.0, 2.0], [0.0]], files=2)
    end = policy(tmp_path / "end", [[2.0, 1.0], [-1.0]])
    # θ_init + 3(θ_T − θ_init): 1 + 3, 2 − 3, 0 − 3.
    combine([start, end], line_weights([0, 10], 30), tmp_path / "out")
    combined = load_file(tmp_path / "out" / "model.safetensors")
    assert combined["t0"].tolist() == pytest.approx([4.0, -1.0])
    assert combined["t1"].tolist() == pytest.approx([-3.0])
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"name": "end"}


def test_several_policies_lie_on_numpys_least_squares_line():
    steps, values = [0, 3, 5, 9], np.array([0.1, 0.4, 0.3, 0.9])
    slope, intercept = np.polyfit(steps, values, 1)
    assert np.dot(line_weights(steps, 20.0), values) == pytest.approx(slope * 20 + intercept)
    assert sum(line_weights(steps, 20.0)) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="two different steps"):
        line_weights([4, 4], 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_factor_one_is_the_last_policy_to_the_bit_in_its_type(tmp_path, dtype):
    values = [0.1, 1e-8, 3.0]
    start, end = policy(tmp_path / "start", [[5.0, 6.0, 7.0]], dtype), policy(tmp_path / "end", [values], dtype)
    combine([start, end], line_weights([0, 7], 7), tmp_path / "out")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["t0"], torch.tensor(values, dtype=dtype))


@pytest.mark.parametrize(("other", "message"), [([[1.0]], "has no tensor t1"), ([[1.0], [1.0, 2.0]], "has shape")])
def test_policies_of_another_model_are_refused_and_nothing_is_left(tmp_path, other, message):
    start, end = policy(tmp_path / "start", other), policy(tmp_path / "end", [[1.0], [1.0]])
    with pytest.raises(CheckpointError, match=message):
        combine([start, end], [0.5, 0.5], tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["end", "start"]
    with pytest.raises(CheckpointError, match="already exists"):
        combine([start, end], [0.5, 0.5], tmp_path / "end")


def run_with_checkpoints(tmp_path):
    start = policy(tmp_path / "start", [[0.0, 1.0]])
    run = tmp_path / "run"
    store = CheckpointStore(run / "checkpoints", CheckpointConfig(keep_last=3))
    for step, value in ((1, 2.0), (2, 1.0)):
        made = policy(tmp_path / f"made-{step}", [[value, 1.0 + value]])
        store.save(step, {}, lambda folder, made=made: shutil.copytree(made, folder / "policy") and {})
    config = RunConfig(model={"path": str(start)}).model_dump(mode="json")
    (run / "run.json").write_text(json.dumps({"config": config}))
    return run


@pytest.mark.parametrize("options", [[], ["--extrapolate", "3"]])
def test_an_export_that_cannot_be_written_says_so_and_leaves_nothing(tmp_path, options):
    limited = (
        "import resource, sys; from gxpo_trainer.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (16, 16)); sys.exit(main(sys.argv[1:]))"
    )
    target = tmp_path / "exported" / "policy"
    target.parent.mkdir()
    command = ["checkpoints", str(run_with_checkpoints(tmp_path)), "--export", str(target), *options]
    # -B: bytecode would be cut off as well.
    done = subprocess.run([sys.executable, "-B", "-c", limited, *command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"gxpo: cannot write {target} (")
    assert "File too large" in done.stderr
    assert list(target.parent.iterdir()) == []


def test_the_command_extrapolates_a_run_from_its_initial_policy(tmp_path, capsys):
    run = run_with_checkpoints(tmp_path)
    out = tmp_path / "out"
    assert main(["checkpoints", str(run), "--extrapolate", "3", "--export", str(out)]) == 0
    # From 0 and 1 to 1 and 2 in two steps: three times as far.
    assert load_file(out / "model.safetensors")["t0"].tolist() == pytest.approx([3.0, 4.0])
    line = tmp_path / "line"
    assert main(["checkpoints", str(run), "--extrapolate", "3", "--line", "--export", str(line)]) == 0
    # Through (0, 0), (1, 2), (2, 1): slope 0.5, mean 1 at step 1, so 1 + 0.5 · 5 at step 6.
    assert load_file(line / "model.safetensors")["t0"].tolist() == pytest.approx([3.5, 4.5])
    assert main(["checkpoints", str(run), "--extrapolate", "3"]) == 2
    assert "add --export DIR" in capsys.readouterr().err
