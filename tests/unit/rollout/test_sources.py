"""What a step requests, and which version samples the batch of which step.

The engines are a stand-in that finishes one request a wait.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gxpo_trainer.algo.batch import StepBatch, make_batch, mini_batches
from gxpo_trainer.config import RunConfig, TimeoutsConfig, WarmStartConfig
from gxpo_trainer.data.prompts import TokenizedPrompts
from gxpo_trainer.environments.contract import Problem
from gxpo_trainer.errors import Stalled, VerifierFailed
from gxpo_trainer.learner.rank import StepResult
from gxpo_trainer.rollout import sources
from gxpo_trainer.rollout.pool import Collected
from gxpo_trainer.rollout.sources import AsyncRollouts, DatasetSource, RolloutPlanner
from gxpo_trainer.runtime.placement_group import RunPlacementGroup
from gxpo_trainer.runtime.progress import ProgressWatch
from gxpo_trainer.training.controller import rollout_metrics
from gxpo_trainer.training.proofs import check_verdicts
from gxpo_trainer.types import EXTRA_KEY, Episode, Group, Prompt, Sample, ScoredGroup, Verdict, VerifyOptions

PROMPTS = 2


class StandInPool:
    """Engines that hold the version of the last sync."""

    def __init__(self) -> None:
        self.version = -1
        self.synced: list[int] = []
        self.engines, self.group = SimpleNamespace(ready=[]), RunPlacementGroup()

    def sync(self, version: int) -> str:
        self.version = version
        self.synced.append(version)
        return "synced"


class StandInCollection:
    """Requests are sampled in order, by the version that the pool holds when they are."""

    def __init__(self, pool: StandInPool, sampling: Any, engines: Any) -> None:
        self.pool = pool
        self.requests: list[Any] = []
        self.waiting: list[int] = []
        self.sampled_by: dict[int, int] = {}
        self.aborted = False

    def add(self, requests: Any, *, first: bool = False) -> list[int]:
        added = list(range(len(self.requests), len(self.requests) + len(requests)))
        self.requests += requests
        self.waiting = [*added, *self.waiting] if first else [*self.waiting, *added]
        return added

    @property
    def resting(self) -> bool:
        return not self.waiting

    def advance(self, calls: Any = (), phase: str = "updating") -> list[Any]:
        self.phase = phase
        self.sampled_by[self.waiting.pop(0)] = self.pool.version
        return list(calls)

    def await_groups(self, indices: list[int]) -> Collected:
        while not {*indices} <= {*self.sampled_by}:
            self.advance()
        groups = [self.group(self.requests[index], self.sampled_by[index]) for index in indices]
        return Collected(groups, 0.0, 0.0, 4.0, 3.0, 1)

    @staticmethod
    def group(request: Any, version: int) -> ScoredGroup:
        sample = Sample("", np.zeros(3, np.int32), np.zeros(3, np.float32), "stop", ((version, 3),))
        group = Group(request.prompt, request.prompt_token_ids, (sample, sample), version)
        return ScoredGroup(group, (Verdict("correct", "1", 0.0), Verdict("wrong", "2", 0.0)))

    def open_streams(self) -> None: ...
    def note_activity(self) -> None: ...
    def abort(self) -> None:
        self.aborted = True


def config(**rollout: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "rollout": {"prompts_per_step": PROMPTS, "samples_per_prompt": 2, "async_depth": 1, **rollout},
            "checkpoint": {"every_steps": 4},
            "budget": {"steps": 9},
        }
    )


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "Collection", StandInCollection)


def make(settings: RunConfig) -> tuple[AsyncRollouts, StandInPool]:
    prompts = tuple(Prompt(f"p{i}", "", "1") for i in range(100))
    pool = StandInPool()
    planner = RolloutPlanner(settings, TokenizedPrompts(prompts, tuple(np.array([i], np.int32) for i in range(100)), 0))
    return AsyncRollouts(settings, pool, planner), pool  # type: ignore[arg-type]


def train(rollouts: AsyncRollouts, first: int, last: int, *, served: int) -> list[list[int]]:
    """Versions that sampled the groups of each step. served: requests that finish while the learner updates."""
    versions = []
    if first == 1:
        rollouts.sync(0)
    for step in range(first, last + 1):
        groups = rollouts.batch(step).groups
        versions.append([scored.group.weights_version for scored in groups])
        if rollouts.sync_due:
            rollouts.sync(step - 1)
        for _ in range(served):
            if not rollouts._open().resting:
                rollouts.serve(["update"], "updating")
        rollouts.sync(step)
    return versions


@pytest.mark.parametrize("served", [0, 1, 9])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("in_flight", [False, True])
def test_no_batch_is_older_than_allowed_and_every_prompt_is_sampled_once(
    served: int, depth: int, in_flight: bool
) -> None:
    rollouts, _ = make(config(async_depth=depth, update_in_flight=in_flight))
    versions = train(rollouts, 1, 9, served=served)
    assert all(step - depth <= version <= step for step, row in enumerate(versions) for version in row)
    names = [request.prompt.id for request in rollouts._open().requests]  # type: ignore[attr-defined]
    assert len({*names}) == len(names) == 9 * PROMPTS


def test_in_flight_engines_take_every_version_at_once() -> None:
    rollouts, pool = make(config(update_in_flight=True))
    versions = train(rollouts, 1, 4, served=1)
    assert pool.synced == [0, 1, 2, 3, 4]
    # One request finishes during each update, so that half of a batch is stale.
    assert versions == [[0, 0], [0, 1], [1, 2], [2, 3]]


@pytest.mark.parametrize("served", [0, 1, 9])
def test_deterministic_versions_do_not_depend_on_the_clock_and_begin_anew_at_checkpoints(served: int) -> None:
    rollouts, _ = make(config(async_depth=2, deterministic=True))
    versions = train(rollouts, 1, 9, served=served)
    assert versions == [[v, v] for v in (0, 0, 0, 1, 4, 4, 4, 5, 8)]


def test_deterministic_batches_of_a_version_are_not_sampled_by_an_engine_that_starts_again_with_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rollouts, pool = make(config(async_depth=2, deterministic=True))
    rollouts.sync(0)
    rollouts.batch(1)
    pool.engines.ready = [SimpleNamespace(version=0), SimpleNamespace(version=None)]
    pool.sync_engines = lambda lost, version: [setattr(engine, "version", version) for engine in lost]  # type: ignore[attr-defined]
    collection, usable = rollouts._open(), list[list[int | None]]()
    advance = collection.advance

    def advanced() -> list[Any]:
        usable.append([engine.version for engine in rollouts._usable_engines()])
        return advance()

    monkeypatch.setattr(collection, "advance", advanced)
    rollouts.sync(1)
    assert usable == [[0]] * 4, "the two requests of step 2 and of step 3"
    assert [engine.version for engine in rollouts._usable_engines()] == [0, 1], "stand-ins do not follow a sync"


def test_a_resumed_run_samples_the_prompts_that_were_under_way() -> None:
    settings = config(async_depth=2)
    rollouts, _ = make(settings)
    train(rollouts, 1, 3, served=1)
    resumed, _ = make(settings)
    resumed.load_state_dict(rollouts.state_dict())
    resumed.sync(3)
    drawn = []
    for source in (rollouts, resumed):
        steps = [source.batch(4), source.batch(5)]
        source.sync(5)
        drawn.append([[scored.group.prompt.id for scored in batch.groups] for batch in (*steps, source.batch(6))])
    assert drawn[0] == drawn[1]


def test_a_run_that_ends_drops_what_is_under_way_and_a_resumed_one_samples_it() -> None:
    settings = config(async_depth=2, deterministic=True)
    rollouts, _ = make(settings)
    train(rollouts, 1, 3, served=1)
    state, dropped = rollouts.state_dict(), rollouts._open()
    assert [*state["planned"]] == ["4"]
    rollouts.finish()
    assert dropped.aborted  # type: ignore[attr-defined]
    assert rollouts.state_dict() == state
    request = rollouts._planner.requests([50], -1)
    rollouts.collect(request, rollouts._planner.sampling, 3)
    assert rollouts._open().requests == [replace(request[0], sampling=rollouts._planner.sampling)]  # type: ignore[attr-defined]
    assert rollouts.state_dict() == state
    rollouts.discard()  # the learner died in the evaluation, and the checkpoint is older
    rollouts.load_state_dict(state)
    rollouts.sync(3)
    assert len(rollouts.batch(4).groups) == PROMPTS


def test_the_learners_phase_is_that_of_its_wait_and_batches_that_overlap_have_no_rate() -> None:
    rollouts, _ = make(config())
    rollouts.sync(0)
    rollouts.serve(["save"], "checkpointing")
    assert rollouts._open().phase == "checkpointing"  # type: ignore[attr-defined]
    result = StepResult({}, 1, 0, 0.0, 0.0, True, None, 1.0, 0.0, 0)
    assert "rollout/tokens_per_s" not in rollout_metrics(rollouts.batch(1), result, version=0, total=0)


def test_recovery_drops_what_lost_weights_have_sampled() -> None:
    rollouts, _ = make(config())
    train(rollouts, 1, 2, served=9)
    state, dropped = rollouts.state_dict(), rollouts._open()
    train(rollouts, 3, 3, served=9)
    rollouts.discard()
    assert dropped.aborted  # type: ignore[attr-defined]
    rollouts.load_state_dict(state)
    rollouts.sync(2)
    assert train(rollouts, 3, 4, served=0) == [[2, 2], [2, 2]]


def test_groups_that_are_too_old_are_dropped_counted_and_sampled_again() -> None:
    rollouts, pool = make(config())
    train(rollouts, 1, 4, served=9)
    collection: Any = rollouts._open()
    while collection.waiting:
        collection.advance()
    collection.sampled_by[rollouts._planned[5].requests[0]] = 2  # the oldest allowed is 3
    batch = rollouts.batch(5)
    assert [scored.group.weights_version for scored in batch.groups] == [3, pool.version]
    assert batch.num_dropped == 1
    assert batch.num_tokens == 3 * 2 * 3, "the tokens that were dropped count"


def test_an_evaluation_is_sampled_by_one_version_before_what_waits() -> None:
    rollouts, pool = make(config(async_depth=2))
    train(rollouts, 1, 1, served=0)
    request = rollouts._planner.requests([50, 51], -1)
    scored = rollouts.collect(request, rollouts._planner.sampling, 1)
    assert [g.group.weights_version for g in scored.groups] == [1, 1]
    assert pool.version == 1


def test_a_learner_that_stalls_is_noticed_although_the_engines_make_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts, pool = make(config())
    rollouts.sync(0)
    now = [0.0]
    pool.group.watch = watch = ProgressWatch(TimeoutsConfig(updating_s=60.0), lambda: now[0])

    def sampled(calls: Any, phase: str) -> list[Any]:
        now[0] += 25.0
        watch.progressed()
        return []

    monkeypatch.setattr(rollouts._open(), "advance", sampled)
    with pytest.raises(Stalled, match=r"no progress for 75 s while updating \(timeouts.updating_s = 60\)"):
        rollouts.serve(["update"], "updating")
    # The stalled time is not training time.
    assert watch.working_s == 0.0


def test_failed_groups_that_are_replaced_count_among_the_failures() -> None:
    """Every other group fails: of 4, 2, 1 and 1 groups, all four that have a signal are the batch."""
    loss = {"zero_variance": "resample"}
    body = {"learner": {"loss": loss}, "rollout": {"prompts_per_step": 4}, "verifier": {"max_failed_fraction": 0.4}}
    settings = RunConfig.model_validate(body)
    ids = np.zeros(3, np.int32)
    planner = RolloutPlanner(settings, TokenizedPrompts((Prompt("p", "", "1"),) * 8, (ids,) * 8, 0))
    failed = iter([True, False] * 4)

    def collect(requests: Any) -> Collected:
        groups = []
        for request, fails in zip(requests, failed, strict=False):
            episode = Episode((), "error" if fails else "done")
            sample = Sample("", ids, np.zeros(3, np.float32), "stop", ((0, 3),), episode=episode)
            verdicts = (Verdict("error", None, 0.0),) * 2
            if not fails:
                verdicts = (Verdict("correct", "1", 0.0), Verdict("wrong", "2", 0.0))
            groups.append(ScoredGroup(Group(request.prompt, ids, (sample,) * 2, 0), verdicts))
        return Collected(groups, 0.0, 0.0, 4.0, 3.0, 1)

    rollouts = planner.complete(collect(planner.requests([0, 1, 2, 3], 1)), 1, collect)
    assert len(rollouts.groups) == 4
    result = StepResult({}, 1, 0, 0.0, 0.0, True, None, 1.0, 0.0, 0)
    metrics = rollout_metrics(rollouts, result, version=0, total=0)
    names = ("verify/error_fraction", "env/error_fraction", "reward/correctness")
    assert [metrics[name] for name in names] == [0.5, 0.5, 0.5]
    with pytest.raises(VerifierFailed, match=r"8 of 16 responses have no reward \(50%; "):
        check_verdicts(settings, rollouts.sampled)


IDS = np.array([1, 2], dtype=np.int32)


def planner(**parts: Any) -> RolloutPlanner:
    data = {"template": "Q: {problem}", "max_prompt_tokens": 77}
    options = {EXTRA_KEY: VerifyOptions(0.5)}
    prompts = tuple(Prompt(str(n), f"{n}+1?", str(n + 1), {"level": n, **options}) for n in range(4))
    tokenized = TokenizedPrompts(prompts, (IDS,) * 4, 0)
    return RolloutPlanner(RunConfig.model_validate({"data": data, **parts}), tokenized)


CALCULATOR = {"environment": {"name": "calculator"}}


def test_every_mini_batch_gets_its_share_of_the_groups_with_a_signal() -> None:
    """Four of 28 groups have one; twelve without fill the batch, and no mini-batch consists of them alone."""
    loss = {"zero_variance": "resample", "resample_limit": 1}
    made = planner(rollout={"prompts_per_step": 16}, learner={"loss": loss, "mini_batches": 4})
    signal = iter([True] * 4 + [False] * 24)

    def collect(requests: Any) -> Collected:
        groups = [StandInCollection.group(request, 0) for request in requests]
        flat = (Verdict("wrong", "2", 0.0),) * 2
        groups = [scored if next(signal) else replace(scored, verdicts=flat) for scored in groups]
        return Collected(groups, 0.0, 0.0, 4.0, 3.0, 1)

    rollouts = made.complete(collect(made.requests([0, 1, 2, 3] * 4, 1)), 1, collect)
    batch, _ = make_batch(rollouts.groups, made.config.learner.loss, 48)
    # Two responses of three tokens a group.
    assert [part.scale.num_tokens for part in mini_batches(batch, 4)] == [6, 6, 6, 6]
    assert [scored.group.prompt.id for scored in rollouts.groups[1::4]] == ["0", "1", "2", "3"], "in their order"


def test_an_episode_begins_with_the_problem_in_the_runs_template() -> None:
    (request,) = planner(**CALCULATOR).requests([2], step=1)
    assert request.episode.problem == Problem("2", "Q: 2+1?", "3", {"level": 2})
    assert request.episode.max_prompt_tokens == 77
    assert request.seed is None, "unseeded sampling; the episode has a seed all the same"


def test_episodes_have_seeds_by_run_step_and_position() -> None:
    def seeds(step: int, **parts: Any) -> list[int]:
        requests = planner(**CALCULATOR, **parts).requests([0, 1], step=step)
        return [request.episode.seed for request in requests if request.episode is not None]

    drawn = [*seeds(1), *seeds(2), *seeds(1, seed=1)]
    assert len({*drawn}) == 6
    assert seeds(1) == drawn[:2]
    seeded = planner(**CALCULATOR, rollout={"deterministic": True}).requests([0], step=1)
    assert seeded[0].seed == seeded[0].episode.seed == drawn[0]  # type: ignore[union-attr]


ROWS = TokenizedPrompts(
    tuple(Prompt(f"r{i}", "", "") for i in range(5)),
    tuple(np.array([10 + i], np.int32) for i in range(5)),
    0,
    tuple(np.array([20 + i, 2], np.int32) for i in range(5)),
)


def warm_started(steps: int) -> tuple[DatasetSource, StandInPool]:
    settings = config().model_copy(update={"warm_start": WarmStartConfig(steps=steps, rows_per_step=2)})
    after, pool = make(settings)
    return DatasetSource(settings, pool, ROWS, 2, after=after), pool  # type: ignore[arg-type]


def rows_of(batch: Any) -> list[int]:
    """Numbers of the rows of a supervised batch, whose completions follow their own prompts."""
    assert isinstance(batch, StepBatch)
    assert batch.supervised
    for sequence in batch.sequences:
        assert sequence.response_ids.tolist() == [sequence.prompt_ids[0] + 10, 2]
    return [int(sequence.prompt_ids[0]) - 10 for sequence in batch.sequences]


def test_the_sampled_source_begins_with_the_weights_of_the_last_supervised_step() -> None:
    source, pool = warm_started(3)
    source.sync(0)
    drawn = []
    for step in (1, 2, 3):
        drawn += rows_of(source.batch(step))
        assert not source.sync_due
        source.sync(step)
    assert sorted(drawn[:5]) == [0, 1, 2, 3, 4], "every row once an epoch"
    assert pool.synced == [3], "engines take no part in supervised steps"
    rollouts = source.batch(4)
    assert not isinstance(rollouts, StepBatch)
    assert [scored.group.weights_version for scored in rollouts.groups] == [3] * PROMPTS


@pytest.mark.parametrize("done", [1, 2, 3])
def test_a_resumed_warm_start_draws_the_rows_and_prompts_of_an_uninterrupted_one(done: int) -> None:
    def drawn(source: DatasetSource, first: int, last: int) -> list[list[Any]]:
        source.sync(first - 1)
        steps = []
        for step in range(first, last + 1):
            batch = source.batch(step)
            steps.append(rows_of(batch) if isinstance(batch, StepBatch) else [g.group.prompt.id for g in batch.groups])
            source.sync(step)
        return steps

    (whole, _), (begun, _), (resumed, _) = (warm_started(2) for _ in range(3))
    expected = drawn(whole, 1, 4)
    assert drawn(begun, 1, done) == expected[:done]
    resumed.load_state_dict(begun.state_dict())
    assert drawn(resumed, done + 1, 4) == expected[done:]


def test_the_engines_of_a_supervised_run_are_synced_for_an_evaluation() -> None:
    settings = config(async_depth=0, source="dataset")
    pool = StandInPool()
    pool.collect = lambda requests, sampling, version: version  # type: ignore[attr-defined]
    source = DatasetSource(settings, pool, ROWS, 2)  # type: ignore[arg-type]
    for step in (1, 2):
        rows_of(source.batch(step))
        assert source.sync(step) is None
    for _ in ("one benchmark", "another"):
        assert source.collect([], None, 2) == 2  # type: ignore[arg-type,comparison-overlap]
    assert pool.synced == [2]
    source.discard()  # the learner has started again, and reaches the step with weights of its own
    source.collect([], None, 2)  # type: ignore[arg-type]
    assert pool.synced == [2, 2]
