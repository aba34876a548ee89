"""The adapter of OpenEnv, against servers on loopback that follow its protocol or break it.

With GXPO_OPENENV_PYTHON, the interpreter of an environment that has the package `openenv`, its real server too.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import pytest
from support.recording_server import RecordingServer
from support.service_processes import free_port

from gxpo_trainer.config.tasks import EnvironmentConfig
from gxpo_trainer.environments import Observation, Problem, Turn
from gxpo_trainer.environments.contract import Call, Reply
from gxpo_trainer.environments.host import EnvironmentHost
from gxpo_trainer.errors import ConfigError

Handler = Callable[[dict[str, Any], dict[str, Any]], str | None]
"""(message, the session's memory) -> answer; None: none at all."""


@contextmanager
def server(handler: Handler, sessions: list[dict[str, Any]] | None = None) -> Iterator[str]:
    """The address of a WebSocket server in a thread of its own."""
    from websockets.exceptions import ConnectionClosed
    from websockets.sync.server import ServerConnection, serve

    def session(connection: ServerConnection) -> None:
        memory: dict[str, Any] = {"path": connection.request.path if connection.request else ""}
        if sessions is not None:
            sessions.append(memory)
        try:
            for message in connection:
                answer = handler(json.loads(message), memory)
                if answer is not None:
                    connection.send(answer)
        except ConnectionClosed:  # the client was killed
            memory["closed"] = True

    with serve(session, "127.0.0.1", 0) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{running.socket.getsockname()[1]}"
        running.shutdown()
        thread.join()


def observation(fields: dict[str, Any], reward: float | None = None, done: bool = False) -> str:
    return json.dumps({"type": "observation", "data": {"observation": fields, "reward": reward, "done": done}})


def guessing(message: dict[str, Any], memory: dict[str, Any]) -> str:
    """Guess the seed: a small environment that keeps the number of guesses."""
    if message["type"] == "reset":
        memory["target"], memory["guesses"], memory["given"] = message["data"]["seed"], 0, message["data"]
        return observation({"text": "guess", "left": 3})
    memory["guesses"] += 1
    right = message["data"]["guess"] == str(memory["target"])
    text = f"{'right' if right else 'wrong'} after {memory['guesses']}"
    return observation({"text": text, "left": 3 - memory["guesses"]}, 1.0 if right else 0.0, right)


def call(*actions: str, episode: str = "a") -> Call:
    return Call(episode, Problem("p1", "Guess a number.", "7", {"level": "easy"}), 7, actions)


CALLS = call(), call(episode="b"), call("3"), call("7", episode="b"), call("3", "7")
REPLIES = [
    *[Reply(Observation.of_text("Guess a number.\n\nguess"))] * 2,
    Reply(Turn("wrong after 1", 0.0)),
    Reply(Turn("right after 1", 1.0, True)),
    Reply(Turn("right after 2", 1.0, True)),
]
"""Two episodes with the seed 7, and what a server of `guessing` makes of them."""


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., EnvironmentConfig]:
    def config(url: str, **settings: Any) -> EnvironmentConfig:
        monkeypatch.setenv("GXPO_ENVIRONMENT_URLS", f"http://elsewhere.example:1, {url}")
        fields = {"action_field": "guess", "observation_field": "text", "deadline_s": 60.0}
        return EnvironmentConfig.model_validate({"name": "openenv", "url": url, **fields, **settings})

    return config


def replies_to(config: EnvironmentConfig, *calls: Call) -> list[Reply]:
    async def play() -> list[Reply]:
        async with aclosing(EnvironmentHost(config)) as host:
            return [await host.advance(one) for one in calls]

    return asyncio.run(play())


def test_an_episode_is_a_session_of_the_server(configured: Callable[..., EnvironmentConfig]) -> None:
    sessions: list[dict[str, Any]] = []
    with server(guessing, sessions) as url:
        assert replies_to(configured(url), *CALLS) == REPLIES
        while not all("closed" in session for session in sessions):
            time.sleep(0.01)
    assert [session["path"] for session in sessions] == ["/ws", "/ws"]
    assert sessions[0]["given"] == {"level": "easy", "problem": "Guess a number.", "gold": "7", "seed": 7}


def test_without_a_field_the_whole_observation_is_shown(configured: Callable[..., EnvironmentConfig]) -> None:
    with server(guessing) as url:
        replies = replies_to(configured(url, observation_field=None), call("3"))
    assert replies == [Reply(Turn('{"text": "wrong after 1", "left": 2}', 0.0))]


FAULTS: dict[str, tuple[Handler, str]] = {
    "silence": (lambda message, memory: None, "did not return within environment.deadline_s = 3 s"),
    "error": (
        lambda message, memory: json.dumps({"type": "error", "data": {"message": "no room", "code": "SESSION_ERROR"}}),
        "the server answers reset with SESSION_ERROR: no room",
    ),
    "state": (
        lambda message, memory: json.dumps({"type": "state", "data": {}}),
        "the answer to reset is no observation of OpenEnv: {'type': 'state', 'data': {}}",
    ),
    "other field": (
        lambda message, memory: observation({"message": "x"}),
        "environment.observation_field = 'text' is no field of the observation; it has message",
    ),
    "10 MB": (lambda message, memory: observation({"text": "x" * 10_000_000}), "raised ConnectionClosedError"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_breaks_the_protocol_is_an_error(
    configured: Callable[..., EnvironmentConfig], fault: str
) -> None:
    handler, detail = FAULTS[fault]
    with server(handler) as url:
        (reply,) = replies_to(configured(url, deadline_s=3.0 if fault == "silence" else 60.0), call("3"))
    assert (reply.answer, reply.failure) == (None, "timeout" if fault == "silence" else "error")
    assert detail in reply.detail


def test_a_redirect_is_not_followed(configured: Callable[..., EnvironmentConfig]) -> None:
    with RecordingServer(lambda request: 302) as redirecting:
        (reply,) = replies_to(configured(redirecting.url), call())
    assert reply.failure == "error"
    assert "cannot follow redirect" in reply.detail
    assert [request.path for request in redirecting.requests] == ["/ws"]


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://elsewhere.example:10", "http://elsewhere.example"])
def test_an_address_that_is_not_listed_is_refused(configured: Callable[..., EnvironmentConfig], url: str) -> None:
    listed = configured("http://127.0.0.1:2")
    with pytest.raises(ConfigError, match=r"environment\.url: .* is not an allowed address on this machine"):
        replies_to(listed.model_copy(update={"url": url}), call())


REAL_SERVER = """
from openenv.core import Action, Environment, Observation, State, create_app
import sys, uvicorn

class Guess(Action):
    guess: str

class Answer(Observation):
    text: str

class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = property(lambda self: State(step_count=self.guesses))

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.target, self.guesses = seed, 0
        return Answer(text="guess")

    def step(self, action, timeout_s=None, **kwargs):
        self.guesses += 1
        right = action.guess == str(self.target)
        text = f"{'right' if right else 'wrong'} after {self.guesses}"
        return Answer(text=text, reward=1.0 if right else 0.0, done=right)

app = create_app(Guessing, Guess, Answer, env_name="guessing", max_concurrent_envs=8)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""


@pytest.mark.skipif("GXPO_OPENENV_PYTHON" not in os.environ, reason="GXPO_OPENENV_PYTHON names no interpreter")
def test_a_real_server_of_openenv(configured: Callable[..., EnvironmentConfig]) -> None:
    port = free_port()
    process = subprocess.Popen([os.environ["GXPO_OPENENV_PYTHON"], "-c", REAL_SERVER, str(port)])
    try:
        while True:
            assert process.poll() is None
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        assert replies_to(configured(f"http://127.0.0.1:{port}"), *CALLS) == REPLIES
    finally:
        process.kill()
        process.wait()
