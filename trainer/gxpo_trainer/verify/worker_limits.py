"""What every worker process that runs untrusted computations is started with: its environment, limits and lifetime."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import gxpo_trainer

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def worker_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """One thread per worker, a fixed hash seed (sympy orders by hashes), and this package on the path."""
    package_root = str(Path(gxpo_trainer.__file__).resolve().parents[1])
    inherited = environment.get("PYTHONPATH", "")
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    path = package_root + (os.pathsep + inherited if inherited else "")
    return {**environment, **one_thread, "PYTHONHASHSEED": "0", "PYTHONPATH": path}


def limit_process(memory_mb: int) -> None:
    """Limit this process and its children to so much address space each, without core files; ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    limit = memory_mb * 1024 * 1024
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def die_with_parent(parent: int) -> None:
    """SIGKILL to ourselves when the parent thread ends, also in the middle of a computation (Linux)."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit("the parent of this worker has ended")


def survive_parent() -> None:
    """Undo `die_with_parent`: this process notices by itself that its parent has ended."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that none is out of reach (Linux)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value)
