"""Extrapolated policies, by hand and against numpy's least squares."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from gxpo_trainer.cli import main
from gxpo_trainer.config import CheckpointConfig, RunConfig
from gxpo_trainer.errors import CheckpointError
from gxpo_trainer.learner.policies import combine, line_weights
from gxpo_trainer.training.checkpoints import CheckpointStore


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
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found["t0"].tolist() == pytest.approx([4.0, -1.0])
    assert found["t1"].tolist() == pytest.approx([-3.0])
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"name": "end"}


def test_several_policies_lie_on_numpys_least_squares_line():
    steps, values = [0, 3, 5, 9], np.array([0.1, 0.4, 0.3, 0.9])
    slope, intercept = np.polyfit(steps, values, 1)
    assert np.dot(line_weights(steps, 20.0), values) == pytest.approx(slope * 20 + intercept)
    assert sum(line_weights(steps, 20.0)) == pytest.approx(1.0)


def test_factor_one_is_the_last_policy_to_the_bit(tmp_path):
    values = [[0.1, 1e-8, 3.0]]
    start, end = policy(tmp_path / "start", [[5.0, 6.0, 7.0]]), policy(tmp_path / "end", values)
    combine([start, end], line_weights([0, 7], 7), tmp_path / "out")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["t0"], torch.tensor(values[0]))


def test_the_type_of_the_weights_is_kept(tmp_path):
    start, end = (policy(tmp_path / name, [[1.0]], torch.bfloat16) for name in ("start", "end"))
    combine([start, end], [0.5, 0.5], tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors")["t0"].dtype == torch.bfloat16


@pytest.mark.parametrize(("other", "message"), [([[1.0]], "has no tensor t1"), ([[1.0], [1.0, 2.0]], "has shape")])
def test_policies_of_another_model_are_refused_and_nothing_is_left(tmp_path, other, message):
    start, end = policy(tmp_path / "start", other), policy(tmp_path / "end", [[1.0], [1.0]])
    with pytest.raises(CheckpointError, match=message):
        combine([start, end], [0.5, 0.5], tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["end", "start"]
    with pytest.raises(CheckpointError, match="already exists"):
        combine([start, end], [0.5, 0.5], tmp_path / "end")


def test_a_line_needs_two_steps():
    with pytest.raises(ValueError, match="two different steps"):
        line_weights([4, 4], 8)


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
