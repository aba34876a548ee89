"""Which process runs where.

Logical CPUs are fractional. A sum above what Ray has would leave an actor pending for ever, so it is refused
before anything starts.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gxpo_trainer.cluster.placement_group import Seats
from gxpo_trainer.config import RunConfig
from gxpo_trainer.errors import ConfigError


@dataclass(slots=True)
class Placement:
    """The settings of `placement` with every automatic value decided.

    Order: `decide`, before a Ray is there; `settle_device` on a Ray of others, which may have GPUs that this process
    does not see.
    """

    config: RunConfig
    device: Literal["cpu", "gpu"]
    learner_threads: int
    sampler_threads: int
    seats: Seats = field(default_factory=Seats)
    device_reason: str = "placement.device"
    """Why `device` is what it is, for the log."""

    @classmethod
    def decide(cls, config: RunConfig) -> Placement:
        """Settle `auto` values. Raises ConfigError when a GPU is asked for and none is visible."""
        wanted = config.placement
        visible = _visible_gpus()
        if wanted.device == "gpu" and not visible and ray_address(config) is None:
            raise ConfigError('placement.device = "gpu" but no GPU is visible; set it to "cpu" or "auto"')
        device: Literal["cpu", "gpu"] = (
            "gpu" if wanted.device == "gpu" or (wanted.device == "auto" and visible) else "cpu"
        )
        reason = f'placement.device = "{wanted.device}"'
        if wanted.device == "auto":
            reason += f" and {visible or 'no'} GPU{'' if visible == 1 else 's'} visible on this machine"
        cores = usable_cores()
        threads = wanted.learner_threads or max(1, cores // wanted.learner_ranks)
        return cls(config, device, threads, wanted.sampler_threads or cores, device_reason=reason)

    def settle_device(self, cluster: dict[str, float]) -> None:
        """Settle `placement.device = "auto"` by the resources of the Ray that runs the processes.

        Raises ConfigError where both devices are possible and neither is meant for certain.
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
        return {
            **self.seats.learner(rank),
            "num_cpus": self.config.placement.learner_cpus,
            "num_gpus": 1 if self.device == "gpu" else 0,
            "runtime_env": {"env_vars": {**self._threads(self.learner_threads), "DS_ACCELERATOR": self._accelerator()}},
        }

    def sampler_options(self) -> dict[str, Any]:
        """Ray options of the sampler."""
        variables = {
            **self._threads(self.sampler_threads),
            "VLLM_CPU_KVCACHE_SPACE": str(self.config.rollout.cpu_kv_cache_gib),
        }
        if self.device == "cpu":
            variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        return {
            **self.seats.sampler(),
            "num_cpus": self.config.placement.sampler_cpus,
            "num_gpus": self.config.placement.tensor_parallel if self.device == "gpu" else 0,
            "runtime_env": {"env_vars": variables},
        }

    def verifier_options(self) -> dict[str, Any]:
        """Ray options of the verifier."""
        return {
            **self.seats.sampler(),
            "num_cpus": self.config.placement.verifier_cpus,
            "num_gpus": 0,
            "max_concurrency": 64,
            "runtime_env": {"env_vars": self._threads(1)},
        }

    def check_fits(self, cluster: dict[str, float]) -> None:
        """Raises ConfigError when the processes of this run can never all be placed."""
        p = self.config.placement
        cpus = p.learner_ranks * p.learner_cpus + p.sampler_cpus + p.verifier_cpus
        gpus = self._num_gpus() if self.device == "gpu" else 0
        if cpus > cluster.get("CPU", 0) + 1e-9:
            raise ConfigError(
                f"placement asks for {cpus:g} logical CPUs (learner_ranks × learner_cpus + sampler_cpus + "
                f"verifier_cpus) but Ray has {cluster.get('CPU', 0):g}; lower them, they may be fractions"
            )
        if gpus > cluster.get("GPU", 0) + 1e-9:
            raise ConfigError(
                f"placement asks for {gpus} GPUs (learner_ranks + tensor_parallel) but Ray has "
                f"{cluster.get('GPU', 0):g}; lower them, or add workers"
            )

    def bundles(self) -> tuple[list[dict[str, float]], str]:
        """What is to be kept free for this run, and Ray's strategy: the learner's first, the sampler's last."""
        p = self.config.placement
        rank = {"CPU": p.learner_cpus} | ({"GPU": 1.0} if self.device == "gpu" else {})
        # The verifier sits with the sampler, whose groups it scores.
        sampler = {"CPU": p.sampler_cpus + p.verifier_cpus}
        sampler |= {"GPU": float(p.tensor_parallel)} if self.device == "gpu" else {}
        if p.strategy == "split":
            return [{name: count * p.learner_ranks for name, count in rank.items()}, sampler], "STRICT_SPREAD"
        return [*[dict(rank) for _ in range(p.learner_ranks)], sampler], "PACK"

    def _threads(self, count: int) -> dict[str, str]:
        # Ray would set OMP_NUM_THREADS from the logical CPUs, which say nothing about cores here.
        return {
            "OMP_NUM_THREADS": str(count),
            "MKL_NUM_THREADS": str(count),
            # Sampler, learner and verifier share the cores: a thread that waits for its next task must let go of its
            # core soon. By default libgomp spins for milliseconds, which made steps several times slower.
            "GOMP_SPINCOUNT": "3000",
            "TOKENIZERS_PARALLELISM": "false",
        }

    def _accelerator(self) -> str:
        return "cuda" if self.device == "gpu" else "cpu"


def ray_address(config: RunConfig) -> str | None:
    """The Ray to use: `placement.ray_address`, else RAY_ADDRESS, which Ray sets for a job; None: one of our own."""
    return config.placement.ray_address or os.environ.get("RAY_ADDRESS") or None


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _visible_gpus() -> int:
    """CUDA devices that this process may use, without importing torch."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        return len([entry for entry in hidden.split(",") if entry.strip() not in ("", "-1")])
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
