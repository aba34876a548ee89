"""Devices that a plan can be made for (devices.toml), what is assumed about their use, and the cores of this one."""

from __future__ import annotations

import functools
import os
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from gxpo_trainer.errors import ConfigError

CPU = "cpu"
DEFAULT_GPU = "h100-80"
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Device:
    """One device, or a host without any.

    memory_bytes: usable; 0 where it is not known. flops: dense products a second, in bf16 and in fp32.
    memory_bandwidth: bytes a second.
    """

    name: str
    memory_bytes: int
    bf16_flops: float
    fp32_flops: float
    memory_bandwidth: float
    ray_names: tuple[str, ...] = ()

    @property
    def kind(self) -> Literal["gpu", "cpu"]:
        return "cpu" if self.name == CPU else "gpu"

    def flops(self, precision: str) -> float:
        """Dense products a second in `precision` (fp32 or bf16)."""
        return self.bf16_flops if precision == "bf16" else self.fp32_flops


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What cannot be read from a config: guesses for a kind of device, not measured on it.

    utilization: share of the device's dense products that forward and backward passes reach. micro_batch_s: fixed
    time of one micro-batch, forward and backward. sampling_efficiency: share of the device's memory bandwidth and
    products that decoding reaches. decode_step_s: fixed time of a decoding step. token_s: time of a sampled token in
    the engine's scheduler. fixed_s: of a step, of a weight sync, and of scoring, each.
    runtime_bytes: of a process or its CUDA context before it holds a model. engine_bytes: what a
    learner's libraries allocate whatever the model. memory_factor: measured over counted bytes of the model's part.
    prompt_fraction, response_fraction: mean length over its limit.
    """

    utilization: float
    micro_batch_s: float
    sampling_efficiency: float
    decode_step_s: float
    token_s: float
    fixed_s: float
    runtime_bytes: int
    engine_bytes: int
    memory_factor: float = 1.0
    prompt_fraction: float = 0.25
    response_fraction: float = 0.5


@functools.cache
def _table() -> dict[str, dict[str, Any]]:
    text = (resources.files(__package__) / "devices.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def assumptions_for(device: Device) -> Assumptions:
    """What is assumed of a kind of device."""
    return Assumptions(**_table()["assumed"][device.kind])


@functools.cache
def devices() -> dict[str, Device]:
    """Every known device by name."""
    return {
        name: Device(
            name=name,
            memory_bytes=int(row["memory_gib"] * GIB),
            bf16_flops=row["bf16_tflops"] * 1e12,
            fp32_flops=row["fp32_tflops"] * 1e12,
            memory_bandwidth=row["memory_gbps"] * 1e9,
            ray_names=tuple(row["ray"]),
        )
        for name, row in _table().items()
        if name != "assumed"
    }


def device_named(name: str) -> Device:
    """A device by its name, or by its model where only one has it. Raises ConfigError naming those to choose from."""
    known, wanted = devices(), name.lower()
    found = [other for other in known if wanted in (other, other.partition("-")[0])]
    if len(found) > 1:
        raise ConfigError(f"device {name!r} is one of several in the planner's table; choose from {', '.join(found)}")
    if not found:
        raise ConfigError(f"there is no device {name!r} in the planner's table; choose from {', '.join(known)}")
    return known[found[0]]


def devices_of_cluster(resource_names: Iterable[str]) -> tuple[Device, ...]:
    """The devices that a cluster's GPUs may be, from Ray's resources (`accelerator_type:A100`), smallest memory first.

    Several where devices of different memory share Ray's name; none for unknown GPUs and for GPUs of different kinds.
    """
    kinds = {name.partition(":")[2] for name in resource_names if name.startswith("accelerator_type:")}
    candidates = [device for device in devices().values() if kinds and kinds <= set(device.ray_names)]
    return tuple(sorted(candidates, key=lambda device: device.memory_bytes))


CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Of the container of this process (cgroup v2): microseconds of processor time in a period, and the period."""


def usable_cores() -> int:
    """Number of cores available to this process: where it may run, and as many as its container may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota_us, period_us = CPU_QUOTA.read_text(encoding="ascii").split()
        return max(1, min(cores, int(quota_us) // int(period_us)))
    except (OSError, ValueError):  # another cgroup version, or no limit ("max")
        return cores
