"""The environments' actor on a real Ray: it dies, hangs and cannot start, in the middle of episodes."""

from __future__ import annotations

import os
import pickle
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
from support.processes import processes_with

from gxpo_trainer.config import RunConfig
from gxpo_trainer.environments import Observation, Problem, Turn
from gxpo_trainer.environments.contract import Call, Reply
from gxpo_trainer.errors import ConfigError, TrainingError
from gxpo_trainer.rollout import environments as environment_handle
from gxpo_trainer.rollout.environments import EnvironmentHandle, start_environments
from gxpo_trainer.runtime.progress import ProgressWatch

pytestmark = pytest.mark.engine
MODULE, FOLDER = "faulty_environments", Path(__file__).parents[1] / "unit/environments"
MARK = uuid.uuid4().hex
Start = Callable[..., Any]


@pytest.fixture(scope="module")
def environments(ray_on_loopback: None) -> Start:
    """Starts the actor of a run with a class of the faulty environments."""
    variables = {
        "TEST_OF_ENVIRONMENTS": MARK,
        "PYTHONPATH": str(FOLDER),
        "GXPO_ENVIRONMENT_ALLOWLIST": f"{MODULE}:Counter,{MODULE}:NoStep",
    }
    group = SimpleNamespace(watch=ProgressWatch())
    placement = SimpleNamespace(verifier_options=lambda: {"runtime_env": {"env_vars": variables}}, group=group)

    @contextmanager
    def start(name: str = "Counter", **timeouts: float) -> Iterator[EnvironmentHandle]:
        environment = {"name": f"{MODULE}:{name}", "deadline_s": 120.0}
        config = RunConfig.model_validate({"environment": environment, "timeouts": timeouts})
        handle = start_environments(config, placement)  # type: ignore[arg-type]
        try:
            yield handle
        finally:
            handle.kill()

    return start


def call(*actions: str, episode: str = "a") -> Call:
    return Call(episode, Problem("p", "Count", "3", {}), 5, actions)


def workers() -> set[int]:
    """Processes that environments have started."""
    return processes_with(TEST_OF_ENVIRONMENTS=MARK, GXPO_ENVIRONMENT_WORKER=None)


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.05)


def stopped(handle: EnvironmentHandle, episode: str, *, other_than: int | None = None) -> int:
    """Process id of an episode that has stopped itself, once it has."""
    while True:
        pid = ray.get(handle.actor.pids.remote()).get(episode)
        if pid not in (None, other_than) and psutil.Process(pid).status() == psutil.STATUS_STOPPED:
            return int(pid)
        time.sleep(0.05)


def test_episodes_continue_when_their_actor_is_killed(environments: Start) -> None:
    before = workers()
    with environments() as handle:
        handle = pickle.loads(pickle.dumps(handle))  # noqa: S301 - engines get it like this
        assert handle.advance(call()).result() == Reply(Observation.of_text("Count with seed 5"))
        assert handle.advance(call("x")).result() == Reply(Turn("turn 1: x"))
        waiting = handle.advance(call("x", "stop"))
        first = stopped(handle, "a")
        os.kill(ray.get(handle.actor.process.remote()).pid, signal.SIGKILL)
        second = stopped(handle, "a", other_than=first)
        until(lambda: first not in workers())
        os.kill(second, signal.SIGCONT)
        assert waiting.result() == Reply(Turn("continued"))
        assert handle.advance(call("y", episode="b")).result() == Reply(Turn("turn 1: y"))
        handle.end("b")
        until(lambda: set(ray.get(handle.actor.pids.remote())) == {"a"})
        assert handle.advance(call("leave_children", episode="c")).result() == Reply(Turn("left"))
    until(lambda: workers() <= before)


def test_an_actor_that_hangs_is_killed_and_the_call_repeated(
    environments: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_handle, "PROBE_INTERVAL_S", 0.2)
    monkeypatch.setattr(environment_handle, "PROBE_LIMIT_S", 20.0)
    before = workers()
    with environments() as handle:
        assert handle.advance(call("x")).result() == Reply(Turn("turn 1: x"))
        hung = ray.get(handle.actor.process.remote()).pid
        os.kill(hung, signal.SIGSTOP)
        assert handle.advance(call("x", "y")).result() == Reply(Turn("turn 2: y"))
        assert ray.get(handle.actor.process.remote()).pid != hung
    until(lambda: workers() <= before)


def test_the_wait_for_an_actor_is_no_training_time(environments: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_handle, "LOOK_S", 0.05)
    monkeypatch.setattr(environment_handle, "NOTICED_S", 0.5)
    watch = ProgressWatch()

    def excluded_s() -> float:
        return (time.monotonic() - watch.working_s) - begin

    with environments() as handle:
        assert handle.advance(call("x")).result() == Reply(Turn("turn 1: x"))
        handle.exclude_waits(watch)
        begin = time.monotonic() - watch.working_s
        watch.begin("sampling")
        actor = ray.get(handle.actor.process.remote()).pid
        os.kill(actor, signal.SIGSTOP)
        time.sleep(2.0)
        os.kill(actor, signal.SIGCONT)
        until(lambda: excluded_s() > 1.9)
        stopped_s = excluded_s()
        monkeypatch.setattr(environment_handle, "NOTICED_S", 1000.0)  # now it is another process that is noticed
        os.kill(actor, signal.SIGKILL)
        assert handle.advance(call("x", "y")).result() == Reply(Turn("turn 2: y"))
        until(lambda: excluded_s() > stopped_s + 0.1)


def test_a_call_that_outlives_no_actor_fails_alone(environments: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_handle, "PROBE_INTERVAL_S", 0.1)
    monkeypatch.setattr(environment_handle, "MAX_DEATHS", 2)
    with environments() as handle:
        waiting = handle.advance(call("stop"))
        killed = None
        while not waiting.done():
            pid = ray.get(handle.actor.pids.remote()).get("a")
            if pid not in (None, killed):
                killed = pid
                os.kill(ray.get(handle.actor.process.remote()).pid, signal.SIGKILL)
            time.sleep(0.2)
        detail = "the environment actor died 2 times while this call was running"
        assert waiting.result() == Reply(None, "error", detail)
        assert handle.advance(call("x", episode="b")).result() == Reply(Turn("turn 1: x"))


@pytest.mark.parametrize(("evaluating_s", "left"), [(1e-9, {"b"}), (1800.0, {"a", "b"})])
def test_an_episode_keeps_its_process_for_as_long_as_an_engine_may_sample(
    environments: Start, evaluating_s: float, left: set[str]
) -> None:
    with environments(sampling_s=1e-9, evaluating_s=evaluating_s) as handle:
        assert handle.advance(call("x")).result() == Reply(Turn("turn 1: x"))
        assert handle.advance(call("y", episode="b")).result() == Reply(Turn("turn 1: y"))
        assert set(ray.get(handle.actor.pids.remote())) == left
        assert handle.advance(call("x", "y")).result() == Reply(Turn("turn 2: y"))


def test_an_actor_that_never_answers_ends_the_run(environments: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_handle, "PROBE_INTERVAL_S", 0.0)
    monkeypatch.setattr(environment_handle, "PROBE_LIMIT_S", 0.001)
    with environments() as handle, pytest.raises(TrainingError, match="did not answer 5 times in a row") as raised:
        handle.advance(call("x")).result()
    assert raised.value.reason == "stalled"


def test_a_class_that_cannot_be_used_on_the_actors_node_ends_the_run(environments: Start) -> None:
    with environments("NoStep") as handle, pytest.raises(ConfigError, match="it has no method step"):
        handle.advance(call()).result()
