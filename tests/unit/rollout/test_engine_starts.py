"""Engines that start while others sample: whose time-out applies, and what counts as training time."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
import ray
from hypothesis import given, strategies as st

from gxpo_trainer.config import RunConfig, TimeoutsConfig
from gxpo_trainer.config.base import Phase
from gxpo_trainer.data.prompts import TokenizedPrompts
from gxpo_trainer.errors import Stalled
from gxpo_trainer.rollout.engines import Engine, Engines
from gxpo_trainer.rollout.pool import Collection, Dispatcher, RolloutPool
from gxpo_trainer.rollout.sampler import SamplerSettings, set_environment
from gxpo_trainer.rollout.sources import RolloutPlanner
from gxpo_trainer.rollout.timeline import Span, Timeline, overlap_fraction
from gxpo_trainer.rollout.vllm_driver import Intake, Sampled, SampleRequest, SamplingSettings, sample_seed
from gxpo_trainer.runtime.progress import ProgressWatch
from gxpo_trainer.runtime.shared_devices import SharedDevices
from gxpo_trainer.types import Group, Prompt

SETUP_S, SAMPLING_S = 300.0, 10.0


class Machine:
    """Engines of a run whose waits take the time that a test gives. restarted: with the reason, by index."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.now = 0.0
        timeouts = TimeoutsConfig(setup_s=SETUP_S, sampling_s=SAMPLING_S)
        self.watch = ProgressWatch(timeouts, lambda: self.now)
        self.answers: Iterator[tuple[float, list[Any]]] = iter(())
        group = SimpleNamespace(watch=self.watch, wait_for_one=self.wait_for_one)
        placement = cast(Any, SimpleNamespace(group=group, sampler_threads=1, device="cpu", colocated=False))
        self.events: list[str] = []
        self.engines = Engines(RunConfig(), placement, "model", lambda kind, message, **_: self.events.append(message))
        monkeypatch.setattr("gxpo_trainer.rollout.engines.ray.kill", lambda *_, **__: None)
        monkeypatch.setattr("gxpo_trainer.rollout.engines.end_stalled", lambda *_: None)
        monkeypatch.setattr(self.engines, "_new_actor", lambda *_: (Mock(), object(), self.watch.running_s))
        self.engines.all = [Engine(i, Mock(), None, 0.0, version=0) for i in range(count)]
        placement.group.back_off = lambda restarts: None
        verifier = SimpleNamespace(submit=lambda _: object(), await_verdicts=lambda _: dict.fromkeys(range(9), ()))
        parts = {"config": RunConfig(), "timeline": Timeline(), "stream_ids": iter([1]), "verifier": verifier}
        pool = SimpleNamespace(engines=self.engines, group=group, **parts)
        self.collection = Collection(cast(RolloutPool, pool), SamplingSettings(8), lambda: self.engines.ready)

    def wait_for_one(self, calls: Sequence[Any], phase: Phase) -> list[Any]:
        """As RunPlacementGroup.wait_for_one: `answers` has what comes next, and after how many seconds."""
        self.watch.begin(phase)
        seconds, ready = next(self.answers)
        self.now += min(seconds, self.watch.remaining_s)
        self.watch.check()
        self.watch.progressed()
        return ready

    def wait(self, seconds: float, ready: Sequence[Any] = ()) -> list[Any]:
        self.answers = iter([(seconds, list(ready))])
        starting = {engine.status: engine for engine in self.engines.all if engine.starting}
        return self.collection._wait_for_one((), starting)

    def lose(self, index: int) -> Engine:
        engine = self.engines.all[index]
        self.engines.restart(engine, RuntimeError("killed"))
        return engine

    def give_work(self, index: int) -> None:
        """The engine has a stream with an open request."""
        engine = self.engines.all[index]
        self.collection._dispatcher.add([8], [1])
        self.collection._dispatcher.add_engine(index)
        self.collection._dispatcher.assign()
        self.collection._streams[f"stream {index}"] = engine, engine.actor


def test_the_only_engine_has_setup_s_to_come_back_and_that_is_no_training_time(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 1)
    lost = machine.lose(0)
    begin = machine.watch.working_s
    assert machine.wait(20 * SAMPLING_S, [lost.status]) == [lost.status]
    assert machine.watch.working_s == begin
    assert lost.restarts == 1
    assert machine.wait(10 * SETUP_S) == []
    assert lost.restarts == 2
    assert "(timeouts.setup_s = 300)" in machine.events[-1]


def test_an_engine_that_stalls_does_not_restart_one_that_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 2)
    machine.give_work(0)
    lost = machine.lose(1)
    assert machine.wait(2 * SAMPLING_S) == []
    assert [engine.restarts for engine in machine.engines.all] == [1, 1]
    assert "sampler 0 stalled" in machine.events[-1]
    assert lost.starting


def test_progress_of_others_does_not_hide_a_start_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 2)
    machine.give_work(0)
    lost = machine.lose(1)
    for _ in range(int(SETUP_S / 5)):
        assert machine.wait(5.0, ["stream 0"]) == ["stream 0"]
        assert lost.restarts == 1
    assert machine.wait(5.0, [lost.status]) == [lost.status]
    assert lost.restarts == 1, "it has just become ready"
    machine.wait(0.0, ["stream 0"])
    assert lost.restarts == 2
    assert machine.engines.all[0].restarts == 0


@pytest.mark.parametrize(("phase", "other"), [("updating", "checkpointing"), ("checkpointing", "updating")])
def test_a_stall_of_the_learner_is_its_own_while_an_engine_starts(
    monkeypatch: pytest.MonkeyPatch, phase: Phase, other: Phase
) -> None:
    machine = Machine(monkeypatch, 1)
    lost = machine.lose(0)
    machine.watch.timeouts = TimeoutsConfig(setup_s=SETUP_S, **{f"{phase}_s": 50.0, f"{other}_s": 10.0})
    machine.answers = iter([(40.0, ["call"]), (60.0, [])])
    assert machine.collection.advance(["call"], phase) == ["call"]
    with pytest.raises(Stalled, match=rf"{phase}_s = 50"):
        machine.collection.advance(["call"], phase)
    assert lost.restarts == 1


def test_an_evaluation_has_its_own_time_out_next_to_batches_that_are_finished_or_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch, 1)
    training = SampleRequest(Prompt("a", "", ""), np.zeros(1, np.int32), 256)
    finished, _ = machine.collection.add([training, training])
    (evaluation,) = machine.collection.add([replace(training, rewards=False)], first=True)
    machine.give_work(0)
    dispatcher = machine.collection._dispatcher
    dispatcher.open[0], dispatcher.finished = {evaluation}, {finished}
    machine.wait(1.0, ["stream 0"])
    assert machine.watch.phase == "evaluating"
    dispatcher.open[0].add(1)
    machine.wait(1.0, ["stream 0"])
    assert machine.watch.phase == "sampling"


@pytest.mark.parametrize(("busy_s", "idle"), [(4.0, 0.6), (12.0, 0.0)])
def test_engines_that_sample_ahead_are_idle_for_a_share_of_the_time_since_the_batch_before(
    monkeypatch: pytest.MonkeyPatch, busy_s: float, idle: float
) -> None:
    """Two engines, a batch of one group every 10 s; engine 1 never gets a request."""
    monkeypatch.setattr("gxpo_trainer.rollout.pool.result_of", lambda item: item)
    monkeypatch.setattr("gxpo_trainer.rollout.pool.ray.wait", lambda calls, **_: (calls, []))
    machine = Machine(monkeypatch, 2)
    planner = RolloutPlanner(RunConfig(), TokenizedPrompts((Prompt("a", "", ""),), (np.zeros(1, np.int32),), 0))
    request = planner.requests([0], 1)[0]
    group = Group(request.prompt, request.prompt_token_ids, (), 0)
    items = iter([Sampled([(0, group)], 2 * busy_s), Sampled([(1, group)], 2 * busy_s)])
    machine.collection._streams = {items: (machine.engines.all[0], machine.engines.all[0].actor)}
    machine.collection._dispatcher.add_engine(0)
    for _ in range(2):
        indices = machine.collection.add([request])
        machine.now += 7.0  # the learner updates
        machine.answers = iter([(3.0, [items])])
        collected = machine.collection.await_groups(indices)
        assert (collected.rollout_s, collected.elapsed_s, collected.busy_s) == (3.0, 10.0, busy_s)
        assert planner.complete(collected, 1, pytest.fail).idle_fraction == pytest.approx(idle)


def test_groups_that_finish_together_are_scored_each_as_its_request_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gxpo_trainer.rollout.pool.result_of", lambda item: item)
    machine = Machine(monkeypatch, 1)
    collection, submit = machine.collection, Mock()
    collection._pool.verifier.submit = submit  # type: ignore[method-assign]
    training = SampleRequest(Prompt("a", "", ""), np.zeros(1, np.int32), 1)
    collection.add([training, replace(training, rewards=False)])
    machine.give_work(0)
    group = Group(training.prompt, training.prompt_token_ids, (), 0)
    items = iter([Sampled([(0, group), (1, group)], 1.0)])
    collection._streams = {items: (machine.engines.all[0], machine.engines.all[0].actor)}
    collection._receive(items)
    assert submit.call_args.args[0].rewards == [True, False]


@pytest.mark.parametrize(
    "lost", [ray.exceptions.ObjectLostError("00" * 28, None, ""), ray.exceptions.OutOfMemoryError("low on memory")]
)
def test_an_answer_lost_with_its_node_or_for_memory_restarts_the_engine_and_its_requests_wait(
    monkeypatch: pytest.MonkeyPatch, lost: Exception
) -> None:
    machine = Machine(monkeypatch, 1)
    machine.engines._environments = environments = Mock()
    engine, collection = machine.engines.all[0], machine.collection
    machine.give_work(0)
    item = iter(["lost"])
    collection._streams = {item: collection._streams.pop("stream 0")}
    monkeypatch.setattr("gxpo_trainer.rollout.pool.result_of", Mock(side_effect=lost))
    collection._receive(item)
    assert (engine.restarts, collection._streams, [*collection._dispatcher._waiting]) == (1, {}, [0])
    machine.engines.placement.group.get = Mock(side_effect=lost)  # type: ignore[method-assign]
    assert machine.engines.results([(engine, "scores")]) == []
    assert not machine.engines.settle(engine)
    assert engine.restarts == 3
    # Its episodes end with it; those of the next start have other names.
    assert [call.args for call in environments.end_all.call_args_list] == [("0.1/",), ("0.2/",), ("0.3/",)]


@pytest.mark.parametrize(("adapters", "expected"), [(False, [0, 1]), (True, [1])])
def test_engines_that_discarded_their_weights_are_synced_with_a_restarted_one(
    monkeypatch: pytest.MonkeyPatch, adapters: bool, expected: list[int]
) -> None:
    """Engines and learner alternate on their GPUs; with adapters sleeping engines keep the base weights."""
    machine = Machine(monkeypatch, 2)
    engines, synced = machine.engines, list[int]()
    engines.placement.group.get = Mock()  # type: ignore[method-assign]
    engines.all[1].version = None

    def sync(_: Any, version: int, stale: Sequence[Engine]) -> None:
        for engine in stale:
            synced.append(engine.index)
            engine.version = version

    monkeypatch.setattr(engines, "sync", sync)
    pool = RolloutPool(RunConfig(), engines, source=Mock(), devices=SharedDevices(engines, Mock(), adapters=adapters))
    assert pool.catch_up(0) == engines.all
    assert synced == expected


# Environment variables set before vLLM is imported.


@pytest.mark.parametrize(
    ("device", "rollout", "compiles", "invariant"),
    [
        ("cpu", {}, False, None),
        ("cpu", {"enforce_eager": False, "deterministic": True}, True, None),
        ("gpu", {}, True, None),
        ("gpu", {"deterministic": True}, True, "1"),
    ],
)
def test_eager_engines_do_not_compile_and_deterministic_ones_on_gpus_are_batch_invariant(
    monkeypatch: pytest.MonkeyPatch, device: Any, rollout: dict[str, Any], compiles: bool, invariant: str | None
) -> None:
    from vllm import envs

    names = {"TORCH_COMPILE_DISABLE", "VLLM_CPU_KVCACHE_SPACE", "VLLM_BATCH_INVARIANT"}
    monkeypatch.setattr(os, "environ", {name: value for name, value in os.environ.items() if name not in names})
    settings = SamplerSettings(RunConfig.model_validate({"rollout": rollout}), "model", device)
    set_environment(settings)
    assert ("TORCH_COMPILE_DISABLE" not in os.environ) == compiles
    assert ("VLLM_CPU_KVCACHE_SPACE" in os.environ) == (device == "cpu")
    assert os.environ.get("VLLM_BATCH_INVARIANT") == invariant
    assert "VLLM_BATCH_INVARIANT" in envs.environment_variables, "vLLM ignores variables that it does not know"
    os.environ["TORCH_COMPILE_DISABLE"] = "0"
    set_environment(settings)
    assert os.environ["TORCH_COMPILE_DISABLE"] == "0", "what the user has set is kept"


# Which engine gets which request, whatever dies in between.


def test_the_engine_with_the_fewest_unfinished_tokens_gets_the_next_request() -> None:
    dispatcher = Dispatcher(8)
    dispatcher.add([100, 10, 10, 50], [1, 1, 1, 1])
    dispatcher.add_engine(0)
    dispatcher.add_engine(1)
    # 100 to engine 0, then 10 + 10 + 50 to engine 1, which has less than 100 before each.
    assert dispatcher.assign() == {0: [0], 1: [1, 2, 3]}


def test_requests_of_a_lost_engine_and_urgent_ones_come_before_those_that_wait() -> None:
    dispatcher = Dispatcher(1)
    dispatcher.add([1] * 2, [1] * 2)
    dispatcher.add_engine(0)
    assert dispatcher.assign() == {0: [0]}
    assert dispatcher.add([1, 1], [1, 1]) == [2, 3]
    assert dispatcher.add([1, 1], [1, 1], first=True) == [4, 5]
    dispatcher.remove_engine(0)
    dispatcher.add_engine(1)
    order = []
    while not dispatcher.done:
        dispatcher.assign()
        order += dispatcher.open[1]
        dispatcher.finish(1, order[-1])
    assert order == [0, 4, 5, 1, 2, 3]
    with pytest.raises(KeyError):
        dispatcher.finish(1, 0)


@given(st.integers(0, 40), st.integers(1, 5), st.integers(1, 9), st.integers(0, 2**32))
def test_every_request_is_finished_once_whichever_engines_die(
    num_requests: int, num_engines: int, max_sequences: int, seed: int
) -> None:
    draw = random.Random(seed)
    sequences = [draw.randint(1, 4) for _ in range(num_requests)]
    dispatcher = Dispatcher(max_sequences)
    dispatcher.add([7 * n for n in sequences], sequences)
    for engine in range(num_engines):
        dispatcher.add_engine(engine)
    finished: list[int] = []
    while not dispatcher.done:
        assert all({*new} <= dispatcher.open[engine] for engine, new in dispatcher.assign().items())
        open_ = [(engine, index) for engine, indices in dispatcher.open.items() for index in sorted(indices)]
        assigned = [*finished, *(index for _, index in open_)]
        assert len({*assigned}) == len(assigned), "assigned to two engines, or again"
        action = draw.random()
        lost = {*range(num_engines)} - {*dispatcher.open}
        if action < 0.1 and dispatcher.open:
            dispatcher.remove_engine(draw.choice(sorted(dispatcher.open)))
        elif action < 0.3 and lost:
            dispatcher.add_engine(draw.choice(sorted(lost)))
        elif open_:
            engine, index = draw.choice(open_)
            dispatcher.finish(engine, index)
            finished.append(index)
    assert sorted(finished) == list(range(num_requests))


# Requests that arrive while an engine is sampling, and the seeds of their samples and turns.


A, B = cast(Any, (0, "a")), cast(Any, (1, "b"))


@pytest.mark.parametrize(("wake", "taken"), [(Intake.abort, []), (lambda intake: intake.put([B], last=True), [A, B])])
def test_a_waiting_engine_is_woken_by_a_request_and_by_an_abort(wake: Any, taken: Any) -> None:
    intake = Intake([A] if taken else [])
    waiting = threading.Thread(target=lambda: intake.run_calls(wait=True))
    waiting.start()
    wake(intake)
    waiting.join(10)
    assert not waiting.is_alive()
    assert [*intake.requests] == taken
    assert (intake.closed, intake.aborted) == (bool(taken), not taken)


def test_a_closed_intake_runs_what_is_posted() -> None:
    """The last request was submitted; its environment answers later."""
    intake = Intake([A], closed=True)
    ran: list[str] = []
    posting = threading.Timer(0.0, lambda: intake.post(lambda: ran.append("answer")))
    posting.start()
    intake.run_calls(wait=True)
    posting.join(10)
    assert ran == ["answer"]
    with pytest.raises(RuntimeError, match="the stream has ended"):
        intake.call(lambda: None)


def test_nothing_is_posted_to_an_aborted_intake() -> None:
    intake = Intake()
    ran: list[str] = []
    before = intake.post(lambda: ran.append("before"))
    intake.abort()
    after = intake.post(lambda: ran.append("after"))
    intake.run_calls(wait=True)
    assert ran == []
    assert before.cancelled()
    assert after.cancelled()


def test_every_turn_of_every_sample_has_a_seed_of_its_own() -> None:
    seeds = [sample_seed(request, index, turn) for request, index, turn in product(range(8), range(8), range(4))]
    assert len({*seeds}) == 256
    assert all(seed is not None and 0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(None, 3, 2) is None, "unseeded requests stay unseeded"


# Spans of activities, by a clock that the test moves.


def test_a_process_has_one_activity_at_a_time_and_a_window_clips_spans() -> None:
    clock = SimpleNamespace(now=0.0)
    timeline = Timeline(lambda: clock.now)
    timeline.enter("learner", "updating")
    for clock.now, activity in ((1.0, "sampling"), (2.0, "sampling"), (3.0, "syncing"), (4.0, None), (4.5, None)):
        timeline.enter("engine 0", activity)  # type: ignore[arg-type]
    clock.now = 5.0
    timeline.enter("learner", None)
    ended = [Span("engine 0", "sampling", 2.5, 3.0), Span("engine 0", "syncing", 3.0, 4.0)]
    assert timeline.cut(2.5) == [*ended, Span("learner", "updating", 2.5, 5.0)]
    timeline.enter("engine 0", "sampling")
    clock.now = 8.0
    with timeline.during("learner", "saving"):
        clock.now = 9.0
    clock.now = 20.0
    assert timeline.cut(8.5) == [Span("engine 0", "sampling", 8.5, 20.0), Span("learner", "saving", 8.5, 9.0)]


def test_overlap_is_a_share_of_the_shorter_activity_whichever_processes_do_it() -> None:
    spans = [
        Span("engine 0", "sampling", 0.0, 4.0),
        Span("engine 1", "sampling", 2.0, 6.0),
        Span("learner", "updating", 3.0, 5.0),
        Span("learner", "updating", 7.0, 9.0),
        Span("verifier", "verifying", 0.0, 9.0),
    ]
    # Some engine samples for 6 s, the learner updates for 4 s, both for 2 s.
    assert overlap_fraction(spans, "sampling", "updating") == pytest.approx(0.5)
    assert overlap_fraction(spans, "sampling", "saving") is None
