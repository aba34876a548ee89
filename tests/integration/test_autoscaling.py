"""A real run on a cluster without workers: Ray's autoscaler brings a node for it, and removes it afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.ray_clusters import LOOPBACK, await_nodes, running_head

from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.io import to_toml
from gxpo_trainer.reporting.reading import read_metrics

pytestmark = [pytest.mark.engine, pytest.mark.long("autoscaling")]


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
