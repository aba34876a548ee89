"""The parts of the loop, for measurements that need one learner and real samples but no run: pool, prompts, sync."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from gxpo_trainer.algo.batch import StepBatch, make_batch
from gxpo_trainer.config import RunConfig
from gxpo_trainer.data.prompts import TokenizedPrompts, load_prompts, tokenize_prompts
from gxpo_trainer.learner.deepspeed_learner import DeepSpeedLearner
from gxpo_trainer.learner.models import STARTER_FOLDER, load_tokenizer
from gxpo_trainer.learner.rank import LearnerRank
from gxpo_trainer.rollout.pool import RolloutPool, build_pool
from gxpo_trainer.rollout.sources import OnPolicyRollouts, RolloutPlanner
from gxpo_trainer.runtime.placement import Placement
from gxpo_trainer.runtime.ray_session import ray_session
from gxpo_trainer.weights.buckets import WeightBucket

PROMPT_TOKENS = 96


@dataclass
class SmallLoop:
    """One sampler in its actor, and a learner in this process for as long as `learner()` lasts."""

    config: RunConfig
    pool: RolloutPool
    source: InProcessSource
    prompts: TokenizedPrompts
    _version: int = field(default=0)

    @contextmanager
    def learner(self) -> Iterator[tuple[DeepSpeedLearner, Batches]]:
        """A fresh learner at the start policy, and what samples step batches by its present weights."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        learner = DeepSpeedLearner(self.config, master_port=port)
        publisher = LearnerRank(self.config, 0, 1)
        publisher.learner = learner
        planner = RolloutPlanner(self.config, self.prompts)
        self.source.publisher = publisher
        try:
            yield learner, Batches(self, OnPolicyRollouts(self.pool, planner))
        finally:
            learner.close()
            publisher.close()

    def next_version(self) -> int:
        self._version += 1
        return self._version


@dataclass
class InProcessSource:
    """The present learner in this process as the pool's source of weights."""

    publisher: LearnerRank | None = None
    sender: None = None

    def next_bucket(self, version: int, index: int, nodes: Sequence[str]) -> tuple[WeightBucket, float | None]:
        assert self.publisher is not None
        bucket, changed = self.publisher.next_bucket(version, index, "shared_memory")
        assert bucket is not None
        return bucket, changed

    def send(self, bucket: WeightBucket) -> Any:
        return None

    def open_broadcast(self, num_workers: int) -> None:
        return None


@dataclass(frozen=True)
class Batches:
    """Step batches sampled by a learner's present weights."""

    loop: SmallLoop
    rollouts: OnPolicyRollouts

    def next(self) -> StepBatch:
        version = self.loop.next_version()
        self.loop.pool.sync(version)
        groups = self.rollouts.batch(version + 1).groups
        config = self.loop.config
        batch, _ = make_batch(groups, config.learner.loss, config.rollout.max_new_tokens)
        return batch


@contextmanager
def small_loop(config: RunConfig) -> Iterator[SmallLoop]:
    """Ray and a sampler of the starter policy on the embedded task; both end with the block."""
    prompts = tokenize_prompts(
        load_prompts(config.data, 0).prompts, load_tokenizer(config.model), "{problem}", PROMPT_TOKENS
    )
    source = InProcessSource()
    with ray_session(Placement.decide(config)) as placement:
        pool = build_pool(config, placement, str(STARTER_FOLDER), lambda *_, **__: None, source=source)
        try:
            pool.start()
            yield SmallLoop(config, pool, source, prompts)
        finally:
            pool.kill()
