"""`make gpu-check` uses the GPU environment, and fails where nothing ran on a GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu import ELEMENTS, head_seconds, known_chip, model_flops, planned_bytes
from benchmarks.policies import LARGE_SHAPE
from gxpo_trainer.config import RunConfig

ROOT = Path(__file__).parents[2]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What make reads of a clone, without an environment."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    return tmp_path


def commands(clone: Path, *goals: str) -> str:
    command = ["env", "-u", "DEVICE", "-u", "MAKEFLAGS", "make", "-n", *goals]
    return subprocess.run(command, cwd=clone, capture_output=True, text=True, check=True).stdout


def install(clone: Path, device: str) -> None:
    """Leave the stamp that `make setup` leaves."""
    touch = next(line for line in commands(clone, "setup", f"DEVICE={device}").splitlines() if "touch" in line)
    (clone / ".venv").mkdir()
    subprocess.run(touch.lstrip("@"), shell=True, cwd=clone, check=True)


@pytest.mark.parametrize(
    ("installed", "goal", "device"),
    [
        (None, "gpu-check", "gpu"),
        (None, "test", "cpu"),
        ("cpu", "gpu-check", "gpu"),
        ("cpu", "test", None),
        *(("gpu", goal, None) for goal in ("gpu-check", "demo", "test")),
    ],
)
def test_a_target_installs_what_it_needs_and_replaces_no_gpu_environment(
    clone: Path, installed: str | None, goal: str, device: str | None
) -> None:
    if installed is not None:
        install(clone, installed)
    assert re.findall(r"install\.sh \.venv (\w+)", commands(clone, goal)) == ([device] if device else [])


def test_an_environment_of_another_device_is_made_anew(clone: Path) -> None:
    (clone / "requirements/install.sh").write_text('mkdir -p "$1"\n')
    install(clone, "cpu")
    (clone / ".venv/left").touch()
    for device, kept in (("cpu", True), ("gpu", False)):
        subprocess.run(["env", "-u", "MAKEFLAGS", "make", "setup", f"DEVICE={device}"], cwd=clone, check=True)
        assert (clone / ".venv/left").exists() is kept


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is visible")
def test_a_check_without_a_gpu_fails_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    page = tmp_path / "page.md"
    assert gpu_check.main(["engines", "--out", str(page)]) == 1
    assert "no test ran on a GPU: no CUDA device is visible" in capfd.readouterr().err
    for line in ("- Devices: no CUDA device is visible", "Python's headers: ", "- Free disk: "):
        assert line in page.read_text()


def test_a_test_that_hangs_or_crashes_costs_its_own_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in a process of its own, as on a GPU; the exit of a process stands for a fault in a kernel."""
    (tmp_path / "test_four.py").write_text(
        "import os, time, pytest\n"
        "def test_passes(): pass\n"
        "def test_fails(): assert 1 == 2\n"
        "def test_is_skipped(): pytest.skip('not here')\n"
        "def test_crashes(): os._exit(3)\n"
        "def test_hangs(): time.sleep(10**6)\n"
    )
    monkeypatch.chdir(tmp_path)
    names = gpu_check.tests_of(("test_four.py",))
    cases = [gpu_check.run_test(name) for name in names[:4]] + [gpu_check.run_test(names[4], limit_s=5.0)]
    assert [case.outcome for case in cases] == ["passed", "failed", "skipped", "failed", "failed"]
    assert [cases[2].detail, cases[3].detail] == ["not here", "the process ended with status 3 and left no report"]
    assert cases[4].detail == "no result within 5 s"


# What the GPU figures are held against; the figures themselves need a GPU.


def test_a_pass_counts_six_products_a_parameter_and_token() -> None:
    assert ELEMENTS == 1_543_714_304
    # Without the attention over 2 tokens, which is next to nothing, and with logits of every token.
    assert model_flops(LARGE_SHAPE, 1, 0, 2) == pytest.approx(6 * ELEMENTS * 2, rel=1e-3)
    # 28 layers: a query attends to 1,024 tokens on average, 1,536 wide, scores and values, 2 products each.
    assert model_flops(LARGE_SHAPE, 1, 2048, 0) == pytest.approx(
        3 * 2048 * (2 * (ELEMENTS - 151_936 * 1536) + 4 * 28 * 1536 * 1024), rel=1e-3
    )


def test_the_head_alone_and_the_planned_memory_are_of_the_same_pass() -> None:
    small = replace(LARGE_SHAPE, hidden=8, vocabulary=32)
    seconds = head_seconds(small, 5, "cpu", lambda: None, repeats=2)
    assert len(seconds) == 2
    assert min(seconds) > 0
    chip = known_chip("NVIDIA H100 80GB HBM3")
    assert chip is not None
    assert known_chip("NVIDIA GeForce 256") is None
    learner = {"rule": {"name": "grpo"}, "precision": "bf16", "zero_stage": 2, "token_budget": 16384}
    settings = RunConfig.model_validate({"model": {"max_length": 2048}, "learner": learner})
    planned = planned_bytes(settings, LARGE_SHAPE, chip)
    # Weights in bf16; masters, gradients and two moments in fp32; and besides activations and a chunk of logits.
    assert 18 * ELEMENTS < planned < 40 * ELEMENTS
