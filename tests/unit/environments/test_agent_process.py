"""Agents in their processes: what they ask, what is refused, and that a fault costs their episode only."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
import textwrap
from collections.abc import Callable, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from agents_of_tests import post
from support.recording_server import RecordingServer, Request
from support.walkthrough import titled

from gxpo_trainer.config.tasks import AgentConfig
from gxpo_trainer.environments import Problem, Turn
from gxpo_trainer.environments.contract import Call, ChatRequest, Reply
from gxpo_trainer.environments.gateway import chat_request
from gxpo_trainer.environments.host import EnvironmentHost, check_environment
from gxpo_trainer.errors import ConfigError

pytestmark = pytest.mark.anyio
FILE = Path(__file__).parent / "agents_of_tests.py"
PROBLEM = Problem("p1", "How much?", "42", {"level": 3})
SAID = json.dumps({"message": {"role": "assistant", "content": "12"}, "finish_reason": "stop", "usage": [9, 3]})
Configured = Callable[..., AgentConfig]


@pytest.fixture
def started(configured: object, monkeypatch: pytest.MonkeyPatch) -> Configured:
    """Settings of an agent of this folder, as a command or as a function. No process is left at the end."""
    monkeypatch.delenv("GXPO_ENVIRONMENT_ALLOWLIST")

    def config(name: str, *, function: bool = False, **settings: object) -> AgentConfig:
        start = {"function": f"agents_of_tests:{name}"} if function else {"command": [sys.executable, str(FILE), name]}
        return AgentConfig.model_validate(start | settings)

    return config


def message(text: str) -> tuple[dict[str, str]]:
    return ({"role": "user", "content": text},)


async def play(
    config: AgentConfig,
    answers: int = 10,
    said: Sequence[str] = (),
    host: EnvironmentHost | None = None,
    agent: str = "twice",
) -> list[Reply]:
    """Replies of an episode until its end. said: texts of the answers; without them all are alike. host: that of other
    episodes too. agent: which one `agents_of_tests.named` is."""
    replies, actions = [], ()
    async with aclosing(EnvironmentHost(config)) if host is None else nullcontext(host) as chosen:
        for _ in range(answers):
            problem = replace(PROBLEM, extra={**PROBLEM.extra, "agent": agent}) if host else PROBLEM
            replies.append(await chosen.advance(Call(agent, problem, 5, actions)))
            if not isinstance(replies[-1].answer, ChatRequest):
                break
            actions = (*actions, SAID.replace("12", said[len(actions)]) if said else SAID)
        return replies


@pytest.mark.parametrize(("name", "function"), [("twice", False), ("twice", True), ("asynchronous", True)])
async def test_an_agent_asks_and_rewards(started: Configured, name: str, function: bool) -> None:
    first = message("How much?")
    history = (*first, {"role": "assistant", "content": "12"}, *message("again 12"))
    replies = Reply(ChatRequest(first)), Reply(ChatRequest(history, reward=0.25)), Reply(Turn(reward=0.5, done=True))
    assert await play(started(name, function=function)) == [*replies]


async def test_the_documented_agent_calculates(
    started: Configured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_agent.py").write_text(titled("agents.md")["my_agent.py"], encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    said = "It is <calc>6*7</calc>", "So 42."
    for start in ({"function": "my_agent:play"}, {"command": [sys.executable, str(tmp_path / "my_agent.py")]}):
        first, second, last = await play(AgentConfig.model_validate(start), said=said)
        assert first.answer.messages == message("How much?")
        history = *message("How much?"), {"role": "assistant", "content": said[0]}, *message("42")
        assert second.answer.messages == history
        assert last == Reply(Turn(done=True))


async def test_an_episode_finds_all_loaded_that_its_first_request_needs(
    started: Configured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = """
        import sys
        from openai import OpenAI

        def play(problem):
            before = set(sys.modules)
            completions = OpenAI().chat.completions
            completions.create(model="policy", messages=[{"role": "user", "content": "first"}])
            text = f"loads {sorted({*sys.modules} - before)}"
            completions.create(model="policy", messages=[{"role": "user", "content": text}])
    """
    (tmp_path / "with_client.py").write_text(textwrap.dedent(agent), encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    *_, asked, last = await play(AgentConfig(function="with_client:play"))
    assert asked == Reply(ChatRequest(message("loads []")))
    assert last == Reply(Turn(done=True))


async def test_a_running_agent_is_posted_the_problem(started: Configured, monkeypatch: pytest.MonkeyPatch) -> None:
    def respond(request: Request) -> int:
        given = json.loads(request.body)
        if request.path == "/play":
            asked = {"messages": message("from outside")}
            post("/chat/completions", asked, key=given["api_key"], base=given["base_url"])
        return 200 if request.path == "/play" else 302

    with RecordingServer(respond) as server:
        monkeypatch.setenv("GXPO_ENVIRONMENT_URLS", f"{server.url}/play,{server.url}/moved")
        replies = await play(AgentConfig(url=f"{server.url}/play"))
        (moved,) = await play(AgentConfig(url=f"{server.url}/moved"))
    assert replies == [Reply(ChatRequest(message("from outside"))), Reply(Turn(done=True))]
    problem = json.loads(server.requests[0].body)["problem"]
    assert problem == {"id": "p1", "text": "How much?", "gold": "42", "extra": {"level": 3}, "seed": 5}
    assert [request.path for request in server.requests] == ["/play", "/moved"]
    assert moved.failure == "error"
    assert "302" in moved.detail


async def test_what_is_refused_has_its_status_and_ends_nothing(started: Configured) -> None:
    first, last = await play(started("probes"))
    assert json.loads(first.answer.messages[0]["content"]) == [401, 401, 404, 400, 400, 400, 400, 413, 400, 400, 200]
    assert last == Reply(Turn(done=True))


async def test_the_key_of_another_episode_is_refused_and_disturbs_nothing(
    started: Configured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One agent has what the other was given, and tries its key at its own address, and its own key at the other's."""
    given = tmp_path / "given.json"
    monkeypatch.setenv("GIVEN", str(given))
    config = started("named")
    async with aclosing(EnvironmentHost(config)) as host:
        lender = await host.advance(Call("lends", replace(PROBLEM, extra={"agent": "lends"}), 5))
        tried, end = await play(config, host=host, agent="borrows")
        assert json.loads(tried.answer.messages[0]["content"]) == [401] * 6
        assert end == Reply(Turn(done=True))
        lent = Call("lends", replace(PROBLEM, extra={"agent": "lends"}), 5, (SAID,))
        assert await host.advance(lent) == Reply(Turn(done=True)), "no reward and no request of the other"
    assert lender == Reply(ChatRequest(message("mine")))


async def test_tool_calls_reach_the_client_and_come_back(started: Configured) -> None:
    function = {"name": "calc", "arguments": '{"e": "6*7"}'}
    calls = [{"id": "call_1", "type": "function", "function": function}]
    called = {"role": "assistant", "content": None, "tool_calls": calls}
    action = json.dumps({"message": called, "finish_reason": "tool_calls", "usage": [9, 3]})
    async with aclosing(EnvironmentHost(started("uses_tools"))) as host:
        first = await host.advance(Call("a", PROBLEM, 5))
        second = await host.advance(Call("a", PROBLEM, 5, (action,)))
    assert first.answer.tools[0]["function"]["name"] == "calc"
    assert second.failure is None, second.detail
    _, back, answer = second.answer.messages
    assert back["tool_calls"][0]["function"].items() >= function.items()
    assert (back["tool_calls"][0]["id"], back["content"]) == ("call_1", "")
    assert answer == {"role": "tool", "tool_call_id": "call_1", "content": "42"}


@pytest.mark.parametrize(
    ("name", "failure", "detail"),
    [
        ("forks", "timeout", "the agent did not return within environment.deadline_s = 2 s"),
        ("dies", "error", "the agent ended with exit code 1: RuntimeError: no idea what to do"),
        ("kills_itself", "error", "the agent was killed by signal 9 (Killed)"),
        ("silent", "error", "the agent ended without a request; let it use"),
    ],
)
async def test_a_fault_is_a_verdict_and_leaves_no_process(
    started: Configured, name: str, failure: str, detail: str
) -> None:
    """`started` looks for processes that are left."""
    *_, last = await play(started(name, deadline_s=2 if failure == "timeout" else 60))
    assert last.failure == failure
    assert last.detail.startswith(detail)


@pytest.mark.parametrize("name", ["floods", "leaves"])
async def test_a_flood_and_a_lost_connection_disturb_no_other_episode(started: Configured, name: str) -> None:
    config = started("named", deadline_s=600)
    async with aclosing(EnvironmentHost(config)) as host:
        faulty, other = await asyncio.gather(play(config, 10_000, host=host, agent=name), play(config, host=host))
    assert other[-1] == Reply(Turn(reward=0.5, done=True))
    assert faulty[-1] == Reply(Turn(done=True))
    if name == "leaves":
        assert [reply.answer.messages for reply in faulty[:-1]] == [message("x"), message("back")]


async def test_an_episode_fails_whose_agent_does_not_wait_for_an_answer(started: Configured) -> None:
    async with aclosing(EnvironmentHost(started("stops_waiting_when_told"))) as host:
        first = await host.advance(Call("a", PROBLEM, 5))
        os.kill(host.pids()["a"], signal.SIGUSR1)
        while not host._episodes["a"].process._disconnected:
            await asyncio.sleep(0.01)
        last = await host.advance(Call("a", PROBLEM, 5, (SAID,)))
    assert first == Reply(ChatRequest(message("one")))
    assert last == Reply(None, "error", "the agent closed a connection before its request was answered")


async def test_an_agent_that_is_lost_with_the_worker_is_started_and_answered_again(started: Configured) -> None:
    async with aclosing(EnvironmentHost(started("twice"))) as host:
        first = await host.advance(Call("a", PROBLEM, 5))
        os.kill(host._worker.pid, signal.SIGKILL)
        second = await host.advance(Call("a", PROBLEM, 5, (SAID,)))
    assert first.answer is not None
    assert second.answer.reward == 0.25


async def test_an_agent_that_ends_before_its_answer_is_not_started_again(started: Configured) -> None:
    async with aclosing(EnvironmentHost(started("ends_when_told"))) as host:
        await host.advance(Call("a", PROBLEM, 5))
        os.kill(host.pids()["a"], signal.SIGUSR1)
        while host.pids():
            await asyncio.sleep(0.01)
        last = await host.advance(Call("a", PROBLEM, 5, (SAID,)))
    assert last == Reply(None, "error", "the agent ended with exit code 3")


def test_the_first_request_is_known_before_the_run(started: Configured) -> None:
    assert check_environment(started("twice"), PROBLEM, 5) == ChatRequest(message("How much?"))
    with pytest.raises(ConfigError, match="does not begin an episode of problem p1: the agent ended with exit code 1"):
        check_environment(started("missing"), PROBLEM, 5)
    with pytest.raises(ConfigError, match=r"environment.function: 'agents_of_tests:none' does not exist"):
        check_environment(started("none", function=True), PROBLEM, 5)


def test_only_listed_agents_are_started(started: Configured, monkeypatch: pytest.MonkeyPatch) -> None:
    config = started("twice")
    monkeypatch.setenv("GXPO_ENVIRONMENT_ALLOWLIST", "*,agents_of_tests:twice")
    with pytest.raises(ConfigError, match=r"is not allowed on this machine; its administrator can list it"):
        check_environment(config, PROBLEM, 5)
    assert check_environment(started("twice", function=True), PROBLEM, 5) is not None
    monkeypatch.setenv("GXPO_ENVIRONMENT_ALLOWLIST", shlex.join(config.command))
    assert check_environment(config, PROBLEM, 5) is not None
    with pytest.raises(ConfigError, match=r"environment\.url: http://127\.0\.0\.1:9 is not an allowed address"):
        check_environment(AgentConfig(url="http://127.0.0.1:9"), PROBLEM, 5)


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ({"temperature": "warm"}, "temperature, top_p, top_k, min_p: must be numbers"),
        ({"max_tokens": -1}, "max_tokens = -1: must be a positive integer"),
        ({"max_completion_tokens": 0, "max_tokens": 5}, "max_tokens = 0: must be a positive integer"),
        ({"stop": [1]}, "stop: must be a text"),
        ({"stream_options": [1]}, "stream_options: must be an object"),
        ({"tool_choice": "required"}, "tool_choice = 'required' is not supported; remove it"),
        ({"functions": [{"name": "f"}]}, "functions = .* is not supported; remove it"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs = .* is not supported; remove it"),
        ({"messages": [{"content": "x"}]}, "each must be an object with a role"),
    ],
)
def test_parameters_that_change_the_policy_are_refused(field: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        chat_request({"messages": list(message("x")), **field})


def test_a_request_keeps_what_counts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    tool = {"type": "function", "function": {"name": "f"}}
    body = {"messages": [{"role": "user", "content": parts, "name": None}], "tools": [tool], "max_tokens": 10**9}
    asked = chat_request({**body, "stop": "END", "temperature": 1, "n": 1, "seed": 3})
    assert asked == ChatRequest(message("ab"), (tool,), 10**9, ("END",), {"temperature": 1})
    assert chat_request({**body, "tool_choice": "none"}).tools == ()
