"""Load of the host: rates over a step, and nothing where a counter cannot be read."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from gxpo_trainer.records.metric_table import undescribed
from gxpo_trainer.training.host_load import HostLoad, Reading, rates

RATES = (
    "system/disk_written_bytes_per_s",
    "system/network_received_bytes_per_s",
    "system/network_sent_bytes_per_s",
)


def test_a_step_reports_the_load_of_this_host(tmp_path: Path) -> None:
    load = HostLoad(tmp_path)
    load.begin_step()
    found = load.metrics()
    assert {"system/cpu_percent", "system/memory_bytes", "system/disk_free_bytes"} <= set(found)
    assert undescribed([*found, *RATES]) == set()
    assert all(value >= 0 for value in found.values())
    assert found["system/disk_free_bytes"] <= psutil.disk_usage(str(tmp_path)).total


def test_rates_are_of_the_time_between_two_readings() -> None:
    begin = Reading(10.0, dict.fromkeys(RATES, 1000))
    end = Reading(14.0, {RATES[0]: 1000, RATES[1]: 9000, RATES[2]: 500})
    assert rates(begin, end) == {RATES[0]: 0.0, RATES[1]: 2000.0, RATES[2]: 0.0}


def test_a_counter_that_one_reading_lacks_has_no_rate() -> None:
    assert rates(Reading(0.0, {RATES[1]: 5}), Reading(1.0, {RATES[0]: 5, RATES[1]: 6})) == {RATES[1]: 1.0}


@pytest.mark.parametrize("failure", [None, FileNotFoundError("/proc/diskstats"), NotImplementedError()])
def test_a_host_without_counters_reports_the_rest(
    failure: Exception | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*args: object, **named: object) -> None:
        if failure is not None:
            raise failure

    for name in ("disk_io_counters", "net_io_counters"):
        monkeypatch.setattr(psutil, name, read)
    assert set(HostLoad(tmp_path).metrics()) == {
        "system/cpu_percent",
        "system/memory_bytes",
        "system/disk_free_bytes",
    }
    assert "system/disk_free_bytes" not in HostLoad(tmp_path / "removed").metrics()
