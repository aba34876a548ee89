"""`make gpu-check` uses the GPU environment, and fails where nothing ran on a GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks.gpu import ELEMENTS, model_flops
from benchmarks.policies import LARGE_SHAPE

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


# What the GPU figures are held against; the figures themselves need a GPU.


def test_a_pass_counts_six_products_a_parameter_and_token() -> None:
    assert ELEMENTS == 1_543_714_304
    # Without the attention over 2 tokens, which is next to nothing, and with logits of every token.
    assert model_flops(LARGE_SHAPE, 1, 0, 2) == pytest.approx(6 * ELEMENTS * 2, rel=1e-3)
    # 28 layers: a query attends to 1,024 tokens on average, 1,536 wide, scores and values, 2 products each.
    assert model_flops(LARGE_SHAPE, 1, 2048, 0) == pytest.approx(
        3 * 2048 * (2 * (ELEMENTS - 151_936 * 1536) + 4 * 28 * 1536 * 1024), rel=1e-3
    )
