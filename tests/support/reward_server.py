"""Rewards: a server on loopback whose every byte a test decides, a sandbox, and the verdicts on a group."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from http.client import parse_headers
from typing import Any

import pytest

from gxpo_trainer.config import HttpRewardConfig, VerifierConfig
from gxpo_trainer.config.tasks import AnyReward
from gxpo_trainer.grading.http_rewards import HttpAnswer, HttpReward
from gxpo_trainer.grading.sandbox import Sandbox
from gxpo_trainer.rollout.verification import VerifierActor
from gxpo_trainer.rollout.vllm_driver import Sampled
from gxpo_trainer.types import Group, Verdict

PATIENCE_S = 60.0


def isolated(seconds: float = PATIENCE_S, memory_mb: int = 256, processes: int = 12) -> Sandbox:
    """A sandbox; where code cannot be isolated the test is skipped."""
    probe = "bwrap --unshare-all --ro-bind / / true".split()
    if shutil.which("bwrap") is None or subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("bubblewrap cannot isolate code on this machine")
    return Sandbox(seconds, memory_mb, processes)


def score(
    rewards: tuple[AnyReward, ...], group: Group, *, components: bool = True, deadline_s: float = PATIENCE_S
) -> tuple[Verdict, ...]:
    async def scenario() -> list[tuple[Verdict, ...]]:
        actor = VerifierActor(VerifierConfig(workers=1, deadline_s=deadline_s, rewards=rewards))
        try:
            return await actor.score(Sampled([(0, group)], 0.0), [components])
        finally:
            await actor.close()

    (verdicts,) = asyncio.run(scenario())
    return verdicts


class RewardServer:
    """Calls `answer(number, body, connection)` for each request, in a thread of its own; entering starts it.

    number: of the request, from 0. body: of the request, decoded. The connection is closed afterwards. requests: bodies
    so far; headers: of the last one; most_at_once: requests answered at the same time.
    """

    def __init__(self, answer: Callable[[int, Any, socket.socket], None]) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self._lock = threading.Lock()
        self._at_once = 0
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/score"
        self.stopped = threading.Event()
        self.requests: list[Any] = []
        self.headers = ""
        self.most_at_once = 0

    def __enter__(self) -> RewardServer:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(PATIENCE_S)
            try:
                headers, body = _request(connection)
            except (OSError, ValueError):  # the client has gone
                return
            with self._lock:
                number = len(self.requests)
                self.requests.append(body)
                self.headers = headers
                self._at_once += 1
                self.most_at_once = max(self.most_at_once, self._at_once)
            with suppress(OSError):  # the client has gone, which is what some tests are about
                self._answer(number, body, connection)
            with self._lock:
                self._at_once -= 1


def reply(
    connection: socket.socket, body: bytes | str, status: str = "200 OK", *, length: int | None = None, more: str = ""
) -> None:
    """Send a response. length: what it declares instead of its true length. more: further header lines."""
    content = body.encode() if isinstance(body, str) else body
    declared = len(content) if length is None else length
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {declared}\r\n{more}\r\n"
    connection.sendall(head.encode() + content)


def wait_for_close(connection: socket.socket) -> None:
    """Return when the client has closed its end."""
    while connection.recv(4096):
        pass


def _request(connection: socket.socket) -> tuple[str, Any]:
    """Request line with headers, and the decoded body."""
    with connection.makefile("rb") as stream:
        line = stream.readline().decode()
        headers = parse_headers(stream)
        return f"{line}{headers}", json.loads(stream.read(int(headers["Content-Length"] or 0)))


def ask(url: str, *bodies: Any, token: str | None = None, together: bool = True, **settings: Any) -> list[HttpAnswer]:
    """Answers to bodies that are posted at the same time, or one after another."""

    async def scenario() -> list[HttpAnswer]:
        config = HttpRewardConfig.model_validate({"label": "judge", "url": url, "deadline_s": PATIENCE_S, **settings})
        component = HttpReward(config, token)
        try:
            if together:
                return await component.answers(bodies)
            return [answer for body in bodies for answer in await component.answers([body])]
        finally:
            await component.close()

    return asyncio.run(scenario())
