"""Batches that are sampled ahead of the learner."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.timeouts import Phase
from gxpo_trainer.errors import TrainingError
from gxpo_trainer.rollout.collection import Collection
from gxpo_trainer.rollout.engines import Engine
from gxpo_trainer.rollout.planner import RolloutPlanner, Rollouts, http_usage, num_sampled
from gxpo_trainer.rollout.pool import Collected, RolloutPool
from gxpo_trainer.rollout.requests import SampleRequest, SamplingSettings
from gxpo_trainer.rollout.weight_sync import PoolSync


@dataclass(frozen=True, slots=True)
class _Planned:
    """Requests of a coming step: prompts and their indices in the collection."""

    prompts: list[int]
    requests: list[int]
    begun: float


class AsyncRollouts:
    """Samples the batches of coming steps while the learner updates.

    With depth d = `rollout.async_depth`, version v of the weights samples the batches of steps up to v + 1 + d, so that
    no batch is older than allowed. A batch always consists of the prompts that were drawn for it, however long they
    take.

    Order of step t: `batch(t)`, then `sync` if `sync_due`; the learner updates while `serve` keeps the engines at work;
    `sync(t)`. Engines take new weights once all requests are finished, with `update_in_flight` at any time. In
    deterministic mode `sync` waits for that moment, so that the batch of step t is always sampled by version t − 1 − d,
    or by the version of the checkpoint before it where that is newer: a resumed run then samples what the
    uninterrupted one would have.

    An engine that starts again is synced while the learner is idle, and else with the next sync.
    """

    def __init__(self, config: RunConfig, pool: RolloutPool, planner: RolloutPlanner) -> None:
        self._config, self._pool, self._planner = config, pool, planner
        self._depth = config.rollout.async_depth
        self._deterministic = config.rollout.deterministic
        self._collection: Collection | None = None
        self._planned: dict[int, _Planned] = {}
        self._drawn: dict[int, list[int]] = {}
        """Prompts of steps whose batches were under way at the checkpoint."""
        self._next_step = 1
        self._learner_version = self._engine_version = 0
        self._learner_busy = self._syncing = False

    # ---- a step ---------------------------------------------------------------------------------------------

    def batch(self, step: int) -> Rollouts:
        """The groups of this step, complete and scored."""
        collection, planned = self._open(), self._planned.pop(step)
        first = self._await(planned.requests)
        rollouts = self._planner.complete(first, step, self._collect_now)
        rollouts = self._replace_stale(rollouts, step)
        collection.note_activity()
        return replace(rollouts, sampling_s=time.perf_counter() - planned.begun - rollouts.verify_s)

    @property
    def sync_due(self) -> bool:
        """Whether a sync was put off that can be made now."""
        return self._engine_version < self._learner_version and (self._in_flight or self._open().resting)

    def sync(self, version: int) -> PoolSync | None:
        """Bring the engines to the learner's weights and plan the batches that they allow; None: put off."""
        self._learner_version = version
        if self._collection is not None and not self._in_flight:
            while self._deterministic and not self._collection.resting:
                self._collection.advance()
            if not self._collection.resting:
                return None
        return self._sync_now()

    def serve(self, calls: Sequence[Any], phase: Phase) -> list[Any]:
        """Wait for one of the learner's calls and keep the engines at work meanwhile; those that are ready.

        Raises Stalled when the learner does not answer within the time-out of `phase`, whatever the engines do.
        """
        group = self._pool.engines.placement.group
        if self._collection is None or self._syncing:
            return group.wait_for_one(calls, phase)
        self._learner_busy = True
        since = group.watch.working_s
        try:
            while not (ready := self._collection.advance(calls)):
                group.watch.check_since(since, phase)
            return ready
        finally:
            self._learner_busy = False

    def collect(
        self, requests: Sequence[SampleRequest], sampling: SamplingSettings, version: int, *, rewards: bool = True
    ) -> Collected:
        """Sample and score requests that belong to no step, by `version` alone, which must be the learner's."""
        self._open()
        if self._engine_version != version:
            while not (self._in_flight or self._open().resting):
                self._open().advance()
            self._sync_now()
        own = [replace(request, sampling=sampling) for request in requests]
        collected = self._await(self._open().add(own, rewards=rewards, first=True))
        versions = {v for g in collected.groups for s in g.group.samples for v, _ in s.versions}
        if not versions <= {version}:
            raise TrainingError(f"versions {sorted(versions)} sampled what only version {version} should have sampled")
        return collected

    # ---- checkpoints and recovery ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The cursor, and the prompts of the batches under way, which a resumed run samples again."""
        planned = {str(step): planned.prompts for step, planned in self._planned.items()}
        return {**self._planner.state_dict(), "planned": planned}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._planner.load_state_dict(state)
        self._drawn = {int(step): list(prompts) for step, prompts in state.get("planned", {}).items()}

    def restart(self) -> None:
        """Return to the first prompt."""
        self._planner.restart()
        self._drawn = {}

    def discard(self) -> None:
        """Drop all batches under way: the learner has lost the weights that sampled them."""
        if self._collection is not None:
            self._collection.abort()
        self._collection = None
        self._planned.clear()

    # ---- inside ---------------------------------------------------------------------------------------------

    @property
    def _in_flight(self) -> bool:
        return self._config.rollout.update_in_flight

    def _open(self) -> Collection:
        assert self._collection is not None, "sync comes first"
        return self._collection

    def _sync_now(self) -> PoolSync:
        self._syncing = True
        try:
            synced = self._pool.sync(self._learner_version)
        finally:
            self._syncing = False
        self._engine_version = self._learner_version
        if self._collection is None:
            self._collection = Collection(self._pool, self._planner.sampling, self._usable_engines)
            self._next_step = self._learner_version + 1
        self._collection.open_streams()
        self._plan()
        return synced

    def _usable_engines(self) -> list[Engine]:
        """Engines that hold a version; while the learner is idle, those that have started again are synced first."""
        lost = [engine for engine in self._pool.engines.ready if engine.version is None]
        if lost and not self._learner_busy and not self._syncing:
            self._syncing = True
            try:
                self._pool.sync_engines(lost, self._learner_version)
            finally:
                self._syncing = False
        return [engine for engine in self._pool.engines.ready if engine.version is not None]

    def _plan(self) -> None:
        """Request the batches that the engines' version may sample."""
        last = self._engine_version + 1 + self._depth
        every = self._config.checkpoint.every_steps
        if self._deterministic and every:
            last = min(last, (self._engine_version // every + 1) * every)
        if self._config.budget.steps is not None:
            last = min(last, self._config.budget.steps)
        for step in range(self._next_step, last + 1):
            size = self._config.rollout.prompts_per_step
            prompts = self._drawn.pop(step, None) or self._planner.cursor.next(size).tolist()
            requests = self._planner.requests(prompts, step, version=self._engine_version)
            self._planned[step] = _Planned(prompts, self._open().add(requests), time.perf_counter())
            self._next_step = step + 1

    def _collect_now(self, requests: Sequence[SampleRequest]) -> Collected:
        return self._await(self._open().add(requests, first=True))

    def _await(self, indices: Sequence[int]) -> Collected:
        begin = time.perf_counter()
        while not self._open().complete(indices):
            self._open().advance()
        sampled = time.perf_counter()
        groups = self._open().take(indices)
        self._pool.reset_restarts()
        alive = len(self._pool.engines.ready)
        return Collected(groups, sampled - begin, time.perf_counter() - sampled, 0.0, alive)

    def _replace_stale(self, rollouts: Rollouts, step: int) -> Rollouts:
        """Drop groups that are older than allowed and sample their prompts again with the present weights."""
        oldest = step - 1 - self._depth
        stale = [scored.group for scored in rollouts.groups if scored.group.weights_version < oldest]
        if not stale:
            return rollouts
        again = self._collect_now(self._planner.repeated(stale, step)).groups
        kept = [scored for scored in rollouts.groups if scored.group.weights_version >= oldest]
        return replace(
            rollouts,
            groups=kept + again,
            num_tokens=rollouts.num_tokens + num_sampled(again),
            num_dropped=len(stale),
            http=http_usage(again, rollouts.http),
        )
