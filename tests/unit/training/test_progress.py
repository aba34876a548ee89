"""Progress: a line for each step, and never in the way."""

from __future__ import annotations

import io
import itertools
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import psutil
import pytest

from docs_build.metrics import undescribed
from gxpo_trainer.config import BudgetConfig, RunConfig
from gxpo_trainer.reporting.reading import read_events, read_metrics
from gxpo_trainer.reporting.reporter import RunReporter
from gxpo_trainer.runtime import processes as gpu_load
from gxpo_trainer.runtime.processes import HostLoad, rates
from gxpo_trainer.runtime.progress import ProgressWatch
from gxpo_trainer.training.controller import Controller, component_means, source_metrics
from gxpo_trainer.training.progress import TrainingProgress, describe, share_done
from gxpo_trainer.types import Group, Prompt, ScoredGroup, Verdict

ROW = {
    "reward/mean": 0.3125,
    "gate/z": -0.414,
    "gate/active": 1.0,
    "update/backward_passes_total": 36.0,
    "time/elapsed_s": 50.0,
}


def test_each_step_is_one_line() -> None:
    stream = io.StringIO()
    progress = TrainingProgress(BudgetConfig(steps=40, backward_passes=120), name="demo", stream=stream)
    progress.update(12, ROW)
    progress.update(13, ROW | {"time/elapsed_s": 52.0, "update/backward_passes_total": 39.0})
    progress.message("checkpoint\nat step 13")
    # BP bound nearest: 36/120 → 39/120 in 2 s, so 81 passes take 54 s.
    assert stream.getvalue() == (
        "demo: step 12/40  reward 0.312  z -0.41  passes 36/120\n"
        "demo: step 13/40  reward 0.312  z -0.41  passes 39/120  left 54 s\n"
        "demo: checkpoint at step 13\n"
    )


def test_a_warm_start_has_a_count_of_its_own() -> None:
    stream = io.StringIO()
    progress = TrainingProgress(BudgetConfig(steps=5), name="demo", warm_steps=2, stream=stream)
    progress.update(1, {"warm_start/loss": 2.5, "time/elapsed_s": 10.0, "update/backward_passes_total": 0.0})
    progress.update(2, {"warm_start/loss": 1.5, "time/elapsed_s": 11.0, "update/backward_passes_total": 0.0})
    progress.update(3, ROW)
    progress.update(4, ROW | {"time/elapsed_s": 52.0})
    assert stream.getvalue() == (
        "demo: warm start step 1/2  loss 2.500\n"
        "demo: warm start step 2/2  loss 1.500  left 0.0 s\n"
        "demo: step 1/5  reward 0.312  z -0.41  passes 36\n"
        "demo: step 2/5  reward 0.312  z -0.41  passes 36  left 6.0 s\n"
    )
    progress.update(5, ROW | {"gate/active": 0.0, "gate/shutoff_step": 4.0})
    assert "step 3/5  reward 0.312  z -0.41  gate shut at 2  " in stream.getvalue()


def test_a_line_has_what_is_known_without_shares_of_0() -> None:
    row = {"gate/active": 0.0, "gate/shutoff_step": 9.0}
    assert describe(BudgetConfig(hours=2), 10, row, None) == "step 10  gate shut at 9"
    row = {"rollout/length_mean": 41.6, "rollout/truncated_fraction": 0.125, "verify/timeout_fraction": 0.001}
    assert describe(BudgetConfig(steps=9), 3, row, None) == "step 3/9  length 42  truncated 12%  failed verdicts <1%"
    row = dict.fromkeys(row, 0.0) | {"rollout/length_mean": 41.6}
    assert describe(BudgetConfig(steps=9), 3, row, None) == "step 3/9  length 42"


def test_the_bound_nearest_to_its_end_counts() -> None:
    budget = BudgetConfig(steps=100, backward_passes=40, hours=1, tokens=1000)
    row = {"update/backward_passes_total": 10.0, "time/training_s": 1800.0, "rollout/tokens_total": 100.0}
    assert share_done(budget, 10, row) == 0.5
    assert share_done(budget, 200, row) == 1.0


def test_the_pace_follows_the_last_steps() -> None:
    stream = io.StringIO()
    progress = TrainingProgress(BudgetConfig(steps=100), stream=stream)
    # 30 steps of 10 s, then 30 of 1 s: the window holds fast ones alone.
    elapsed = 0.0
    for step in range(1, 61):
        elapsed += 10.0 if step <= 30 else 1.0
        progress.update(step, {"time/elapsed_s": elapsed})
    assert stream.getvalue().splitlines()[-1].endswith("left 40 s")


def test_a_closed_or_full_stream_silences_progress_and_nothing_else() -> None:
    stream = io.StringIO()
    progress = TrainingProgress(BudgetConfig(steps=4), stream=stream)
    stream.close()
    progress.update(1, ROW)
    with open("/dev/full", "w", encoding="utf-8") as full:  # noqa: PTH123 (a device, not a path of ours)
        progress = TrainingProgress(BudgetConfig(steps=4), stream=full)
        progress.update(1, ROW)
        progress.update(2, ROW)
        with pytest.raises(OSError, match="No space"):
            full.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())


# Load of the host: rates over a step, and nothing where a counter cannot be read.


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
    begin, end = dict.fromkeys(RATES, 1000), {RATES[0]: 1000, RATES[1]: 9000, RATES[2]: 500}
    assert rates(begin, end, 4.0) == {RATES[0]: 0.0, RATES[1]: 2000.0, RATES[2]: 0.0}
    assert rates({RATES[1]: 7000}, end, 5.0) == {RATES[1]: 400.0}


def test_gpus_report_the_mean_utilization_and_the_largest_memory_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU, and a MIG device, whose utilization NVML does not tell."""
    memory = {0: iter([9, 2, 7, 3]), 1: itertools.repeat(2**30)}
    utilization: dict[int, Any] = {0: iter([50, 0, 100, 20]), 1: iter([])}
    nvml = Mock(NVMLError=StopIteration, nvmlDeviceGetCount=lambda: 2, nvmlDeviceGetHandleByIndex=int)
    nvml.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(used=next(memory[handle]))
    nvml.nvmlDeviceGetUtilizationRates = lambda handle: SimpleNamespace(gpu=next(utilization[handle]))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
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


# A run without signal warns once, with what to do.


NOTHING = {"reward/zero_variance_fraction": 0.97, "rollout/truncated_fraction": 0.8, "reward/correctness": 0.0}


def test_five_steps_without_signal_are_an_event_a_metric_and_a_line_once_until_there_is_signal(tmp_path: Path) -> None:
    stream = io.StringIO()
    runtime: Any = Mock(config=RunConfig(), watch=ProgressWatch())
    result: Any = SimpleNamespace(backward_passes=1.0, update_s=1.0, peak_bytes=0, fallback=None)
    shares = [0.97] * 7 + [0.9] + [1.0] * 5
    with RunReporter(tmp_path) as reporter:
        progress = TrainingProgress(BudgetConfig(steps=20), stream=stream)
        controller = Controller(runtime, Mock(), reporter, Mock(), progress)
        for step, share in enumerate(shares, start=1):
            controller.host.begin_step()
            metrics = NOTHING | {"reward/zero_variance_fraction": share}
            controller._report(step, metrics, result, 1.0)
    assert [(event["kind"], event["step"]) for event in read_events(tmp_path)] == [("no_signal", 5), ("no_signal", 13)]
    flagged = [row["step"] for row in read_metrics(tmp_path) if "reward/no_signal" in row["metrics"]]
    assert flagged == [5, 6, 7, 13]
    assert stream.getvalue().count("train: step 5: no signal for 5 steps") == 1
    words = "97% of the groups, which have no gradient; 0% of the responses are correct and 80% truncated: choose"
    assert words in stream.getvalue()


@pytest.mark.parametrize(("zero_variance", "warns"), [("keep", False), ("drop", True)])
def test_equal_rewards_in_a_group_are_signal_where_other_groups_are_compared(
    zero_variance: str, warns: bool, tmp_path: Path
) -> None:
    learner = {"advantage": {"name": "shrinkage"}, "loss": {"zero_variance": zero_variance}}
    runtime: Any = Mock(config=RunConfig.model_validate({"learner": learner}), watch=ProgressWatch())
    result: Any = SimpleNamespace(backward_passes=1.0, update_s=1.0, peak_bytes=0, fallback=None)
    reporter: Any = Mock(out_dir=tmp_path)
    controller = Controller(runtime, Mock(), reporter, Mock(), Mock())
    for step in range(1, 6):
        controller.host.begin_step()
        controller._report(step, {**NOTHING}, result, 1.0)
    assert reporter.log_event.called == warns


def test_each_source_has_its_reward_and_components_count_where_they_judge() -> None:
    def scored(source: str, *values: dict[str, float] | None) -> ScoredGroup:
        verdicts = tuple(
            Verdict("wrong", None, 0.0, components=v, score=sum(v.values())) if v else Verdict("error", None, 0.0)
            for v in values
        )
        return ScoredGroup(Group(Prompt("p", "", "", source=source), np.zeros(1, np.int32), (), 0), verdicts)

    groups = [
        scored("a", {"correctness": 1.0}, {"correctness": 0.0}),
        scored("a", {"correctness": 1.0}, {"correctness": 1.0}),
        scored("b", {"format": 0.5}, None),
        scored("c", None, None),
    ]
    assert source_metrics(groups) == {
        "reward/source/a": 0.75,
        "reward/source/a/zero_variance_fraction": 0.5,
        "reward/source/b": 0.5,
        "reward/source/b/zero_variance_fraction": 1.0,
    }
    assert component_means(groups) == {"reward/format": 0.5}
    assert source_metrics([scored("", {"format": 1.0})]) == {}
