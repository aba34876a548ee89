"""Processes of episodes: every fault costs its episode at most, and nothing is left at the end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import aclosing
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest

from gxpo_trainer.config.tasks import EnvironmentConfig
from gxpo_trainer.environments import Observation, Problem, Turn
from gxpo_trainer.environments.contract import MAX_TEXT, Call, Reply
from gxpo_trainer.environments.host import EnvironmentHost, check_environment
from gxpo_trainer.environments.processes import EpisodeDied
from gxpo_trainer.errors import ConfigError, TrainingError

pytestmark = pytest.mark.anyio
Configured = Callable[..., EnvironmentConfig]
Descendants = Callable[[], set[int]]


PROBLEM = Problem("p1", "Count", "3", {})


def call(*actions: str, episode: str = "a") -> Call:
    return Call(episode, PROBLEM, 5, actions)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.05)


FIRST = Observation.of_text("Count with seed 5")


async def test_an_episode_is_a_process_with_its_own_state(configured: Configured) -> None:
    async with aclosing(EnvironmentHost(configured())) as host:
        assert await host.advance(call()) == Reply(FIRST)
        assert await host.advance(call(episode="b")) == Reply(FIRST)
        begun = host.pids()
        assert await host.advance(call("x")) == Reply(Turn("turn 1: x"))
        assert await host.advance(call("x", "y")) == Reply(Turn("turn 2: y"))
        assert await host.advance(call("z", episode="b")) == Reply(Turn("turn 1: z"))
        assert host.pids() == begun
        assert len(set(begun.values())) == 2
        host.end("a")
        host.end("a")
        host.end("unknown")
        await until(lambda: not psutil.pid_exists(begun["a"]))
        assert await host.advance(call("z", "done", episode="b")) == Reply(Turn("over", 0.5, True))
        await until(lambda: not psutil.pid_exists(begun["b"]))
        assert host.pids() == {}


async def test_a_repeated_call_gets_the_same_answer_without_another_step(configured: Configured) -> None:
    async with aclosing(EnvironmentHost(configured())) as host:
        for _ in range(2):
            assert await host.advance(call("x")) == Reply(Turn("turn 1: x"))
        other = "faulty_environments:Counter.step gave another answer when the episode was played again after its "
        other += "process was lost; the same problem, seed and actions must give the same answers"
        assert await host.advance(call("other")) == Reply(None, "error", other)


async def replies_to(config: EnvironmentConfig, actions: Sequence[str]) -> list[Reply]:
    """Reply to each action, given in episodes of its own at the same time, next to an episode that none disturbs."""
    async with aclosing(EnvironmentHost(config)) as host:
        await host.advance(call(episode="undisturbed"))
        pid = host.pids()["undisturbed"]
        replies = await asyncio.gather(*(host.advance(call("x", name, episode=name)) for name in actions))
        assert await host.advance(call("x", episode="undisturbed")) == Reply(Turn("turn 1: x"))
        assert host.pids() == {"undisturbed": pid} | {
            name: host.pids()[name] for name, reply in zip(actions, replies, strict=True) if reply.answer is not None
        }
        return replies


async def test_calls_that_hang_are_killed_at_their_deadline(configured: Configured) -> None:
    replies = await replies_to(configured(deadline_s=5.0), ["sleep", "stop"])
    limit = "faulty_environments:Counter.step did not return within environment.deadline_s = 5 s"
    assert replies == [Reply(None, "timeout", limit)] * 2


async def test_faults_are_errors_with_their_cause(configured: Configured) -> None:
    method = "faulty_environments:Counter.step"
    details = {
        "kill_itself": f"{method}: the process was killed by signal 9 (Killed), 2 times in this call",
        "leave_children_and_exit": f"{method}: the process ended with exit code 7, 2 times in this call",
        "none": f"{method} returned None; it must return a Turn",
        "surrogate": f"{method}: Turn.observation has half of a surrogate pair, which is not a character",
        "nan": f"{method}: Turn.reward is nan; it must be a finite number or None",
        "huge": f"{method}: Turn.reward is a value of type int; it must be a finite number or None",
        "quit": f"{method} raised SystemExit: bye (faulty_environments.py:",
        "eat_memory": "out of memory (environment.memory_mb)",
        "write_to_all_descriptors": "unexpected data on the environment's socket",
        "flood_all_descriptors": "an answer has more than 1,600,000 bytes",
    }
    *replies, long, printed = await replies_to(configured(memory_mb=256), [*details, "long", "print"])
    for reply, detail in zip(replies, details.values(), strict=True):
        assert (reply.answer, reply.failure) == (None, "error")
        assert reply.detail.startswith(detail)
    assert long == Reply(Turn("x" * MAX_TEXT)), "it is cut"
    assert printed == Reply(Turn("printed to /dev/null"))


@pytest.mark.parametrize(
    ("name", "detail"),
    [
        ("NoMessages", "NoMessages.reset: Observation.messages is a value of type tuple; it must have a message"),
        ("LongReset", "LongReset.reset: its messages have 10,000,000 characters; at most 100,000 are allowed"),
        ("ManyMessages", "an answer has more than 1,600,000 bytes"),
        ("FailingConstructor", "FailingConstructor.__init__ raised RuntimeError: no display"),
    ],
)
async def test_first_messages_are_checked(configured: Configured, name: str, detail: str) -> None:
    async with aclosing(EnvironmentHost(configured(name))) as host:
        reply = await host.advance(call())
    assert (reply.answer, reply.failure) == (None, "error")
    assert reply.detail.removeprefix("faulty_environments:").startswith(detail)


async def test_children_of_an_episode_end_with_it_or_with_a_killed_worker(
    configured: Configured, descendants: Descendants
) -> None:
    async with aclosing(EnvironmentHost(configured())) as host:
        await host.advance(call(episode="other"))
        kept = descendants()
        assert len(kept) == 2  # the worker and the other episode
        assert await host.advance(call("leave_children")) == Reply(Turn("left"))
        await until(lambda: len(descendants() - kept) == 5)  # the episode and its four children
        with_children = descendants()
        assert (await host.advance(call("done", episode="short"))).failure is None
        await until(lambda: descendants() <= with_children)
        assert descendants() == with_children  # the end of another episode costs it nothing
        host.end("a")
        await until(lambda: descendants() == kept)
        assert await host.advance(call("x", episode="other")) == Reply(Turn("turn 1: x"))
        await host.advance(call("leave_children"))
        os.kill(host._worker.pid, signal.SIGKILL)
        await until(lambda: descendants() == set())


async def test_an_episode_whose_process_was_killed_from_outside_is_played_again(configured: Configured) -> None:
    async with aclosing(EnvironmentHost(configured(deadline_s=60.0))) as host:
        await host.advance(call("x"))
        for _ in range(3):  # between two calls a death does not count
            lost = host.pids()["a"]
            os.kill(lost, signal.SIGKILL)
            await until(lambda: not host.pids())
            assert await host.advance(call("x", "y")) == Reply(Turn("turn 2: y"))
            assert host.pids()["a"] != lost

        waiting = asyncio.create_task(host.advance(call("x", "y", "stop")))
        await until(lambda: stopped(host) == ["a"])
        first = host.pids()["a"]
        os.kill(first, signal.SIGKILL)
        await until(lambda: host.pids().get("a", first) != first and stopped(host) == ["a"])
        os.kill(host.pids()["a"], signal.SIGCONT)
        assert await waiting == Reply(Turn("continued"))


async def test_an_episode_that_kills_the_worker_fails_alone(configured: Configured) -> None:
    async with aclosing(EnvironmentHost(configured())) as host:
        others = [f"other {number}" for number in range(3)]
        for episode in (*others, "killer"):
            await host.advance(call("x", episode=episode))
        calls = [asyncio.create_task(host.advance(call("x", "stop", episode=name))) for name in others]
        await until(lambda: stopped(host) == others)
        before = [host.pids()[name] for name in others]
        worker = host._worker
        killed = await host.advance(call("x", "kill_parent", episode="killer"))
        assert killed.failure == "error"
        await until(lambda: not set(before) & set(host.pids().values()) and set(others) == set(stopped(host)))
        for name in others:
            os.kill(host.pids()[name], signal.SIGCONT)
        assert await asyncio.gather(*calls) == [Reply(Turn("continued"))] * 3
        assert await host.advance(call("x", "y", episode="new")) == Reply(Turn("turn 2: y"))
        assert host._worker is not worker


async def test_a_worker_that_was_stopped_is_replaced(configured: Configured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gxpo_trainer.environments.processes.FORK_LIMIT_S", 5.0)

    async with aclosing(EnvironmentHost(configured())) as host:
        assert await host.advance(call("stop_parent")) == Reply(Turn("stopped it"))
        assert await host.advance(call("x", episode="b")) == Reply(Turn("turn 1: x"))


async def test_a_call_of_an_ended_episode_fails_at_once(configured: Configured) -> None:
    async with aclosing(EnvironmentHost(configured(workers=1))) as host:
        await host.advance(call())
        running_call = asyncio.create_task(host.advance(call("sleep")))
        queued = asyncio.create_task(host.advance(call(episode="b")))
        await until(lambda: host._episodes["a"].lock.locked())
        host.end("a")
        assert await running_call == Reply(None, "error", "the episode was ended during this call")
        assert await queued == Reply(FIRST)


def stopped(host: EnvironmentHost) -> list[str]:
    """Episodes that have stopped themselves."""
    return [name for name, pid in host.pids().items() if psutil.Process(pid).status() == psutil.STATUS_STOPPED]


async def test_only_so_many_calls_run_at_a_time(configured: Configured) -> None:
    async with aclosing(EnvironmentHost(configured(workers=2))) as host:
        names = ["a", "b", "c"]
        calls = [asyncio.create_task(host.advance(call("stop", episode=name))) for name in names]
        await until(lambda: stopped(host) == ["a", "b"])
        assert set(host.pids()) == {"a", "b"}  # "c" waits for one of them
        os.kill(host.pids()["a"], signal.SIGCONT)
        assert await calls[0] == Reply(Turn("continued"))
        await until(lambda: stopped(host) == ["b", "c"])
        for name in ("b", "c"):
            os.kill(host.pids()[name], signal.SIGCONT)
        assert await asyncio.gather(*calls) == [Reply(Turn("continued"))] * 3


async def test_the_processes_of_abandoned_episodes_end(configured: Configured) -> None:
    async with aclosing(EnvironmentHost(configured())) as host:
        await host.advance(call("x"))
        process = psutil.Process(host.pids()["a"])
        host.free_idle(3600.0)
        assert process.is_running()
        host.free_idle(0.0)
        await until(lambda: not process.is_running())
        assert await host.advance(call("x", "y")) == Reply(Turn("turn 2: y"))


async def test_an_episode_without_its_process_is_held_to_its_earlier_answers(configured: Configured) -> None:
    async with aclosing(EnvironmentHost(configured("Forgetful"))) as host:
        assert (await host.advance(call())).failure is None
        host.free_idle(0.0)
        assert host.pids() == {}
        reply = await host.advance(call())
        assert (reply.answer, reply.failure) == (None, "error")
        assert "gave another answer when the episode was played again after its process was lost" in reply.detail


async def test_an_episode_is_idle_from_its_last_answer_on(
    configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("gxpo_trainer.environments.host.time", SimpleNamespace(monotonic=lambda: now[0]))
    async with aclosing(EnvironmentHost(configured(), idle_s=100.0)) as host:
        waiting = asyncio.create_task(host.advance(call("stop")))
        await until(lambda: stopped(host) == ["a"])
        pid = host.pids()["a"]
        now[0] = 1000.0
        os.kill(pid, signal.SIGCONT)
        assert await waiting == Reply(Turn("continued"))
        now[0] = 1099.0
        await host.advance(call(episode="b"))
        assert host.pids()["a"] == pid
        now[0] = 1100.0
        await host.advance(call("x", episode="b"))
        assert set(host.pids()) == {"b"}


async def test_the_episodes_of_a_lost_engine_end(configured: Configured) -> None:
    async with aclosing(EnvironmentHost(configured())) as host:
        for name in ("0.1/a", "0.1/b", "0.10/c", "1.1/d"):
            await host.advance(call(episode=name))
        host.end_all("0.1/")
        assert sorted(host.pids()) == ["0.10/c", "1.1/d"]


async def test_a_machine_without_a_free_process_costs_the_episode(
    configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = BlockingIOError(11, "Resource temporarily unavailable")
    detail = "faulty_environments:Counter.reset: the process cannot be started: "
    async with aclosing(EnvironmentHost(configured())) as host:
        with monkeypatch.context() as patch:
            patch.setattr("gxpo_trainer.environments.processes.subprocess.Popen", Mock(side_effect=full))
            reply = await host.advance(call(episode="no worker"))
            assert reply == Reply(None, "error", f"{detail}{full}, 2 times in this call")
        assert await host.advance(call()) == Reply(FIRST)
        with monkeypatch.context() as patch:
            patch.setattr("gxpo_trainer.environments.processes.socket.socketpair", Mock(side_effect=full))
            reply = await host.advance(call(episode="no socket"))
            assert reply == Reply(None, "error", f"{detail}{full}, 2 times in this call")
        with monkeypatch.context() as patch:
            died = EpisodeDied("cannot be started: no process")
            patch.setattr("gxpo_trainer.environments.processes.WorkerProcess.start_episode", Mock(side_effect=died))
            reply = await host.advance(call(episode="no fork"))
            assert reply == Reply(None, "error", f"{detail}no process, 2 times in this call")
        await until(lambda: not any(worker.alive for worker in host._private))
        assert await host.advance(call("x")) == Reply(Turn("turn 1: x"))


async def test_a_worker_that_cannot_start_ends_the_run(configured: Configured, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured()
    monkeypatch.setattr("gxpo_trainer.environments.processes.sys.executable", "/bin/false")
    async with aclosing(EnvironmentHost(config)) as host:
        with pytest.raises(TrainingError, match=r"cannot be started \(3 attempts in a row\)") as raised:
            await host.advance(call())
    assert raised.value.reason == "setup_failed"


async def test_the_check_before_a_run_works_where_an_event_loop_runs(configured: Configured) -> None:
    for config in (EnvironmentConfig(), configured(), configured("RaisingStep")):
        check_environment(config, PROBLEM, 5)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("NoStep", r"is no environment: it has no method step; define step\(self, action\)"),
        ("Missing", "Missing' does not exist: module faulty_environments has no Missing"),
        ("Unlisted", "Unlisted' is not allowed on this machine"),
        ("TextReset", r"begin an episode of problem p1: .*TextReset\.reset returned a value of type str"),
        ("TextStep", r"violates the contract: .*TextStep\.step returned a value of type str; it must return a Turn"),
        ("Forgetful", "reset of problem p1 with the same seed gave other messages the second time"),
    ],
)
def test_the_check_before_a_run_refuses_what_cannot_be_used(configured: Configured, name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_environment(configured(name), PROBLEM, 5)
