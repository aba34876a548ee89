"""Learner and sampler on two Ray nodes: each node has an object store of its own, between which the weights travel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gxpo_trainer.config import RunConfig
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.reporting.reading import read_events, read_metrics
from gxpo_trainer.runtime.placement import Placement
from gxpo_trainer.runtime.ray_session import reserve
from gxpo_trainer.weights.buckets import BucketPacker, WeightBucket, tensors_of
from gxpo_trainer.weights.transports import ObjectStorePublisher, fetch

pytestmark = pytest.mark.engine
HERE = Path(__file__).parent


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
    waited = []
    with pytest.raises(ConfigError, match=r"on separate nodes.*placement.strategy") as caught:
        reserve(placement, owned=False, on_wait=waited.append)
    assert waited[0] == "a second node"
    assert caught.value.reason == "no_resources"
    assert placement.group.handle is None
