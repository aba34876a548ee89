"""Load of the host: rates over a step, and nothing where a counter cannot be read."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from docs_build.metrics import undescribed
from gxpo_trainer.runtime import processes as gpu_load
from gxpo_trainer.runtime.processes import HostLoad, Reading, rates

RATES = ("system/disk_written_bytes_per_s", "system/network_received_bytes_per_s", "system/network_sent_bytes_per_s")


def test_a_step_reports_the_load_of_this_host(tmp_path: Path) -> None:
    load = HostLoad(tmp_path)
    load.begin_step()
    metrics = load.metrics()
    assert {"system/cpu_percent", "system/memory_bytes", "system/disk_free_bytes"} <= set(metrics)
    assert undescribed([*metrics, *RATES]) == set()
    assert all(value >= 0 for value in metrics.values())
    assert metrics["system/disk_free_bytes"] <= psutil.disk_usage(str(tmp_path)).total


def test_rates_are_of_the_time_between_two_readings_that_have_the_counter() -> None:
    begin = Reading(10.0, dict.fromkeys(RATES, 1000))
    end = Reading(14.0, {RATES[0]: 1000, RATES[1]: 9000, RATES[2]: 500})
    assert rates(begin, end) == {RATES[0]: 0.0, RATES[1]: 2000.0, RATES[2]: 0.0}
    assert rates(Reading(9.0, {RATES[1]: 7000}), end) == {RATES[1]: 400.0}


@pytest.mark.parametrize("failure", [None, FileNotFoundError("/proc/diskstats"), NotImplementedError()])
def test_a_host_without_counters_reports_the_rest(
    failure: Exception | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*args: object, **named: object) -> None:
        if failure is not None:
            raise failure

    for name in ("disk_io_counters", "net_io_counters"):
        monkeypatch.setattr(psutil, name, read)
    assert set(HostLoad(tmp_path).metrics()) == {"system/cpu_percent", "system/memory_bytes", "system/disk_free_bytes"}
    assert "system/disk_free_bytes" not in HostLoad(tmp_path / "removed").metrics()


class NVMLError(Exception):
    pass


class Nvml(SimpleNamespace):
    """A double of `pynvml`, for a machine without NVIDIA's driver: a GPU with given samples and a MIG device."""

    NVMLError = NVMLError

    def __init__(self, samples: list[tuple[int, int]]) -> None:
        super().__init__(
            nvmlInit=lambda: None,
            nvmlDeviceGetCount=lambda: 2,
            nvmlDeviceGetHandleByIndex=int,
            nvmlDeviceGetMemoryInfo=self._memory,
            nvmlDeviceGetUtilizationRates=self._rates,
        )
        self._samples = iter(samples)

    def _memory(self, handle: int) -> Any:
        self._utilization, used = next(self._samples) if handle == 0 else (0, 2**30)
        return SimpleNamespace(used=used)

    def _rates(self, handle: int) -> Any:
        if handle == 1:
            raise NVMLError("Not Supported")
        return SimpleNamespace(gpu=self._utilization)


def test_gpus_report_the_mean_utilization_and_the_largest_memory_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml([(50, 9), (0, 2), (100, 7), (20, 3)]))
    monkeypatch.setattr(gpu_load, "SAMPLE_EVERY_S", 3600.0)
    load = gpu_load.GpuLoad()
    load.begin_step()  # (50, 9), of which the next step has nothing
    load.begin_step()
    load.sample()
    load.sample()
    metrics = load.metrics()
    expected = {"system/gpu0/utilization_percent": 40.0, "system/gpu0/memory_bytes": 7.0}
    assert metrics == {**expected, "system/gpu1/memory_bytes": 2.0**30}
    assert undescribed(metrics) == set()


def test_gpus_are_sampled_during_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml([(0, 1)] * 2 + [(100, 1)] * 10_000))
    monkeypatch.setattr(gpu_load, "SAMPLE_EVERY_S", 0.01)
    load = gpu_load.GpuLoad()
    load.begin_step()
    while load.metrics()["system/gpu0/utilization_percent"] <= 50:
        time.sleep(0.01)


def test_without_a_driver_no_gpu_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise NVMLError("Driver Not Loaded")

    nvml = Nvml([])
    nvml.nvmlInit = fail
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert gpu_load.GpuLoad().metrics() == {}
