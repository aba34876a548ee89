"""Engines that start while others sample: whose time-out applies, and what counts as training time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gxpo_trainer.config import RunConfig, TimeoutsConfig
from gxpo_trainer.config.base import Phase
from gxpo_trainer.errors import Stalled
from gxpo_trainer.rollout.engines import Engine, Engines
from gxpo_trainer.rollout.pool import Collection, RolloutPool
from gxpo_trainer.rollout.requests import SamplerSettings, SamplingSettings
from gxpo_trainer.rollout.sampler import set_environment
from gxpo_trainer.rollout.timeline import Timeline
from gxpo_trainer.runtime.progress import ProgressWatch

SETUP_S, SAMPLING_S = 300.0, 10.0


class Actor:
    """Accepts every call."""

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *_: f"a {name} call")


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
        monkeypatch.setattr("gxpo_trainer.rollout.engines.print_stacks", lambda *_: None)
        monkeypatch.setattr(self.engines, "_new_actor", lambda *_: (Actor(), object(), self.watch.running_s))
        self.engines.all = [Engine(i, Actor(), None, 0.0, version=0) for i in range(count)]
        placement.group.back_off = lambda restarts: None
        pool = SimpleNamespace(
            engines=self.engines, group=group, config=RunConfig(), timeline=Timeline(), stream_ids=iter([1])
        )
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


def test_a_start_that_hangs_is_restarted_after_setup_s(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 1)
    lost = machine.lose(0)
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


def test_a_stall_of_the_learner_is_its_own_while_an_engine_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 1)
    lost = machine.lose(0)
    machine.watch.timeouts = TimeoutsConfig(setup_s=SETUP_S, updating_s=50.0)
    machine.answers = iter([(60.0, [])])
    with pytest.raises(Stalled, match=r"updating_s = 50"):
        machine.collection._wait_for_one(["update"], {lost.status: lost})
    assert lost.restarts == 1


# Environment variables set before vLLM is imported.


@pytest.fixture
def empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A temporary environment without the variables under test."""
    for name in ("TORCH_COMPILE_DISABLE", "VLLM_CPU_KVCACHE_SPACE", "VLLM_BATCH_INVARIANT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))


@pytest.mark.parametrize(
    ("device", "eager", "compiles"), [("cpu", True, False), ("cpu", False, True), ("gpu", True, True)]
)
def test_eager_cpu_sampler_disables_torch_compile(empty: None, device: str, eager: bool, compiles: bool) -> None:
    set_environment(SamplerSettings("model", 64, device=device, enforce_eager=eager))  # type: ignore[arg-type]
    assert ("TORCH_COMPILE_DISABLE" not in os.environ) == compiles
    assert ("VLLM_CPU_KVCACHE_SPACE" in os.environ) == (device == "cpu")


@pytest.mark.parametrize(
    ("device", "deterministic", "expected"), [("gpu", True, "1"), ("gpu", False, None), ("cpu", True, None)]
)
def test_deterministic_gpu_sampler_uses_batch_invariant_kernels(
    empty: None, device: str, deterministic: bool, expected: str | None
) -> None:
    set_environment(SamplerSettings("model", 64, device=device, deterministic=deterministic))  # type: ignore[arg-type]
    assert os.environ.get("VLLM_BATCH_INVARIANT") == expected


def test_vllm_knows_the_variable_for_batch_invariant_kernels() -> None:
    """vLLM ignores variables that it does not know."""
    from vllm import envs

    assert "VLLM_BATCH_INVARIANT" in envs.environment_variables


def test_variables_set_by_the_user_are_kept(empty: None) -> None:
    os.environ["TORCH_COMPILE_DISABLE"] = "0"
    set_environment(SamplerSettings("model", 64))
    assert os.environ["TORCH_COMPILE_DISABLE"] == "0"
