"""Resources and Ray options of each process of a run.

Logical CPUs are fractional. A request above Ray's total is rejected at once: its actor would stay pending.
"""

from __future__ import annotations

import importlib.util
import math
import os
import runpy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.engines import CpuShares, Transport, choose_transport
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.planner.devices import usable_cores
from gxpo_trainer.runtime.placement_group import (
    MIN_WAIT_S,
    Bundle,
    Bundles,
    RunPlacementGroup,
    describe,
    shortage,
    total_of,
)
from gxpo_trainer.runtime.progress import ProgressWatch


@dataclass(frozen=True, slots=True)
class Placement:
    """The settings of `placement` with every automatic value resolved.

    `decide` makes it before Ray runs. `settle` makes that of a Ray cluster, which may have GPUs that this process does
    not see; both share the placement group.

    sampler_threads: of each device of an engine. device_reason: why `device` has its value, for the log. colocated:
    whether learner ranks and engines share devices. available_cpus: logical CPUs for `auto` shares.
    """

    config: RunConfig
    device: Literal["cpu", "gpu"]
    learner_threads: int
    sampler_threads: int
    group: RunPlacementGroup = field(default_factory=RunPlacementGroup)
    device_reason: str = "placement.device"
    colocated: bool = False
    available_cpus: float = math.inf

    @classmethod
    def decide(cls, config: RunConfig, watch: ProgressWatch | None = None) -> Placement:
        """Resolve `auto` values. Raises ConfigError when a GPU is requested and none is visible.

        watch: notices actors that make no progress.
        """
        config = config.without_idle_engines()
        requested, cores = config.placement, usable_cores()
        learner_threads = requested.learner_threads or max(1, cores // max(1, requested.learner_ranks))
        sampler_threads = requested.sampler_threads or max(1, cores // max(1, requested.sampler_devices))
        group = RunPlacementGroup(
            watch=watch or ProgressWatch(config.timeouts), wait_s=max(MIN_WAIT_S, requested.wait_s)
        )
        device: Literal["cpu", "gpu"] = "gpu" if requested.device == "gpu" else "cpu"
        reason = f'placement.device = "{requested.device}"'
        placement = cls(config, device, learner_threads, sampler_threads, group, reason)
        if ray_address(config) is not None:
            return placement
        visible, problem = _usable_gpus(config)
        if device == "gpu" and not visible:
            why = problem or "no GPU is visible"
            raise ConfigError(f'placement.device = "gpu" but {why}; set it to "cpu" or "auto"')
        return placement._on(visible, "visible on this machine", problem, cores)

    def settle(self, cluster: Mapping[str, float]) -> Placement:
        """The placement on a Ray cluster of these resources. Raises ConfigError for settings that cannot work there."""
        visible, problem = _usable_gpus(self.config)
        gpus = 0 if problem else int(cluster.get("GPU", 0))  # Ray counts the GPUs of the node that it starts here
        if self.config.placement.device == "auto" and visible and not gpus:
            raise ConfigError(
                f'placement.device = "auto", but {visible} GPUs are visible on this machine and the Ray cluster '
                'has none; set placement.device to "gpu" or "cpu"',
                reason="no_resources",
            )
        return self._on(gpus, "in the Ray cluster", problem, cluster.get("CPU", 0.0))

    @property
    def cpus(self) -> CpuShares:
        """Logical CPUs of each process."""
        return self.config.placement.cpu_shares(self.available_cpus)

    @property
    def cpus_in_words(self) -> str:
        """The logical CPUs of each process and of all, for the log."""
        p, cpus = self.config.placement, self.cpus
        less = "" if cpus == p.cpu_shares() else ", lowered to fit"
        return (
            f"{p.total_cpus(cpus):g} logical CPUs{less}: {cpus.learner:g} for each of {p.learner_ranks} learner ranks, "
            f"{cpus.sampler:g} for each of {p.samplers} engines, {cpus.verifier:g} for the verifier"
        )

    def _on(self, gpus: int, where: str, problem: str | None, cpus: float) -> Placement:
        """Resolve an automatic device and sharing. problem: why GPUs cannot be used.

        GPUs are shared on request, or where there are too few and sharing is possible: sampling ahead needs engines
        that run while the learner updates, and nccl a GPU for each process.
        """
        requested, device, reason = self.config.placement, self.device, self.device_reason
        if requested.device == "auto":
            device = "gpu" if gpus else "cpu"
            reason = f'placement.device = "auto" and {gpus or "no"} GPU{"" if gpus == 1 else "s"} {where}'
            reason += f": {problem}" if problem else ""
        scarce = device == "gpu" and gpus < requested.num_gpus(colocated=False)
        apart = self.config.rollout.async_depth > 0 or requested.weight_transport == "nccl"
        colocated = requested.can_colocate and (requested.colocate is True or (scarce and not apart))
        placement = replace(self, device=device, device_reason=reason, colocated=colocated, available_cpus=float(cpus))
        placement.transport(one_node=requested.strategy != "split")
        return placement

    def transport(self, *, one_node: bool) -> Transport:
        """How weights reach the engines; one_node: learner and all engines are on one node.

        Raises ConfigError for a requested transport that cannot work there.
        """
        try:
            return choose_transport(self.config.placement.weight_transport, self.device, self.colocated, one_node)
        except ValueError as error:
            raise ConfigError(f"placement: {error}") from None

    @property
    def num_gpus(self) -> int:
        """GPUs that the run reserves."""
        return self.config.placement.num_gpus(colocated=self.colocated) if self.device == "gpu" else 0

    def learner_options(self, rank: int = 0) -> dict[str, Any]:
        """Ray options of one learner rank, placed in the reserved group."""
        variables = _thread_variables(self.learner_threads)
        variables["DS_ACCELERATOR"] = "cuda" if self.device == "gpu" else "cpu"
        if self.device == "gpu" and not self.colocated:
            # Micro-batches differ in width. Not on shared GPUs, where buckets are exported to other processes: that has
            # not been tried with such segments.
            variables["PYTORCH_ALLOC_CONF"] = os.environ.get("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        if self.colocated and self.device == "gpu":
            # The engine holds the bundle's GPUs. With num_gpus = 0 Ray keeps CUDA_VISIBLE_DEVICES unless it is told to
            # clear it.
            variables["CUDA_VISIBLE_DEVICES"] = self.group.learner_device(rank)
            variables["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
        return {
            **self.group.learner_options(rank),
            "num_cpus": self.cpus.learner,
            "num_gpus": 1 if self.device == "gpu" and not self.colocated else 0,
            "runtime_env": {"env_vars": variables},
        }

    def sampler_options(self, index: int = 0) -> dict[str, Any]:
        """Ray options of one engine, placed in the reserved group."""
        if self.colocated and self.device == "gpu":
            # While the engine runs, no task can ask for the ids of the GPUs it holds.
            self.group.devices(index)
        return {
            **self.group.sampler_options(index),
            "num_cpus": self.cpus.sampler,
            "num_gpus": self.config.placement.tensor_parallel if self.device == "gpu" else 0,
            "runtime_env": {"env_vars": _thread_variables(self.sampler_threads)},
        }

    def verifier_options(self) -> dict[str, Any]:
        """Ray options of the verifier."""
        return {
            **self.group.sampler_options(0),
            "num_cpus": self.cpus.verifier,
            "num_gpus": 0,
            "max_concurrency": 10_000,
            "runtime_env": {"env_vars": _thread_variables(1)},
        }

    def check_fits(self, cluster: Mapping[str, float]) -> None:
        """Check this run's total request. Raises ConfigError (`no_resources`) when it exceeds Ray's resources."""
        if shortage(bundles := self.bundles(), cluster):
            raise ConfigError(
                f"placement requires {describe(total_of(bundles.resources))} but Ray has {describe(cluster)}; lower "
                "learner_ranks, samplers or tensor_parallel, or the CPU shares (fractions are allowed), share GPUs "
                "(learner_ranks = samplers × tensor_parallel, rollout.async_depth = 0), or add workers",
                reason="no_resources",
            )

    def bundles(self) -> Bundles:
        """Bundles of the run's placement group.

        Separate: one for each rank, then one for each engine. Colocated: one for each engine and its ranks. `strategy =
        "split"`: all ranks in one and all engines in another, on different nodes.
        """
        p, cpus, bundle = self.config.placement, self.cpus, self._bundle
        ranks, samplers, t = p.learner_ranks, p.samplers, p.tensor_parallel
        if self.colocated:
            shared = [bundle(cpus.sampler + t * cpus.learner, t) for _ in range(samplers)]
            shared[0]["CPU"] += cpus.verifier
            return Bundles(tuple(shared), "PACK", tuple(rank // t for rank in range(ranks)), tuple(range(samplers)))
        if p.strategy == "split":
            learner = bundle(ranks * cpus.learner, ranks)
            engines = bundle(samplers * cpus.sampler + cpus.verifier, p.sampler_devices)
            return Bundles((learner, engines), "STRICT_SPREAD", (0,) * ranks, (1,) * samplers)
        separate = [bundle(cpus.learner, 1) for _ in range(ranks)]
        separate += [bundle(cpus.sampler, t) for _ in range(samplers)]
        if samplers:
            separate[ranks]["CPU"] += cpus.verifier
        return Bundles(tuple(separate), "PACK", tuple(range(ranks)), tuple(range(ranks, ranks + samplers)))

    def _bundle(self, cpus: float, gpus: int) -> Bundle:
        return {"CPU": cpus} | ({"GPU": float(gpus)} if self.device == "gpu" else {})


def ray_address(config: RunConfig) -> str | None:
    """Address of the Ray to join: `placement.ray_address`, else RAY_ADDRESS (set in Ray jobs). None: start one."""
    return config.placement.ray_address or os.environ.get("RAY_ADDRESS") or None


def _thread_variables(count: int) -> dict[str, str]:
    """Environment variables of a process with `count` threads; Ray would set OMP_NUM_THREADS from logical CPUs."""
    return {
        "OMP_NUM_THREADS": str(count),
        "MKL_NUM_THREADS": str(count),
        # Sampler, learner and verifier share the cores, so waiting threads must yield soon: libgomp's default of
        # spinning for milliseconds makes steps several times slower.
        "GOMP_SPINCOUNT": "3000",
        "TOKENIZERS_PARALLELISM": "false",
    }


OLDEST_DRIVERS = {12: 525, 13: 580}
"""Oldest NVIDIA driver of each major version of CUDA."""


def _usable_gpus(config: RunConfig) -> tuple[int, str | None]:
    """Number of GPUs of this machine that processes started here can use, and why they cannot use those that are there.

    Raises ConfigError where the driver is too old for torch, because training on CPUs instead would surprise. On a Ray
    that the run joins other environments may decide: the ranks check theirs.
    """
    visible = visible_gpus()
    if not visible or config.placement.device == "cpu" or ray_address(config) is not None:
        return visible, None
    if torch_cuda() is None:
        return 0, "torch is its build for CPUs here, and `make setup DEVICE=gpu` installs the one for GPUs"
    if (problem := driver_problem()) is not None:
        raise ConfigError(f'{problem}, or set placement.device = "cpu"', reason="no_resources")
    return visible, None


def torch_cuda() -> str | None:
    """Version of CUDA that the installed torch is built with, without importing it; None: for CPUs, or no torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    cuda: str | None = runpy.run_path(str(Path(spec.origin).with_name("version.py")))["cuda"]
    return cuda


def driver_problem() -> str | None:
    """Why torch cannot use the GPUs of this machine, with the fix; None where the driver is new enough for it."""
    from ray._private.thirdparty import pynvml

    built = torch_cuda() or "0"
    cuda = int(built.partition(".")[0])
    try:
        pynvml.nvmlInit()  # type: ignore[no-untyped-call]
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        # NVIDIA's forward compatibility packages replace the driver's library, and then run a newer CUDA on an older
        # driver.
        offered = pynvml.nvmlSystemGetCudaDriverVersion_v2() // 1000  # type: ignore[no-untyped-call]
    except pynvml.NVMLError as error:
        return f"the NVIDIA driver does not answer ({error}): install it"
    needed = OLDEST_DRIVERS.get(cuda, 0)
    if int(driver.partition(".")[0]) >= needed or offered >= cuda:
        return None
    return (
        f"the NVIDIA driver {driver} is too old for torch, which is built with CUDA {built}: update the driver to "
        f"{needed} or newer, or install NVIDIA's forward compatibility package"
    )


def visible_gpus() -> int:
    """Number of CUDA devices visible to this process, as Ray counts them by NVML; without importing torch."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        return len([entry for entry in hidden.split(",") if entry.strip() not in ("", "-1")])
    from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager

    return NvidiaGPUAcceleratorManager.get_current_node_num_accelerators()
