"""Resources and Ray options of each process of a run.

Logical CPUs are fractional. A request above Ray's total would leave an actor pending indefinitely, so it is rejected
before anything starts.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gxpo_trainer.cluster.placement_group import RunPlacementGroup
from gxpo_trainer.config import RunConfig
from gxpo_trainer.errors import ConfigError


@dataclass(slots=True)
class Placement:
    """The settings of `placement` with every automatic value resolved.

    Order: `decide`, before Ray runs; `settle_device` once connected to a Ray cluster, which may have GPUs that this
    process does not see.
    """

    config: RunConfig
    device: Literal["cpu", "gpu"]
    learner_threads: int
    sampler_threads: int
    group: RunPlacementGroup = field(default_factory=RunPlacementGroup)
    device_reason: str = "placement.device"
    """Why `device` has its value, for the log."""

    @classmethod
    def decide(cls, config: RunConfig) -> Placement:
        """Resolve `auto` values. Raises ConfigError when a GPU is requested and none is visible."""
        requested = config.placement
        visible = _visible_gpus()
        if requested.device == "gpu" and not visible and ray_address(config) is None:
            raise ConfigError('placement.device = "gpu" but no GPU is visible; set it to "cpu" or "auto"')
        device: Literal["cpu", "gpu"] = (
            "gpu" if requested.device == "gpu" or (requested.device == "auto" and visible) else "cpu"
        )
        reason = f'placement.device = "{requested.device}"'
        if requested.device == "auto":
            reason += f" and {visible or 'no'} GPU{'' if visible == 1 else 's'} visible on this machine"
        cores = usable_cores()
        threads = requested.learner_threads or max(1, cores // requested.learner_ranks)
        return cls(config, device, threads, requested.sampler_threads or cores, device_reason=reason)

    def settle_device(self, cluster: dict[str, float]) -> None:
        """Resolve `placement.device = "auto"` from the resources of the Ray cluster.

        Raises ConfigError when the cluster and this machine disagree, or the cluster has too few GPUs.
        """
        if self.config.placement.device != "auto":
            return
        needed, found, visible = self._num_gpus(), int(cluster.get("GPU", 0)), _visible_gpus()
        fix = 'set placement.device to "gpu" or "cpu"'
        if 0 < found < needed:
            raise ConfigError(
                f'placement.device = "auto", but the Ray cluster has {found} GPUs and this run needs {needed} '
                f"(learner_ranks + tensor_parallel); {fix}, or lower learner_ranks"
            )
        if visible and not found:
            raise ConfigError(
                f'placement.device = "auto", but {visible} GPUs are visible on this machine and the Ray cluster has '
                f"none; {fix}"
            )
        self.device = "gpu" if found else "cpu"
        self.device_reason = f'placement.device = "auto" and {found or "no"} GPUs in the Ray cluster'

    def _num_gpus(self) -> int:
        return self.config.placement.learner_ranks + self.config.placement.tensor_parallel

    def learner_options(self, rank: int = 0) -> dict[str, Any]:
        """Ray options of one learner rank."""
        accelerator = "cuda" if self.device == "gpu" else "cpu"
        return {
            **self.group.learner_options(rank),
            "num_cpus": self.config.placement.learner_cpus,
            "num_gpus": 1 if self.device == "gpu" else 0,
            "runtime_env": {"env_vars": {**_thread_variables(self.learner_threads), "DS_ACCELERATOR": accelerator}},
        }

    transport = "shared_memory"

    def resolve_transport(self, one_node):
        return "shared_memory" if one_node else "object_store"

    def sampler_options(self, index=0) -> dict[str, Any]:
        """Ray options of the sampler."""
        variables = {
            **_thread_variables(self.sampler_threads),
            "VLLM_CPU_KVCACHE_SPACE": str(self.config.rollout.cpu_kv_cache_gib),
        }
        if self.device == "cpu":
            variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        return {
            **self.group.sampler_options(),
            "num_cpus": self.config.placement.sampler_cpus,
            "num_gpus": self.config.placement.tensor_parallel if self.device == "gpu" else 0,
            "runtime_env": {"env_vars": variables},
        }

    def verifier_options(self) -> dict[str, Any]:
        """Ray options of the verifier."""
        return {
            **self.group.sampler_options(),
            "num_cpus": self.config.placement.verifier_cpus,
            "num_gpus": 0,
            "max_concurrency": 64,
            "runtime_env": {"env_vars": _thread_variables(1)},
        }

    def check_fits(self, cluster: dict[str, float]) -> None:
        """Check this run's total request. Raises ConfigError (`no_resources`) when it exceeds Ray's resources."""
        p = self.config.placement
        cpus = p.learner_ranks * p.learner_cpus + p.sampler_cpus + p.verifier_cpus
        gpus = self._num_gpus() if self.device == "gpu" else 0
        if cpus > cluster.get("CPU", 0) + 1e-9:
            raise ConfigError(
                f"placement requires {cpus:g} logical CPUs (learner_ranks × learner_cpus + sampler_cpus + "
                f"verifier_cpus) but Ray has {cluster.get('CPU', 0):g}; lower these settings (fractions are allowed)",
                reason="no_resources",
            )
        if gpus > cluster.get("GPU", 0) + 1e-9:
            raise ConfigError(
                f"placement requires {gpus} GPUs (learner_ranks + tensor_parallel) but Ray has "
                f"{cluster.get('GPU', 0):g}; lower these settings or add workers",
                reason="no_resources",
            )

    def bundles(self) -> tuple[list[dict[str, float]], str]:
        """Bundles of the placement group, the learner's first and the sampler's last, and Ray's strategy."""
        p = self.config.placement
        rank = {"CPU": p.learner_cpus} | ({"GPU": 1.0} if self.device == "gpu" else {})
        # The verifier shares the sampler's bundle, because it scores the sampler's groups.
        sampler = {"CPU": p.sampler_cpus + p.verifier_cpus}
        sampler |= {"GPU": float(p.tensor_parallel)} if self.device == "gpu" else {}
        if p.strategy == "split":
            return [{name: count * p.learner_ranks for name, count in rank.items()}, sampler], "STRICT_SPREAD"
        return [*[dict(rank) for _ in range(p.learner_ranks)], sampler], "PACK"


def ray_address(config: RunConfig) -> str | None:
    """Address of the Ray to join: `placement.ray_address`, else RAY_ADDRESS (set in Ray jobs). None: start one."""
    return config.placement.ray_address or os.environ.get("RAY_ADDRESS") or None


def usable_cores() -> int:
    """Number of cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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


def _visible_gpus() -> int:
    """Number of CUDA devices visible to this process, without importing torch."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        return len([entry for entry in hidden.split(",") if entry.strip() not in ("", "-1")])
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
