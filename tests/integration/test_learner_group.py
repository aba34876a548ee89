"""A learner whose rank fails or waits for another in a collective."""

from __future__ import annotations

import errno
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray

from gxpo_trainer.algo.batch import ScoredSequence, shard, with_scale
from gxpo_trainer.config import CheckpointConfig
from gxpo_trainer.learner import group
from gxpo_trainer.learner.group import LearnerGroup
from gxpo_trainer.runtime.placement import Placement
from gxpo_trainer.training.checkpoints import CheckpointStore

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def learners(ray_on_loopback: None, small_run: Any) -> Iterator[LearnerGroup]:
    """Two ranks at ZeRO stage 3 with adapters, without engines; the last test ends them."""
    config = small_run(
        placement={"learner_ranks": 2, "learner_cpus": 0.1, "learner_threads": 1},
        learner={"zero_stage": 3, "lora": {"rank": 2}},
    )
    made = LearnerGroup(config, Placement.decide(config))
    made.start()
    try:
        yield made
    finally:
        made.kill()


def limit_files(num_bytes: int) -> Callable[[Any], None]:
    """For an actor: files may have this many bytes; writing more fails as on a full disk."""

    def limit(actor: Any) -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))

    return limit


@pytest.mark.long("a full disk")
def test_a_rank_that_cannot_write_does_not_stop_the_others(learners: LearnerGroup, tmp_path: Path) -> None:
    """Rank 1 fails at its shard, rank 0 later at the policy; each time both ranks return, and can save again."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    store = CheckpointStore(tmp_path, CheckpointConfig())
    whole = store.save(1, {}, learners.save)
    shard, policy = ((whole / n).stat().st_size for n in ("learner/rank-0.safetensors", "policy/model.safetensors"))
    assert shard < policy
    for rank, limit in ((1, shard // 2), (0, policy - 1)):
        ray.get(learners.ranks[rank].__ray_call__.remote(limit_files(limit)))
        with pytest.raises(OSError, match="File too large") as caught:
            store.save(2, {}, learners.save)
        assert caught.value.cause.errno == errno.EFBIG
        assert store.steps() == [1]
        ray.get(learners.ranks[rank].__ray_call__.remote(limit_files(resource.RLIM_INFINITY)))
    store.save(2, {}, learners.save)
    assert store.steps() == [1, 2]


def test_closing_ends_a_rank_that_waits_for_another(learners: LearnerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "CLOSE_S", 1.0)
    processes = [psutil.Process(process.pid) for process in learners.processes]
    ids = np.arange(1, 9, dtype=np.int32)
    batch = with_scale([ScoredSequence(ids[:1], ids[1:], 0.0, np.zeros(7, dtype=np.float32))] * 2, 8)
    waiting = learners.ranks[0].gap.remote(shard(batch, 2)[0])  # rank 1 does not take part
    learners.close()
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(waiting)
    assert not psutil.wait_procs(processes, timeout=60)[1]
