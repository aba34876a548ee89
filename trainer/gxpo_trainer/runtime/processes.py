"""Memory, garbage collection and failed writes of one process, and the load of its host: processor, memory, disk,
network, and GPUs by NVML, NVIDIA's management library."""

from __future__ import annotations

import gc
import os
import re
import resource
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil

from gxpo_trainer.types import Metrics


def peak_resident_bytes() -> int:
    """Peak resident set size of this process, in bytes. Linux reports KiB (getrusage(2))."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextmanager
def frozen_allocations() -> Iterator[None]:
    """Exclude the objects allocated in this block from garbage collection, during the block and after it.

    Importing an engine allocates a million objects, and building one runs several collections at half a second each.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()


def settle_kernels() -> None:
    """Call each function of MKL's vector library once, in one thread, before several call it.

    MKL 2024 chooses a function's kernel at its first call; of two threads that make it together, one may get a kernel
    of 11 bits for its part (pytorch#188792). In rotary embeddings that is a gap of 2e-4 between learner and sampler.
    """
    import torch

    for dtype in (torch.float32, torch.float64):
        values = torch.full((16,), 0.5, dtype=dtype)
        for function in (torch.cos, torch.sin, torch.sqrt, torch.exp, torch.log, torch.tanh, torch.erf):
            function(values)


@contextmanager
def write_errors() -> Iterator[None]:
    """Raise OSError where safetensors or tokenizers cannot write a file: their errors have its number as text."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        match = re.search(r"\(os error (\d+)\)$", str(error))
        if match is None:
            raise
        number = int(match[1])
        raise OSError(number, os.strerror(number)) from error


SAMPLE_EVERY_S = 1.0
"""NVML's utilization covers up to a second before it is read."""


class GpuLoad:
    """`system/gpu<n>/…` of a step: samples of a thread, which runs only where NVML finds a GPU."""

    def __init__(self) -> None:
        self._nvml, self._handles = _find_gpus()
        self._samples: dict[str, list[int]] = defaultdict(list)
        self._lock = threading.Lock()
        if self._handles:
            threading.Thread(target=self._run, name="gpu-load", daemon=True).start()

    def begin_step(self) -> None:
        with self._lock:
            self._samples.clear()
        self.sample()

    def sample(self) -> None:
        """Read all GPUs; one that cannot be read, such as a MIG device, has no sample."""
        for index, handle in enumerate(self._handles):
            with self._lock, suppress(self._nvml.NVMLError):
                used, utilization = f"system/gpu{index}/memory_bytes", f"system/gpu{index}/utilization_percent"
                self._samples[used].append(int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used))
                self._samples[utilization].append(int(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu))

    def metrics(self) -> Metrics:
        """Mean utilization in percent and largest memory in use in bytes, of the samples since `begin_step`."""
        with self._lock:
            return {
                name: float(max(samples)) if name.endswith("memory_bytes") else fmean(samples)
                for name, samples in self._samples.items()
                if samples
            }

    def _run(self) -> None:
        while True:
            time.sleep(SAMPLE_EVERY_S)
            self.sample()


def _find_gpus() -> tuple[Any, list[Any]]:
    """NVML and its handles: none without nvidia-ml-py, which only machines with GPUs install, a driver or a GPU."""
    try:
        import pynvml
    except ImportError:
        return None, []
    try:
        pynvml.nvmlInit()
        return pynvml, [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return pynvml, []


class HostLoad:
    """`system/…` of a step. folder: on the disk whose free space is reported."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._begin, self._counters = time.monotonic(), read_counters()
        self._gpus = GpuLoad()

    def begin_step(self) -> None:
        """Rates and processor load are means from here on."""
        psutil.cpu_percent()
        self._begin, self._counters = time.monotonic(), read_counters()
        self._gpus.begin_step()

    def metrics(self) -> Metrics:
        """Load since `begin_step` in percent of all cores, memory in use and free disk in bytes, bytes per second."""
        used = float(psutil.virtual_memory().used)
        metrics = {"system/cpu_percent": psutil.cpu_percent(), "system/memory_bytes": used}
        metrics |= rates(self._counters, read_counters(), time.monotonic() - self._begin)
        with suppress(OSError):
            metrics["system/disk_free_bytes"] = float(psutil.disk_usage(str(self._folder)).free)
        return metrics | self._gpus.metrics()


def read_counters() -> dict[str, int]:
    """Bytes so far, by the name of their rate: written to the host's block devices, and sent and received on its
    networks without the loopback. A counter that the host does not offer, as in some containers, is missing."""
    counters = {}
    with suppress(OSError, RuntimeError, NotImplementedError, psutil.Error):
        if (disks := psutil.disk_io_counters()) is not None:
            counters["system/disk_written_bytes_per_s"] = int(disks.write_bytes)
    with suppress(OSError, RuntimeError, NotImplementedError, psutil.Error):
        if interfaces := psutil.net_io_counters(pernic=True):
            networks = [nic for name, nic in interfaces.items() if name != LOOPBACK]
            counters["system/network_sent_bytes_per_s"] = sum(int(nic.bytes_sent) for nic in networks)
            counters["system/network_received_bytes_per_s"] = sum(int(nic.bytes_recv) for nic in networks)
    return counters


def rates(begin: dict[str, int], end: dict[str, int], elapsed_s: float) -> Metrics:
    """Bytes per second of the counters that both have. One that fell because a device was removed counts as 0."""
    common = begin.keys() & end.keys() if elapsed_s > 0 else ()
    return {name: max(0, end[name] - begin[name]) / elapsed_s for name in sorted(common)}


LOOPBACK = "lo"


def interface_to(address: str) -> str | None:
    """The interface of this host by which another one, or itself, is reached at `address`; None if there is no way."""
    if address.startswith("127.") or address == "::1":
        return LOOPBACK
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing
        except OSError:
            return None
        own = probe.getsockname()[0]
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, addresses in interfaces if any(a.address == own for a in addresses)), None)


def listen_on(variable: str, interface: str | None) -> None:
    """Set the interface on which groups made from now on listen, unless the user has.

    Without it Gloo takes the address of the host's name, and NCCL the first interface that is not the loopback.
    """
    ours = f"GXPO_{variable}"  # which processes started by this one inherit
    if interface is not None and os.environ.get(variable) == os.environ.get(ours):
        os.environ[variable] = os.environ[ours] = interface
