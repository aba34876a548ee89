"""Runs on real Ray clusters: runs that wait for each other, an autoscaler, GPUs that learner and engines share, and two
nodes, between whose object stores the weights travel.

Where GPUs are placed, small actors take the place of engines and learner ranks; the other runs are whole.
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
import ray
import torch
from support.ray_clusters import LOOPBACK, await_nodes, running_head
from support.rollouts import trained_rows

from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.io import to_toml
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.reporting.reading import read_events, read_metrics
from gxpo_trainer.runtime.placement import Placement
from gxpo_trainer.runtime.ray_session import reserve
from gxpo_trainer.weights.buckets import BucketPacker, WeightBucket, tensors_of
from gxpo_trainer.weights.transports import ObjectStorePublisher, fetch

pytestmark = pytest.mark.engine
HERE = Path(__file__).parent
SMALL = {"device": "cpu", "wait_s": 600, "learner_cpus": 1.0, "sampler_cpus": 0.75, "verifier_cpus": 0.25}


@contextmanager
def waiting_run(address: str) -> Iterator[subprocess.Popen[str]]:
    """A process of waiting_worker.py, which prints what it waits for."""
    placement = json.dumps({"placement": SMALL | {"ray_address": address}})
    command = [sys.executable, str(HERE / "waiting_worker.py"), placement]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=os.environ | LOOPBACK | {"CUDA_VISIBLE_DEVICES": ""}, **pipes) as run:
        try:
            yield run
        finally:
            run.kill()


@pytest.mark.long("a cluster of its own and two processes")
def test_a_run_waits_for_one_that_holds_the_resources_and_then_runs() -> None:
    with running_head(2) as address, waiting_run(address) as first:
        assert "ready\n" in first.stdout  # type: ignore[operator]
        with waiting_run(address) as second:
            assert second.stdout.readline() == "waiting for 2 CPUs\n"  # type: ignore[union-attr]
            print(file=first.stdin, flush=True)
            assert "ready\n" in second.stdout  # type: ignore[operator]


@pytest.mark.long("autoscaling")
def test_a_run_brings_its_worker_and_lets_it_go(tmp_path: Path, small_run: Callable[..., RunConfig]) -> None:
    config, out = tmp_path / "run.toml", tmp_path / "run"
    with running_head(0, autoscaling={"worker": {"CPU": 2}}) as address:
        placement = {"ray_address": address, "wait_s": 600.0}
        config.write_text(to_toml(small_run(budget={"steps": 2}, placement=placement)), encoding="utf-8")
        command = [sys.executable, "-m", "gxpo_trainer.cli", "train", str(config), "--out", str(out)]
        done = subprocess.run(command, env=os.environ | LOOPBACK, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        assert "waiting for 2 CPUs" in done.stdout + done.stderr, "the cluster had none when the run began"
        rows = trained_rows(out)
        assert [row["step"] for row in rows] == [1, 2]
        await_nodes(address, 1)


@pytest.mark.long("a Ray of its own")
def test_a_start_waits_for_no_idle_workers() -> None:
    """On a busy machine Ray kills workers that start slowly; a driver that waits for them never connects."""
    code = (
        "from gxpo_trainer.config import RunConfig\n"
        "from gxpo_trainer.runtime.placement import Placement\n"
        "from gxpo_trainer.runtime.ray_session import connect_ray\n"
        "connect_ray(Placement.decide(RunConfig()))\n"
        "print('connected')\n"
    )
    # Shorter than any worker's start.
    env = {**os.environ, "RAY_worker_register_timeout_seconds": "0"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout.endswith("connected\n"), done.stderr[-3000:]


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


@pytest.fixture(scope="module")
def on_two_nodes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run on two nodes, and what was printed."""
    out = tmp_path_factory.mktemp("nodes") / "run"
    command = [sys.executable, str(HERE / "two_nodes.py"), str(out)]
    env = {**os.environ, "RAY_worker_niceness": "0"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return out, done.stdout


@pytest.mark.long("two nodes")
def test_a_run_whose_learner_and_sampler_are_on_different_nodes(on_two_nodes: tuple[Path, str]) -> None:
    out, _ = on_two_nodes
    (places,) = [event for event in read_events(out) if event["kind"] == "several_nodes"]
    assert not {*places["sampler_nodes"]} & {*places["learner_nodes"]}
    gaps = [row["metrics"]["rollout/logprob_gap_mean"] for row in read_metrics(out)]
    # Every step's gap: the sampler holds what the learner has published, to the precision of fp32.
    assert len(gaps) == 2
    assert max(gaps) < 1e-5


def test_what_is_fetched_is_what_was_published(ray_on_loopback: None) -> None:
    publisher = ObjectStorePublisher()

    def publish(version: int, fill: float) -> WeightBucket:
        named = [("a", torch.arange(5.0)), ("b", torch.full((2, 3), fill))]
        return publisher.publish(BucketPacker(iter(named)), version, 0)

    first = publish(1, 7.0)
    whole = fetch(first)
    tensors = {entry.name: tensor for entry, tensor in tensors_of(first, whole)}
    assert torch.equal(tensors["a"], torch.arange(5.0))
    assert torch.equal(tensors["b"], torch.full((2, 3), 7.0))
    publish(2, 8.0)
    # What was fetched before stays what it was.
    assert torch.equal(tensors["b"], torch.full((2, 3), 7.0))


@pytest.mark.long("two nodes")
def test_weights_are_gone_for_other_nodes_with_the_learner_that_published_them(on_two_nodes: tuple[Path, str]) -> None:
    _, printed = on_two_nodes
    assert printed.splitlines()[-1].startswith("weights version 1 was lost with its learner")


def test_a_split_that_one_node_cannot_give_is_refused(ray_on_loopback: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gxpo_trainer.runtime.ray_session.MIN_WAIT_S", 1.0)
    config = RunConfig.model_validate({"placement": {"strategy": "split", "device": "cpu", "wait_s": 0}})
    placement = Placement.decide(config)
    waited: list[str] = []
    another_run = ray.util.placement_group([{"CPU": ray.cluster_resources()["CPU"]}])
    try:
        with pytest.raises(ConfigError, match=r"on separate nodes.*placement.strategy") as caught:
            reserve(placement, owned=False, on_wait=waited.append)
    finally:
        ray.util.remove_placement_group(another_run)
    assert set(waited) == {"a second node"}, "what another run holds of the only node would not be enough"
    assert caught.value.reason == "no_resources"
    assert placement.group.handle is None
