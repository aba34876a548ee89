"""The Ray that a run uses: one of its own on loopback, or a running one."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from gxpo_trainer.cluster.placement import Placement, ray_address, usable_cores
from gxpo_trainer.cluster.placement_group import LEAST_WAIT_S
from gxpo_trainer.errors import ConfigError, TrainingError

OBJECT_STORE_BYTES = 512 * 1024 * 1024
START_ATTEMPTS = 3
_LOOK_S = 0.5


def start_ray(placement: Placement) -> bool:
    """Connect to the Ray of `ray_address`, or start one on loopback. True when this process is to leave it again.

    On a Ray that others use too nothing of a run has a name, so runs cannot meet there. Raises ConfigError
    (`no_resources`) when the run does not fit it, TrainingError when it cannot be reached.
    """
    import ray

    if ray.is_initialized():
        _find_room(placement, shared=True)
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
        _find_room(placement, placement.config.placement.wait_s if address else 0.0, shared=address is not None)
    except ConfigError:
        ray.shutdown()
        raise
    return True


def _find_room(placement: Placement, wait_s: float = 0.0, *, shared: bool) -> None:
    """Check that the run fits, and on several nodes keep its places free. Nodes may join for `wait_s` yet.

    shared: the Ray is not one of this process's own, so its GPUs, not this machine's, settle the device.
    """
    import ray

    until = time.monotonic() + wait_s
    while True:
        try:
            if shared:
                placement.settle_device(ray.cluster_resources())
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
