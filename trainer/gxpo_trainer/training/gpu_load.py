"""Load of the GPUs of the controller's host, read from NVML, NVIDIA's management library."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from gxpo_trainer.types import Metrics

SAMPLE_EVERY_S = 1.0
"""NVML's utilization covers up to a second before it is read."""


class GpuLoad:
    """`system/gpu<n>/…` of a step: samples of a thread, which runs only where NVML finds a GPU."""

    def __init__(self) -> None:
        self._gpus = _find_gpus()
        self._lock = threading.Lock()
        if self._gpus:
            threading.Thread(target=self._run, name="gpu-load", daemon=True).start()

    def begin_step(self) -> None:
        with self._lock:
            for gpu in self._gpus:
                gpu.utilization.clear()
                gpu.memory.clear()
        self.sample()

    def sample(self) -> None:
        """Read all GPUs; one that cannot be read, such as a MIG device, has no sample."""
        for gpu in self._gpus:
            with self._lock, suppress(gpu.nvml.NVMLError):
                gpu.memory.append(int(gpu.nvml.nvmlDeviceGetMemoryInfo(gpu.handle).used))
                gpu.utilization.append(int(gpu.nvml.nvmlDeviceGetUtilizationRates(gpu.handle).gpu))

    def metrics(self) -> Metrics:
        """Mean utilization in percent and largest memory in use in bytes, of the samples since `begin_step`."""
        found: Metrics = {}
        with self._lock:
            for gpu in self._gpus:
                if gpu.utilization:
                    found[f"system/gpu{gpu.index}/utilization_percent"] = sum(gpu.utilization) / len(gpu.utilization)
                if gpu.memory:
                    found[f"system/gpu{gpu.index}/memory_bytes"] = float(max(gpu.memory))
        return found

    def _run(self) -> None:
        while True:
            time.sleep(SAMPLE_EVERY_S)
            self.sample()


@dataclass(slots=True)
class _Gpu:
    """A GPU and its samples. nvml: the module."""

    index: int
    nvml: Any
    handle: Any
    utilization: list[int] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)


def _find_gpus() -> list[_Gpu]:
    """Empty without nvidia-ml-py, which only machines with GPUs install, without a driver, or without a GPU."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        return [_Gpu(index, pynvml, pynvml.nvmlDeviceGetHandleByIndex(index)) for index in range(count)]
    except pynvml.NVMLError:
        return []
