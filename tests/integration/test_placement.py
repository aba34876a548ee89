"""Reservations on real Rays: runs that wait for each other, an autoscaler, GPUs that learner and engines share.

Small actors take the place of engines and learner ranks, which would need minutes and real GPUs; one run is whole.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.ray_clusters import LOOPBACK, await_nodes, running_head

from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.io import to_toml
from gxpo_trainer.reporting.reading import read_metrics

HERE = Path(__file__).parent
SMALL = {"device": "cpu", "wait_s": 600, "learner_cpus": 1.0, "sampler_cpus": 0.75, "verifier_cpus": 0.25}


@contextmanager
def waiting_run(address: str) -> Iterator[subprocess.Popen[str]]:
    """A process of waiting_worker.py, which prints what it waits for."""
    command = [
        sys.executable,
        str(HERE / "waiting_worker.py"),
        json.dumps({"placement": SMALL | {"ray_address": address}}),
    ]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=os.environ | LOOPBACK | {"CUDA_VISIBLE_DEVICES": ""}, **pipes) as run:
        try:
            yield run
        finally:
            run.kill()


def test_a_run_waits_for_one_that_holds_the_resources_and_then_runs() -> None:
    with running_head(2) as address, waiting_run(address) as first:
        assert "ready\n" in first.stdout  # type: ignore[operator]
        with waiting_run(address) as second:
            assert second.stdout.readline() == "waiting for 2 CPUs\n"  # type: ignore[union-attr]
            print(file=first.stdin, flush=True)
            assert "ready\n" in second.stdout  # type: ignore[operator]


@pytest.mark.engine
@pytest.mark.long("autoscaling")
def test_a_run_brings_its_worker_and_lets_it_go(tmp_path: Path, small_run: Callable[..., RunConfig]) -> None:
    config = tmp_path / "run.toml"
    out = tmp_path / "run"
    with running_head(0, autoscaling={"worker": {"CPU": 2}}) as address:
        placement = {"ray_address": address, "wait_s": 600.0}
        config.write_text(to_toml(small_run(budget={"steps": 2}, placement=placement)), encoding="utf-8")
        command = [sys.executable, "-m", "gxpo_trainer.cli", "train", str(config), "--out", str(out)]
        done = subprocess.run(command, env=os.environ | LOOPBACK, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        assert "waiting for 2 CPUs" in done.stdout + done.stderr, "the cluster had none when the run began"
        rows = [row for row in read_metrics(out) if "update/backward_passes" in row["metrics"]]
        assert [row["step"] for row in rows] == [1, 2]
        await_nodes(address, 1)


@pytest.mark.long("two nodes with GPUs")
def test_each_learner_rank_shares_one_gpu_of_its_engine_also_after_a_restart_and_a_lost_node() -> None:
    command = [sys.executable, str(HERE / "placement_worker.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    placed = json.loads(done.stdout.splitlines()[-1])
    assert placed["colocated"]
    first, second = (sorted(engine.split(",")) for engine in placed["engines"])
    assert {*first, *second} == {"0", "1", "4", "5"}
    assert placed["ranks"] == [*first, *second]
    assert placed["restarted"] == [placed["ranks"][3]], "the engine holds it meanwhile"
    assert sorted(placed["moved_engine"].split(",")) == ["6", "7"]
    assert placed["moved_rank"] == "6"
