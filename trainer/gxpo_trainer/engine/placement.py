"""Which process runs where, and a Ray for them to run on.

Logical CPUs are fractional. A sum above what Ray has would leave an actor pending for ever, so it is refused
before anything starts.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, field
from typing import Any, Literal

from gxpo_trainer.config import RunConfig
from gxpo_trainer.engine.seats import LEAST_WAIT_S, Seats
from gxpo_trainer.errors import ConfigError, TrainingError

OBJECT_STORE_BYTES = 512 * 1024 * 1024
START_ATTEMPTS = 3
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class Placement:
    """The settings of `placement` with every automatic value decided."""

    config: RunConfig
    device: Literal["cpu", "gpu"]
    learner_threads: int
    sampler_threads: int
    seats: Seats = field(default_factory=Seats)

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
        cores = usable_cores()
        threads = wanted.learner_threads or max(1, cores // wanted.learner_ranks)
        return cls(config, device, threads, wanted.sampler_threads or cores)

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
        gpus = (p.learner_ranks + p.tensor_parallel) if self.device == "gpu" else 0
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


def start_ray(placement: Placement) -> bool:
    """Connect to the Ray of `ray_address`, or start one on loopback. True when this process is to leave it again.

    On a Ray that others use too nothing of a run has a name, so runs cannot meet there. Raises ConfigError
    (`no_resources`) when the run does not fit it, TrainingError when it cannot be reached.
    """
    import ray

    if ray.is_initialized():
        _find_room(placement)
        return False
    # Ray says at each start that its token authentication is on, which is what we want.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    address = ray_address(placement.config)
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": "warning"}
    if address is None:
        _start_local(common)
    else:
        _connect(address, common)
    try:
        _find_room(placement, placement.config.placement.wait_s if address else 0.0)
    except ConfigError:
        ray.shutdown()
        raise
    return True


def _find_room(placement: Placement, wait_s: float = 0.0) -> None:
    """Check that the run fits, and on several nodes keep its places free. Nodes may join for `wait_s` yet."""
    import ray

    until = time.monotonic() + wait_s
    while True:
        try:
            placement.check_fits(ray.cluster_resources())
            break
        except ConfigError as error:
            if time.monotonic() >= until:
                # Another machine could run it: the service tells this apart from a config that none can.
                error.reason = "no_resources"
                raise
        time.sleep(_LOOK_S)
    placement.seats.wait_s = max(LEAST_WAIT_S, placement.config.placement.wait_s)
    placement.seats.take(*placement.bundles(), until=until)


def this_node() -> str:
    """The id of the Ray node that this process runs on."""
    import ray

    return str(ray.get_runtime_context().get_node_id())


def _connect(address: str, common: dict[str, Any]) -> None:
    """Join a running Ray."""
    import ray

    try:
        ray.init(address=address, **common)
    except Exception as error:
        ray.shutdown()
        raise TrainingError(
            f"no Ray at {address} ({error}); check placement.ray_address or RAY_ADDRESS", reason="setup_failed"
        ) from error


def _start_local(common: dict[str, Any]) -> None:
    """A Ray of our own on loopback. Ray gives a node 30 s to come up, which a busy machine can miss: try again."""
    import ray
    from ray._private import ray_constants

    # Ray puts the host's outer address in the place of 127.0.0.1 wherever it could be part of a cluster.
    ray_constants.ENABLE_RAY_CLUSTER = False
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
    # Ray runs actors at nice 15: beside anything else on the machine the sampler and the learner would starve.
    os.environ.setdefault("RAY_worker_niceness", "0")
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            ray.init(
                address="local",  # never another Ray of this machine, which Ray would look for
                num_cpus=usable_cores(),
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                _node_ip_address="127.0.0.1",
                **common,
            )
            return
        except Exception as error:
            ray.shutdown()
            if attempt == START_ATTEMPTS:
                raise TrainingError(
                    f"Ray did not start on this machine ({error}); is it out of memory or CPU?", reason="no_resources"
                ) from error


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _visible_gpus() -> int:
    """CUDA devices that this process may use, without importing torch."""
    from pathlib import Path

    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        return len([entry for entry in hidden.split(",") if entry.strip() not in ("", "-1")])
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
