"""Batches of the training loop: each step's prompts and seeds, sampled by the weights that the learner is about to
move, or ahead of the learner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from gxpo_trainer.algo.batch import StepBatch, supervised_batch, zero_variance
from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.base import Phase
from gxpo_trainer.data.prompts import TokenizedPrompts, make_cursor
from gxpo_trainer.errors import TrainingError
from gxpo_trainer.rollout.engines import Engine, seed_of
from gxpo_trainer.rollout.pool import Collected, Collection, RolloutPool
from gxpo_trainer.rollout.vllm_driver import EpisodeStart, SampleRequest, SamplingSettings
from gxpo_trainer.types import Group, HttpUsage, Prompt, ScoredGroup
from gxpo_trainer.weights.buckets import SyncReport

REPEATED = -1
"""Round of prompts that are sampled again because their groups were too old."""


@dataclass(frozen=True, slots=True)
class Rollouts:
    """One step's scored groups. num_tokens: that the policy wrote, in resampled groups too.

    idle_fraction: share of the time in which an engine ran no step, mean over engines; where the engines sample ahead
    of the learner, of the time since the batch before. engines_alive: engines that were ready at the end. http: cost of
    reward components over HTTP, of resampled groups too; None in a run without them. replaced: groups of equal rewards
    that others have taken the place of. sampling_s: None where the engines sample several batches at the same time.
    """

    groups: list[ScoredGroup]
    num_tokens: int
    rollout_s: float
    verify_s: float
    num_resampled: int
    sampling_s: float | None
    idle_fraction: float = 0.0
    engines_alive: int = 1
    num_dropped: int = 0
    http: HttpUsage | None = None
    replaced: Sequence[ScoredGroup] = ()

    @property
    def sampled(self) -> list[ScoredGroup]:
        """All groups of the step. Failures are counted in all: a group that failed may have been replaced for it."""
        return [*self.replaced, *self.groups]


class RolloutPlanner:
    """Draws prompts with a resumable cursor, whose position is its only state."""

    def __init__(self, config: RunConfig, prompts: TokenizedPrompts) -> None:
        self.config = config
        self.prompts, self.token_ids = prompts.prompts, prompts.token_ids
        rollout = config.rollout
        self.sampling = SamplingSettings(rollout.max_new_tokens, rollout.temperature, rollout.ignore_eos)
        self.restart()

    def restart(self) -> None:
        """Return to the first prompt of the first epoch."""
        self.cursor = make_cursor(self.config.data, self.prompts, self.config.seed)

    def draw(self, count: int) -> list[int]:
        indices: list[int] = self.cursor.next(count).tolist()
        return indices

    def complete(
        self, first: Collected, step: int, collect: Callable[[Sequence[SampleRequest]], Collected]
    ) -> Rollouts:
        """The step's rollouts from the groups of its first round.

        With `zero_variance = "resample"`, groups with equal rewards are replaced by groups of other prompts, for at
        most `resample_limit` rounds (dynamic sampling, DAPO, arXiv 2503.14476), which `collect` samples.
        """
        num_groups = self.config.rollout.prompts_per_step
        kept: list[ScoredGroup] = []
        flat: list[ScoredGroup] = []
        parts: list[Collected] = []
        resample = self.config.learner.loss.zero_variance == "resample"
        limit = self.config.learner.loss.resample_limit if resample else 0
        part = first
        while True:
            parts.append(part)
            for group in part.groups:
                is_flat = resample and zero_variance([verdict.reward for verdict in group.verdicts])
                (flat if is_flat else kept).append(group)
            if len(kept) >= num_groups or len(parts) > limit:
                break
            part = collect(self.requests(self.draw(num_groups - len(kept)), step, len(parts)))
        # Filled up with zero-variance groups, which have no gradient, so that the batch keeps its size; spread evenly,
        # so that every mini-batch has its share of the others.
        missing = max(0, num_groups - len(kept))
        places = [((i + 0.5) / len(part), group) for part in (kept, flat[:missing]) for i, group in enumerate(part)]
        groups = [group for _, group in sorted(places, key=lambda place: place[0])]
        sampled = [group for part in parts for group in part.groups]
        rollout_s = sum(part.rollout_s for part in parts)
        elapsed_s = sum(part.elapsed_s for part in parts)
        busy_s = sum(part.busy_s for part in parts)
        return Rollouts(
            groups,
            sum(sample.num_sampled for scored in sampled for sample in scored.group.samples),
            rollout_s,
            sum(part.verify_s for part in parts),
            num_resampled=len(parts) - 1,
            sampling_s=rollout_s,
            idle_fraction=max(0.0, 1.0 - busy_s / elapsed_s) if elapsed_s else 0.0,
            engines_alive=parts[-1].engines_alive,
            http=http_usage(sampled),
            replaced=flat[missing:],
        )

    def requests(
        self, indices: Sequence[int], step: int, round_: int = 0, version: int | None = None
    ) -> list[SampleRequest]:
        """One request per prompt, seeded only in deterministic mode, which is slightly slower.

        version: of the weights that sample, None for the step's own, step − 1.
        """
        seeds = [request_seed(self.config.seed, step, round_, place, version) for place in range(len(indices))]
        return [self._request(self.prompts[i], self.token_ids[i], seed) for i, seed in zip(indices, seeds, strict=True)]

    def repeated(self, groups: Sequence[Group], step: int) -> list[SampleRequest]:
        """Requests for the prompts of these groups again."""
        seeds = [request_seed(self.config.seed, step, REPEATED, place) for place in range(len(groups))]
        return [self._request(g.prompt, g.prompt_token_ids, seed) for g, seed in zip(groups, seeds, strict=True)]

    def _request(self, prompt: Prompt, token_ids: npt.NDArray[np.int32], seed: int) -> SampleRequest:
        config = self.config
        episode = None
        if config.environment.multi_turn:
            episode = EpisodeStart.of(prompt, config.data.template_text, seed, config.data.max_prompt_tokens)
        chosen = seed if config.rollout.deterministic else None
        return SampleRequest(prompt, token_ids, config.rollout.samples_per_prompt, chosen, episode=episode)


def http_usage(groups: Sequence[ScoredGroup], before: HttpUsage | None = None) -> HttpUsage | None:
    """Cost of the groups' reward components over HTTP, added to `before`; None without such components."""
    usage = [verdict.http for group in groups for verdict in group.verdicts if verdict.http is not None]
    return sum(usage, before or HttpUsage()) if usage else before


def request_seed(run_seed: int, step: int, round_: int, position: int, version: int | None = None) -> int:
    """A seed from its arguments alone. version: None stands for step − 1."""
    key = f"{run_seed}/{step}/{round_}/{position}"
    if version is not None and version != step - 1:
        key += f"/{version}"
    return seed_of(key)


class OnPolicyRollouts:
    """Where the training loop takes its batches from; this source samples a batch when its step begins.

    Order of step t in every source: `batch(t)`, then `sync` if `sync_due`; `serve` while the learner updates;
    `sync(t)`, which returns None where it is put off. `serve` waits for one of the learner's calls, and raises Stalled
    when the learner does not return within the time-out of the phase, whatever the engines do. `collect` samples, by
    the learner's weights, what belongs to no step. `discard` drops what was sampled for coming steps: the learner has
    lost the weights that sampled it. `finish` drops it because no step follows; what remains is `collect`.
    """

    sync_due = False

    def __init__(self, pool: RolloutPool, planner: RolloutPlanner) -> None:
        self._pool, self._planner = pool, planner
        self.sync, self.collect, self.serve = pool.sync, pool.collect, pool.group.wait_for_one
        self.restart = planner.restart

    def batch(self, step: int) -> Rollouts:
        collect = partial(self._pool.collect, sampling=self._planner.sampling, version=step - 1)
        prompts = self._planner.draw(self._planner.config.rollout.prompts_per_step)
        return self._planner.complete(collect(self._planner.requests(prompts, step)), step, collect)

    def state_dict(self) -> dict[str, Any]:
        return dict(self._planner.cursor.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._planner.cursor.load_state_dict(state)

    def discard(self) -> None:
        pass

    def finish(self) -> None:
        pass


class DatasetSource:
    """Completions of a data set: of a whole run, or of the warm start before the steps of another source.

    Engines take no part until an evaluation, or the other source. rows: with `completion_ids`. size: rows of a step.
    """

    def __init__(
        self,
        config: RunConfig,
        pool: RolloutPool,
        rows: TokenizedPrompts,
        size: int,
        after: OnPolicyRollouts | AsyncRollouts | None = None,
    ) -> None:
        self._config, self._pool, self._rows, self._size, self._after = config, pool, rows, size, after
        self._version = 0
        self._synced: int | None = None
        """Version that the engines got for an evaluation; None where the learner may have others of this number."""
        self.restart()

    @property
    def _other(self) -> OnPolicyRollouts | AsyncRollouts | None:
        """The other source, once it has taken over."""
        return self._after if self._version >= self._config.warm_steps else None

    @property
    def sync_due(self) -> bool:
        return self._other is not None and self._other.sync_due

    def batch(self, step: int) -> Rollouts | StepBatch:
        if self._other is not None:
            return self._other.batch(step)
        chosen = self._cursor.next(self._size)
        prompts, completions = ([ids[i] for i in chosen] for ids in (self._rows.token_ids, self._rows.completion_ids))
        return supervised_batch(prompts, completions, self._config.rollout.max_new_tokens)

    def sync(self, version: int) -> SyncReport | None:
        self._version = version
        if self._other is None:
            return None
        self._synced = None
        return self._other.sync(version)

    def serve(self, calls: Sequence[Any], phase: Phase) -> list[Any]:
        return self._pool.group.wait_for_one(calls, phase) if self._other is None else self._other.serve(calls, phase)

    def collect(self, requests: Sequence[SampleRequest], sampling: SamplingSettings, version: int) -> Collected:
        if self._other is not None:
            return self._other.collect(requests, sampling, version)
        if self._synced != version:
            self._pool.sync(version)
            self._synced = version
        return self._pool.collect(requests, sampling, version)

    def state_dict(self) -> dict[str, Any]:
        state = self._cursor.state_dict()
        return state if self._after is None else {**self._after.state_dict(), "rows": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._cursor.load_state_dict(state if self._after is None else state["rows"])
        if self._after is not None:
            self._after.load_state_dict(state)

    def restart(self) -> None:
        warm_start = self._config.warm_start
        data = (warm_start.data if warm_start else None) or self._config.data
        self._cursor = make_cursor(data, self._rows.prompts, self._config.seed)
        if self._after is not None:
            self._after.restart()

    def discard(self) -> None:
        self._synced = None
        if self._after is not None:
            self._after.discard()

    def finish(self) -> None:
        if self._other is not None:
            self._other.finish()


@dataclass(frozen=True, slots=True)
class _Planned:
    """Requests of a coming step: prompts and their indices in the collection."""

    prompts: list[int]
    requests: list[int]


class AsyncRollouts:
    """Samples the batches of coming steps while the learner updates.

    With depth d = `rollout.async_depth`, version v of the weights samples the batches of steps up to v + 1 + d. A batch
    always consists of the prompts that were drawn for it, however long they take.

    `serve` keeps the engines at work. They take new weights once all requests are finished, with `update_in_flight` at
    any time. In deterministic mode `sync` waits for that moment, so that the batch of step t is always sampled by
    version t − 1 − d, or by the version of the checkpoint before it where that is newer: a resumed run then samples
    what the uninterrupted one would have. An engine that starts again is synced while the learner is idle, and else
    with the next sync.
    """

    def __init__(self, config: RunConfig, pool: RolloutPool, planner: RolloutPlanner) -> None:
        self._config, self._pool, self._planner = config, pool, planner
        self._depth = config.rollout.async_depth
        self._deterministic, self._in_flight = config.rollout.deterministic, config.rollout.update_in_flight
        self._collection: Collection | None = None
        self._planned: dict[int, _Planned] = {}
        self._drawn: dict[int, list[int]] = {}
        """Prompts of steps whose batches were under way at the checkpoint."""
        self._next_step = 1
        self._learner_version = self._engine_version = 0
        self._syncing = self._finished = False

    def batch(self, step: int) -> Rollouts:
        collection, planned = self._open(), self._planned.pop(step)
        first = collection.await_groups(planned.requests)
        rollouts = self._planner.complete(first, step, self._collect_now)
        rollouts = self._replace_stale(rollouts, step)
        collection.note_activity()
        return replace(rollouts, sampling_s=None)

    @property
    def sync_due(self) -> bool:
        return self._engine_version < self._learner_version and (self._in_flight or self._open().resting)

    def sync(self, version: int) -> SyncReport | None:
        """Bring the engines to the learner's weights and plan the batches that they allow; None: put off."""
        self._learner_version = version
        if self._collection is not None and not self._in_flight:
            while self._deterministic and not self._collection.resting:
                self._collection.advance()
            if not self._collection.resting:
                return None
        return self._sync_now()

    def serve(self, calls: Sequence[Any], phase: Phase) -> list[Any]:
        group = self._pool.group
        if self._collection is None or self._syncing:
            return group.wait_for_one(calls, phase)
        group.watch.learning = True
        since = group.watch.running_s
        try:
            while not (ready := self._collection.advance(calls, phase)):
                group.watch.check_since(since, phase)
            return ready
        finally:
            group.watch.learning = False

    def collect(self, requests: Sequence[SampleRequest], sampling: SamplingSettings, version: int) -> Collected:
        self._open()
        if self._engine_version != version:
            while not (self._in_flight or self._open().resting):
                self._open().advance()
            self._sync_now()
        own = [replace(request, sampling=sampling) for request in requests]
        collected = self._collect_now(own)
        versions = {v for g in collected.groups for s in g.group.samples for v, _ in s.sampled_versions}
        if not versions <= {version}:
            raise TrainingError(f"versions {sorted(versions)} sampled what only version {version} should have sampled")
        return collected

    def state_dict(self) -> dict[str, Any]:
        """The cursor, and the prompts of the batches under way, which a resumed run samples again."""
        drawn = self._drawn | {step: planned.prompts for step, planned in self._planned.items()}
        planned = {str(step): prompts for step, prompts in drawn.items()}
        return {**self._planner.cursor.state_dict(), "planned": planned}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._planner.cursor.load_state_dict(state)
        self._drawn = {int(step): list(prompts) for step, prompts in state.get("planned", {}).items()}

    def restart(self) -> None:
        self._planner.restart()
        self._drawn = {}

    def discard(self) -> None:
        if self._collection is not None:
            self._collection.abort()
        self._collection = None
        self._planned.clear()
        self._finished = False

    def finish(self) -> None:
        if self._planned:
            state = self.state_dict()
            self.discard()
            self.load_state_dict(state)  # a resumed run with a higher budget samples these prompts
            self._collection = self._new_collection()
        self._finished = True

    def _open(self) -> Collection:
        assert self._collection is not None, "sync comes first"
        return self._collection

    def _sync_now(self) -> SyncReport:
        self._syncing = True
        try:
            synced = self._pool.sync(self._learner_version)
        finally:
            self._syncing = False
        self._engine_version = self._learner_version
        if self._collection is None:
            self._collection = self._new_collection()
            self._next_step = self._learner_version + 1
        self._collection.open_streams()
        self._plan()
        return synced

    def _new_collection(self) -> Collection:
        return Collection(self._pool, self._planner.sampling, self._usable_engines)

    def _usable_engines(self) -> list[Engine]:
        """Engines that hold a version; while the learner is idle, those that have started again are synced first."""
        lost = [engine for engine in self._pool.engines.ready if engine.version is None]
        # In deterministic mode no engine may sample with the next version what waits for this one.
        same = not self._deterministic or self._engine_version == self._learner_version
        if lost and same and not self._pool.group.watch.learning and not self._syncing:
            self._syncing = True
            try:
                with self._pool.group.watch.excluded():
                    self._pool.sync_engines(lost, self._learner_version)
            finally:
                self._syncing = False
        return [engine for engine in self._pool.engines.ready if engine.version is not None]

    def _plan(self) -> None:
        """Request the batches that the engines' version may sample."""
        if self._finished:
            return
        last = self._engine_version + 1 + self._depth
        every = self._config.checkpoint.every_steps
        if self._deterministic and every:
            last = min(last, (self._engine_version // every + 1) * every)
        if self._config.last_step is not None:
            last = min(last, self._config.last_step)
        for step in range(self._next_step, last + 1):
            size = self._config.rollout.prompts_per_step
            prompts = self._drawn.pop(step, None) or self._planner.draw(size)
            requests = self._planner.requests(prompts, step, version=self._engine_version)
            self._planned[step] = _Planned(prompts, self._open().add(requests))
            self._next_step = step + 1

    def _collect_now(self, requests: Sequence[SampleRequest]) -> Collected:
        collection = self._open()
        return collection.await_groups(collection.add(requests, first=True))

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
            num_tokens=rollouts.num_tokens + sum(s.num_sampled for scored in again for s in scored.group.samples),
            num_dropped=len(stale),
            http=http_usage(again, rollouts.http),
        )


RolloutSource = OnPolicyRollouts | DatasetSource | AsyncRollouts
