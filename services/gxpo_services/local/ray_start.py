"""`ray start` for the nodes of runs: `python -m gxpo_services.local.ray_start start …`.

Without Ray's client server. It is for programs outside of the cluster; jobs do not need it, yet the whole head ends
when it does, for instance as a busy machine did not answer it within its 30 s. No option turns it off: Ray leaves it
out only where its dependencies are missing, which this module simulates.

On SIGTERM the trainers end first: Ray's own handler kills the actors whose policy they would save. A node whose
actors serve a trainer elsewhere keeps them until that has ended, as all nodes are stopped at the same time.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil
import ray._private.utils as ray_utils
from ray.scripts import scripts

from gxpo_trainer.config.base import STOP_WAIT_S

_set_handler = ray_utils.set_sigterm_handler
_NO_ACTORS = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")
TOLD_LATER_S = 20.0
"""How much later than this node the one with the trainer may be stopped: the scheduler is stopped before it."""


def end_trainers() -> None:
    """Send SIGTERM to the trainers of this node, and wait until they have saved a checkpoint and ended.

    Without one, wait for the end of the node's actors.
    """
    trainers, actors = [], []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            words = process.cmdline() or [""]
            if "gxpo_trainer.cli" in words:
                process.send_signal(signal.SIGTERM)
                trainers.append(process)
            elif words[0].startswith("ray::") and not words[0].startswith(_NO_ACTORS):
                actors.append(process)
    wait_s = float(os.environ.get("GXPO_STOP_WAIT_S") or STOP_WAIT_S)
    psutil.wait_procs(trainers or actors, timeout=wait_s if trainers else wait_s + TOLD_LATER_S)


def set_sigterm_handler(handler: Callable[[int, Any], None]) -> None:
    """Ray's function, for a handler that runs once the trainers have ended."""

    def end_trainers_first(number: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_trainers()
        handler(number, frame)

    _set_handler(end_trainers_first)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    vars(scripts)["get_ray_client_dependency_error"] = lambda: ImportError("the client server is omitted")
    vars(ray_utils)["set_sigterm_handler"] = set_sigterm_handler
    scripts.main()  # type: ignore[no-untyped-call]
