"""The Ray instance of a run: a local one on loopback, or a running cluster."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from gxpo_trainer.cluster.placement import Placement, ray_address, usable_cores
from gxpo_trainer.cluster.placement_group import MIN_WAIT_S
from gxpo_trainer.errors import ConfigError, TrainingError

OBJECT_STORE_BYTES = 512 * 1024 * 1024
START_ATTEMPTS = 3
_POLL_S = 0.5


def start_ray(placement: Placement) -> bool:
    """Connect to the Ray of `ray_address`, or start one on loopback, and reserve the run's resources.

    Returns whether the caller must call `ray.shutdown`. Actors are unnamed, so runs that share a Ray cannot
    interfere. Raises ConfigError (`no_resources`) when the run does not fit, TrainingError when Ray is unreachable.
    """
    import ray

    if ray.is_initialized():
        _reserve(placement, shared=True)
        return False
    # Silence the notice, at each start, that token authentication is enabled.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    address = ray_address(placement.config)
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": "warning"}
    if address is None:
        _start_local(common)
    else:
        _connect(address, common)
    try:
        _reserve(placement, placement.config.placement.wait_s if address else 0.0, shared=address is not None)
    except ConfigError:
        ray.shutdown()
        raise
    return True


def _reserve(placement: Placement, wait_s: float = 0.0, *, shared: bool) -> None:
    """Check that the run fits and reserve its placement group, waiting up to `wait_s` for nodes to join.

    shared: the cluster was not started by this process, so its GPUs, not this machine's, decide the device.
    """
    import ray

    deadline = time.monotonic() + wait_s
    while True:
        try:
            if shared:
                placement.settle_device(ray.cluster_resources())
            placement.check_fits(ray.cluster_resources())
            break
        except ConfigError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(_POLL_S)
    placement.group.wait_s = max(MIN_WAIT_S, placement.config.placement.wait_s)
    placement.group.reserve(*placement.bundles(), deadline=deadline)


def this_node() -> str:
    """Id of the Ray node of this process."""
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
            f"cannot connect to Ray at {address} ({error}); check placement.ray_address or RAY_ADDRESS",
            reason="setup_failed",
        ) from error


def _start_local(common: dict[str, Any]) -> None:
    """Start Ray on loopback. Retried, because a busy machine can miss Ray's node start timeout of 30 s."""
    import ray
    from ray._private import ray_constants

    # Where a cluster is possible Ray replaces 127.0.0.1 with the host's external address.
    ray_constants.ENABLE_RAY_CLUSTER = False
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
    # Ray's default niceness of 15 starves sampler and learner on a machine that also runs other work.
    os.environ.setdefault("RAY_worker_niceness", "0")
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            ray.init(
                address="local",  # never connect to another Ray on this machine
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
                    f"Ray did not start on this machine ({error}); check free memory and CPU load",
                    reason="no_resources",
                ) from error
