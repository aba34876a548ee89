"""The Python stacks of an actor's process that hangs, read without its help."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gxpo_trainer.cluster.ray_session import this_node

_SIGNAL = signal.SIGUSR2
_FILE = "gxpo-stacks"
_WRITE_S = 3.0
_NODE_S = 20.0
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class TracedProcess:
    """A process that writes its stacks on a signal. node: Ray's id; descriptor: of its file, which has no name."""

    node: str
    pid: int
    descriptor: int


def trace_this_process() -> TracedProcess:
    """Let this process write the stacks of its threads when asked; it then needs no thread that still runs Python."""
    descriptor = os.memfd_create(_FILE)
    faulthandler.register(_SIGNAL, descriptor, all_threads=True)
    return TracedProcess(this_node(), os.getpid(), descriptor)


def print_stacks(name: str, process: TracedProcess | None) -> None:
    """Print the stacks of a hung process, on any node, into the log of the run. process: None while it has not told."""
    found = stacks_of(process) if process is not None else "it hangs before it could be traced"
    print(f"the stacks of the {name} follow\n{found}", file=sys.stderr, flush=True)


def stacks_of(process: TracedProcess) -> str:
    """The stacks of a process of any node, or why there are none."""
    if process.node == this_node():
        return stacks(process.pid, process.descriptor)
    import ray

    there: Any = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(process.node, soft=False)
    read = ray.remote(stacks).options(num_cpus=0, scheduling_strategy=there)
    try:
        return str(ray.get(read.remote(process.pid, process.descriptor), timeout=_NODE_S))
    except ray.exceptions.RayError as error:
        return f"they cannot be read from its node ({str(error).splitlines()[0]})"


def stacks(pid: int, descriptor: int) -> str:
    """The stacks of a process of this host, or why there are none."""
    file = Path(f"/proc/{pid}/fd/{descriptor}")
    try:
        if _FILE not in file.readlink().name:  # another process has its number now, and would end by the signal
            return "the process has ended"
        before = file.stat().st_size
        os.kill(pid, _SIGNAL)
        deadline, size = time.monotonic() + _WRITE_S, before
        while time.monotonic() < deadline:
            time.sleep(_POLL_S)
            now = file.stat().st_size
            if now == size > before:
                return file.read_bytes()[before:].decode(errors="replace").rstrip()
            size = now
    except OSError as error:
        return f"the process has ended or cannot be read ({error.strerror})"
    return "it takes no signals: it is stopped, or the kernel does not return from a call"
