"""A learner of two ranks when one of them fails and the other waits for it in a collective."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import ray

from gxpo_trainer.algo.batch import ScoredSequence, shard, with_scale
from gxpo_trainer.cluster.placement import Placement
from gxpo_trainer.learner import group
from gxpo_trainer.learner.group import LearnerGroup

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("ray_on_loopback")]


@pytest.fixture
def learners(small_run: Any) -> Iterator[LearnerGroup]:
    """Two ranks at ZeRO stage 3, without engines."""
    config = small_run(
        placement={"learner_ranks": 2, "learner_cpus": 0.1, "learner_threads": 1}, learner={"zero_stage": 3}
    )
    found = LearnerGroup(config, Placement.decide(config))
    found.start()
    try:
        yield found
    finally:
        found.kill()


def test_closing_ends_a_rank_that_waits_for_one_that_failed(
    learners: LearnerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "CLOSE_S", 1.0)
    processes = [psutil.Process(pid) for pid in ray.get([rank.pid.remote() for rank in learners.ranks])]
    ids = np.arange(1, 9, dtype=np.int32)
    batch = with_scale([ScoredSequence(ids[:1], ids[1:], 0.0, np.zeros(7, dtype=np.float32))] * 2, 8)
    waiting = learners.ranks[0].gap.remote(shard(batch, 2)[0])  # rank 1 does not take part
    learners.close()
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(waiting)
    assert not psutil.wait_procs(processes, timeout=60)[1]
