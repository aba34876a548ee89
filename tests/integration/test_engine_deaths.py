"""kill -9 of engines while weights travel, while engines score, and while learner and engines share their GPUs.

One pool of two engines and a learner of two ranks. CPUs take the place of GPUs: vLLM ignores sleep and wake there, and
the broadcast group is Gloo's instead of NCCL's.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import ray
from support.rollouts import requests

from gxpo_trainer.algo.batch import make_batch, mini_batches
from gxpo_trainer.learner.group import LearnerGroup
from gxpo_trainer.learner.models import STARTER_FOLDER
from gxpo_trainer.rollout.pool import Collected, RolloutPool, build_pool
from gxpo_trainer.rollout.verification import VerifierHandle
from gxpo_trainer.rollout.vllm_driver import SampleRequest, SamplingSettings
from gxpo_trainer.runtime.placement import Placement
from gxpo_trainer.runtime.shared_devices import Devices, SharedDevices

pytestmark = [
    pytest.mark.engine,
    pytest.mark.usefixtures("ray_on_loopback"),
    pytest.mark.long("further moments of a death"),
]

SAMPLING = SamplingSettings(max_new_tokens=40)
PLACEMENT = {
    "learner_ranks": 2,
    "samplers": 2,
    "learner_cpus": 0.1,
    "sampler_cpus": 0.3,
    "verifier_cpus": 0.1,
    "learner_threads": 1,
    "sampler_threads": 1,
}


@dataclass
class Fleet:
    """Engines and learner of a run, without its controller."""

    pool: RolloutPool
    learners: LearnerGroup
    requests: list[SampleRequest]
    events: list[str]
    version: int = -1

    def share(self, devices: Devices) -> None:
        """From now on, as if the fleet had been built with these devices."""
        self.pool.devices = self.learners.devices = devices
        devices.learner_starts()

    def sync(self) -> None:
        self.version += 1
        self.pool.sync(self.version)

    def collect(self) -> Collected:
        return self.pool.collect(self.requests, SAMPLING, self.version)

    def train(self, collected: Collected) -> None:
        """One step; its gap shows whether the engines held the learner's weights."""
        batch, _ = make_batch(collected.groups, self.learners.config.learner.loss, SAMPLING.max_new_tokens)
        result = self.learners.train_step(mini_batches(batch, 1), 1e-4, diagnose=False)
        assert result.gap_mean <= 1e-6

    def kill(self, *indices: int) -> None:
        for index in indices:
            os.kill(self.pool.engines.all[index].process.pid, signal.SIGKILL)


@pytest.fixture
def fleet(ray_on_loopback: None, small_run: Any) -> Iterator[Fleet]:
    """Of one test alone: one that shares devices leaves its learner parked, without memory for any other call."""
    config = small_run(placement=PLACEMENT)
    placement = Placement.decide(config)
    events: list[str] = []
    learners = LearnerGroup(config, placement)
    log_event = lambda kind, message, **_: events.append(message)  # noqa: E731
    pool = build_pool(config, placement, str(STARTER_FOLDER), log_event, source=learners)
    pool.start()
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        learners.start()
        pool.engines.await_ready(every=True)
        yield Fleet(pool, learners, requests(config, 12), events)
    finally:
        learners.close()
        pool.kill()


def kill_while_sampling(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Kill engine 1 at the first group of the next collection; the list is then no longer empty."""
    submit, dead = VerifierHandle.submit, []

    def kill_one(self: Any, submitted: Any) -> Any:
        if not dead:
            fleet.pool.engines.await_ready(every=True)
            dead.append(fleet.kill(1))
        return submit(self, submitted)

    monkeypatch.setattr(VerifierHandle, "submit", kill_one)
    return dead


def test_engines_that_die_in_any_phase_of_shared_gpus_come_back(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = fleet.pool.engines
    fleet.share(SharedDevices(engines, fleet.learners, adapters=False))
    fleet.sync()
    fleet.train(fleet.collect())
    # One of two, while the learner trains: the other samples, and the lost one joins the next collection.
    fleet.kill(1)
    fleet.sync()
    fleet.collect()
    engines.await_ready(every=True)
    assert [engine.version for engine in engines.all] == [1, None]
    last = fleet.collect()
    assert [engine.version for engine in engines.all] == [1, 1]
    # All of them, while the learner trains.
    fleet.train(last)
    fleet.kill(0, 1)
    fleet.sync()
    fleet.train(fleet.collect())
    # All of them, in the middle of a sync.
    inner, killed = fleet.learners.next_bucket, []

    def next_bucket(*arguments: Any) -> Any:
        if not killed:
            killed.append(fleet.kill(0, 1))
        return inner(*arguments)

    monkeypatch.setattr(fleet.learners, "next_bucket", next_bucket)
    fleet.sync()
    # One of two, while they sample; it is not still starting when the learner takes the GPUs.
    dead = kill_while_sampling(fleet, monkeypatch)
    fleet.train(fleet.collect())
    assert dead
    assert all(engine.ready for engine in engines.all)
    fleet.sync()
    fleet.collect()
    assert len(fleet.events) == 6


def test_scores_come_from_the_engines_that_are_left(fleet: Fleet) -> None:
    fleet.sync()
    fleet.collect()
    prompts = [request.prompt_token_ids for request in fleet.requests]
    whole = fleet.pool.score(prompts, fleet.version)
    assert len(whole) == 2
    fleet.kill(1)
    (left,) = fleet.pool.score(prompts, fleet.version)
    assert all(np.array_equal(one, other) for one, other in zip(left, whole[0], strict=True))
    fleet.kill(0)
    again = fleet.pool.score(prompts, fleet.version)
    assert np.abs(np.concatenate(again[0]) - np.concatenate(left)).max() <= 1e-5


def shorten_timeout(actor: Any) -> None:
    import gxpo_trainer.weights.transports as broadcast

    broadcast.TIMEOUT_S = 15.0


def test_a_broadcast_that_lost_a_member_is_sent_to_the_others(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the group forms, and in the middle of a broadcast. A learner that starts again opens a new group."""
    monkeypatch.setattr(fleet.learners, "transport", "nccl")
    monkeypatch.setattr(Placement, "transport", lambda placement, *, one_node: "nccl")

    def lose_a_member(moment: str) -> None:
        inner, killed = getattr(fleet.learners, moment), []

        def kill_one(argument: Any) -> Any:
            opened = inner(argument) if moment == "open_broadcast" else None
            if not killed:
                killed.append(fleet.kill(1))
            return opened or inner(argument)

        with monkeypatch.context() as patch:
            patch.setattr(fleet.learners, moment, kill_one)
            fleet.sync()
        assert killed

    for moment in ("open_broadcast", "send"):
        actors = (*fleet.learners.ranks, *(engine.actor for engine in fleet.pool.engines.all))
        ray.get([actor.__ray_call__.remote(shorten_timeout) for actor in actors])
        lose_a_member(moment)
        assert [engine.version for engine in fleet.pool.engines.all] == [fleet.version, None]
        # The restarted engine joins in a group of its own, then both are in one again.
        fleet.collect()
        fleet.pool.engines.await_ready(every=True)
        fleet.sync()
        fleet.train(fleet.collect())
    fleet.learners.restart()
    fleet.sync()
    fleet.train(fleet.collect())
