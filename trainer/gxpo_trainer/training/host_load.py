"""Load of the controller's host: processor, memory, disk, network and GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from gxpo_trainer.training.gpu_load import GpuLoad
from gxpo_trainer.types import Metrics

_LOOPBACK = "lo"


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters of the host at a time.

    at: seconds. totals: name of the rate → bytes so far; a counter that cannot be read is missing.
    """

    at: float
    totals: dict[str, int]


class HostLoad:
    """`system/…` of a step. folder: on the disk whose free space is reported."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._begin = read_counters()
        self._gpus = GpuLoad()

    def begin_step(self) -> None:
        """Rates and processor load are means from here on."""
        psutil.cpu_percent()
        self._begin = read_counters()
        self._gpus.begin_step()

    def metrics(self) -> Metrics:
        """Load since `begin_step` in percent of all cores, memory in use and free disk in bytes, bytes per second."""
        found: Metrics = {
            "system/cpu_percent": psutil.cpu_percent(),
            "system/memory_bytes": float(psutil.virtual_memory().used),
            **rates(self._begin, read_counters()),
            **self._gpus.metrics(),
        }
        free = _or_none(lambda: psutil.disk_usage(str(self._folder)).free)
        return found if free is None else {**found, "system/disk_free_bytes": float(free)}


def read_counters() -> Reading:
    """Bytes written to the host's block devices, and sent and received on its networks without the loopback."""
    counters = {
        "system/disk_written_bytes_per_s": _or_none(_written),
        "system/network_sent_bytes_per_s": _or_none(lambda: _network("bytes_sent")),
        "system/network_received_bytes_per_s": _or_none(lambda: _network("bytes_recv")),
    }
    return Reading(time.monotonic(), {name: value for name, value in counters.items() if value is not None})


def rates(begin: Reading, end: Reading) -> Metrics:
    """Bytes per second of the counters that both have. One that fell because a device was removed counts as 0."""
    elapsed = end.at - begin.at
    common = begin.totals.keys() & end.totals.keys() if elapsed > 0 else ()
    return {name: max(0, end.totals[name] - begin.totals[name]) / elapsed for name in sorted(common)}


def _written() -> int | None:
    found = psutil.disk_io_counters()
    return None if found is None else int(found.write_bytes)


def _network(field: str) -> int | None:
    found = psutil.net_io_counters(pernic=True)
    return sum(int(getattr(nic, field)) for name, nic in found.items() if name != _LOOPBACK) if found else None


def _or_none(read: Callable[[], int | None]) -> int | None:
    """None where the host does not offer the counter, as in some containers."""
    try:
        return read()
    except (OSError, RuntimeError, NotImplementedError, psutil.Error):
        return None
