"""The Ray instance of a run: a local one on loopback, or a running cluster; and the Python stacks of an actor's process
of this node that hangs, read without its help.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gxpo_trainer.errors import TrainingError
from gxpo_trainer.planner.devices import usable_cores
from gxpo_trainer.runtime.placement import Placement, ray_address
from gxpo_trainer.runtime.placement_group import MIN_WAIT_S, alive_nodes, missing, shortage, unplaced

Event = Callable[..., None]
"""log_event(kind, message, **fields)"""

MAX_RESTARTS = 5
"""Restarts of one actor without a completed collection in between before the run fails."""
OBJECT_STORE_BYTES = 512 * 1024 * 1024
START_ATTEMPTS = 3
_POLL_S = 0.5
_FIRST_POLL_S = 2.0
"""A group that fits what is available is ready in milliseconds, and is not reported as waiting."""
_STACKS_SIGNAL, _STACKS_FILE = signal.SIGUSR2, "gxpo-stacks"
_STACKS_POLLS, _STACKS_POLL_S = 30, 0.1


@contextmanager
def ray_session(placement: Placement, on_wait: Callable[[str], None] = lambda missing: None) -> Iterator[Placement]:
    """`connect_ray` and `reserve`; the placement on this Ray. All that was started ends with the block."""
    import ray

    owned = connect_ray(placement)
    try:
        yield reserve(placement, owned=owned, on_wait=on_wait)
    finally:
        placement.group.remove()
        if owned:
            ray.shutdown()


def connect_ray(placement: Placement) -> bool:
    """Connect to the Ray of `ray_address`, or start one on loopback; returns whether the caller must shut it down.

    Actors are unnamed, so runs that share a Ray cannot interfere. Raises TrainingError when Ray is unreachable.
    """
    import ray

    if ray.is_initialized():
        return False
    # Silence the notice, at each start, that token authentication is enabled.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    address = ray_address(placement.config)
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": "warning"}
    if address is None:
        _start_local(common)
        return True
    try:
        ray.init(address=address, **common)
    except Exception as error:
        ray.shutdown()
        raise TrainingError(
            f"cannot connect to Ray at {address} ({error}); check placement.ray_address or RAY_ADDRESS",
            reason="setup_failed",
        ) from error
    return True


def reserve(
    placement: Placement,
    *,
    owned: bool,
    on_wait: Callable[[str], None] = lambda missing: None,
    before_request: Callable[[Placement, Mapping[str, float]], object] = lambda placement, cluster: None,
) -> Placement:
    """Create the run's placement group and wait until it is ready; the placement on this Ray.

    owned: what `connect_ray` returned. A Ray that this process has started is complete: what exceeds it is refused at
    once. In a running cluster nodes may join and other runs release theirs, up to `placement.wait_s`; what joins may
    change device and sharing, and with them the bundles. Raises ConfigError (`no_resources`) when the group does not
    get ready.

    on_wait: called about twice a second with what is missing. before_request: called with the placement and the
    cluster's resources before bundles are requested. An exception of either ends the wait.
    """
    import ray

    joined = not owned or ray_address(placement.config) is not None
    if not joined:
        placement.check_fits(cluster_resources())
    wait_s = max(MIN_WAIT_S, placement.config.placement.wait_s) if joined else MIN_WAIT_S
    group = placement.group
    deadline, timeout_s = time.monotonic() + wait_s, 0.0
    try:
        while True:
            if joined:  # nodes with GPUs may have joined, or be joining
                placement = placement.settle(cluster_resources())
            bundles = placement.bundles()
            if bundles != group.bundles:
                before_request(placement, cluster_resources())
                available = ray.available_resources()  # type: ignore[no-untyped-call]
                timeout_s = 0.0 if joined and shortage(bundles, available) else _FIRST_POLL_S
                group.create(bundles)
            elif group.is_ready(timeout_s):
                return placement
            else:
                available = ray.available_resources()  # type: ignore[no-untyped-call]
                on_wait(missing(bundles, available, len(alive_nodes())))
                timeout_s = _POLL_S
                if time.monotonic() >= deadline:
                    raise unplaced(bundles, alive_nodes(), wait_s)
    except BaseException:
        group.remove()
        raise


def cluster_resources() -> dict[str, float]:
    """Resources of all nodes of the cluster, used or not."""
    import ray

    return dict(ray.cluster_resources())  # type: ignore[no-untyped-call]


def this_node() -> str:
    """Id of the Ray node of this process."""
    import ray

    return str(ray.get_runtime_context().get_node_id())


def _start_local(common: dict[str, Any]) -> None:
    """Start Ray on loopback. Retried, because a busy machine can miss Ray's node start timeout of 30 s."""
    import ray
    from ray._private import ray_constants

    # Where a cluster is possible Ray replaces 127.0.0.1 with the host's external address.
    ray_constants.ENABLE_RAY_CLUSTER = False
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
    # Ray's default niceness of 15 starves sampler and learner on a machine that also runs other work.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Otherwise ray.init waits for idle workers, without end if one takes more than 60 s to start (issue 40131 of Ray).
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    # Ray's metrics servers answer every account of the machine. With an invalid port they are not started.
    os.environ |= {"RAY_enable_metrics_collection": "0", "DASHBOARD_METRIC_PORT": "-1", "AUTOSCALER_METRIC_PORT": "-1"}
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            with _ended_by_signals():
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


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end this process at once: Ray starts in calls of up to 30 s that run no handler of Python.

    What it has started ends with this process. A handler that Ray sets meanwhile stays.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            if handler is not None and signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, handler)


@dataclass(frozen=True, slots=True)
class TracedProcess:
    """A process that writes its stacks on a signal. node: Ray's id; descriptor: of its file, which has no name; None
    when it hung before it could open one."""

    node: str
    pid: int
    descriptor: int | None


def trace_this_process() -> TracedProcess:
    """Let this process write the stacks of its threads when asked; it then needs no thread that still runs Python."""
    descriptor = os.memfd_create(_STACKS_FILE)
    faulthandler.register(_STACKS_SIGNAL, descriptor, all_threads=True)
    return TracedProcess(this_node(), os.getpid(), descriptor)


def end_stalled(actors: Mapping[str, tuple[Any, TracedProcess | None]]) -> None:
    """Print the stacks of hung actors into the log of the run, then kill their processes. By name: the actor, and the
    process once it has been told.

    `ray.kill` ends no process to which Ray's node manager has failed to connect, such as one that was stopped before
    its first call, and the CPUs of its bundle stay taken (Ray 2.60).
    """
    processes = {name: process or _untraced(actor) for name, (actor, process) in actors.items()}
    for name, process in processes.items():
        if process is None:
            text = "Ray has not started its process yet"
        elif process.descriptor is None:
            text = f"process {process.pid} hangs before it could be traced"
        elif process.node != this_node():
            text = f"it is process {process.pid} of another node ({process.node[:8]}), where `py-spy dump` reads them"
        else:
            text = stacks(process.pid, process.descriptor)
        print(f"the stacks of the {name} follow\n{text}", file=sys.stderr, flush=True)
    for process in filter(None, processes.values()):
        if process.node == this_node():
            _kill(process)
        else:
            _kill_there(process)


def _untraced(actor: Any) -> TracedProcess | None:
    """The process of an actor whose constructor may be running; None while it has none. Of Ray's public interfaces only
    one tells it, which needs Ray's dashboard."""
    from ray._private import state

    row = state.actors(actor._actor_id.hex())
    return TracedProcess(row["Address"]["NodeID"], row["Pid"], None) if row.get("Pid") else None


def _kill_there(process: TracedProcess) -> None:
    """Without waiting, as the node may be lost."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    on_node = NodeAffinitySchedulingStrategy(process.node, soft=False)
    ray.remote(_kill).options(num_cpus=0, scheduling_strategy=on_node).remote(process)


def _kill(process: TracedProcess) -> None:
    with suppress(OSError):  # it has ended
        if _is_ours(process.pid, process.descriptor):
            os.kill(process.pid, signal.SIGKILL)


def _is_ours(pid: int, descriptor: int | None) -> bool:
    """Whether it is still the process of the actor: another may have its number now. Raises OSError when ended."""
    if descriptor is None:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::")
    return _STACKS_FILE in Path(f"/proc/{pid}/fd/{descriptor}").readlink().name


def stacks(pid: int, descriptor: int) -> str:
    """The stacks of a process of this host, or why there are none."""
    file = Path(f"/proc/{pid}/fd/{descriptor}")
    try:
        if not _is_ours(pid, descriptor):  # the signal would end another process
            return "the process has ended"
        before = file.stat().st_size
        os.kill(pid, _STACKS_SIGNAL)
        size = before
        for _ in range(_STACKS_POLLS):
            time.sleep(_STACKS_POLL_S)
            now = file.stat().st_size
            if now == size > before:
                return file.read_bytes()[before:].decode(errors="replace").rstrip()
            size = now
    except OSError as error:
        return f"the process has ended or cannot be read ({error.strerror})"
    return "it takes no signals: it is stopped, or the kernel does not return from a call"
