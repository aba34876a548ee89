"""An agent that exists already, with a loop and tools of its own, as the environment of an episode.

It asks the policy by OpenAI's chat API, at an address and with a key of this episode. This process listens there, and
so contains what an agent does: its deadline, memory, floods and descendants are those of the episode. The order of an
episode, seen from the engine (rollout/agents.py):

    reset -> the agent starts -> its first request
    step(answer to it, as JSON) -> the next request; or Turn(done) when the agent has ended with exit code 0

Requests that arrive together are answered one after the other. Pure but for the agent's process and the socket.
"""

from __future__ import annotations

import asyncio
import collections
import hmac
import inspect
import json
import math
import os
import queue
import secrets
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection, HTTPSConnection
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any, NoReturn
from urllib.parse import urlsplit

from gxpo_trainer.environments.contract import ChatRequest, EnvironmentFailed, Problem, Turn
from gxpo_trainer.grading.sandbox import discard_body

MAX_BODY = 500_000
"""Bytes of a request, which in the JSON to the host may become three times as many."""
MAX_WAITING = 64
"""Requests of an episode that may wait for an answer at the same time."""
_MODEL = "policy"
_RUNS_OWN = ("temperature", "top_p", "top_k", "min_p")
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "tool_choice": ("auto", "none"),
    "response_format": ({"type": "text"},),
}
"""Parameters with the values that change nothing: the policy's own distribution is what is trained."""


def chat_request(body: Mapping[str, Any]) -> ChatRequest:
    """The request of a body of `/v1/chat/completions`. Raises ValueError with what is wrong and the fix."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages: must be a list with at least one message")
    if changed := [name for name, same in _UNSUPPORTED.items() if body.get(name) not in (None, *same)]:
        raise ValueError(f"{changed[0]} = {body[changed[0]]!r:.100} is not supported; remove it")
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise ValueError(f"max_tokens = {limit!r:.100}: must be a positive integer")
    stop = body.get("stop") or ()
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(text, str) and 0 < len(text) <= 1000 for text in stop) or len(stop) > 16:
        raise ValueError("stop: must be a text or a list of at most 16 texts, of at most 1,000 characters each")
    try:
        sampling = {name: float(body[name]) for name in _RUNS_OWN if body.get(name) is not None}
    except (OverflowError, TypeError, ValueError):
        raise ValueError(f"{', '.join(_RUNS_OWN)}: must be numbers") from None
    tools = () if body.get("tool_choice") == "none" else tuple(body.get("tools") or ())
    if not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("tools: must be a list of objects")
    return ChatRequest(tuple(map(_message, messages)), tools, limit, stop, sampling)


def _message(message: Any) -> dict[str, Any]:
    """A message with a text as its content, as chat templates read it."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError("messages: each must be an object with a role")
    content = message.get("content")
    if isinstance(content, list):
        texts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
        content = "".join(texts) if len(texts) == len(content) else content
    if not isinstance(content, str | None):
        raise ValueError("messages: a content must be a text; images, audio and files are not supported")
    return {name: value for name, value in message.items() if value is not None} | {"content": content or ""}


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request, and the answer that its connection waits for."""

    request: ChatRequest
    answered: threading.Event = field(default_factory=threading.Event)
    answer: Mapping[str, Any] = field(default_factory=dict)


class Gateway(ThreadingTCPServer):
    """`/v1/chat/completions`, `/v1/models` and `/v1/episodes/reward` for the holder of one key."""

    daemon_threads = True
    request_queue_size = MAX_WAITING

    def __init__(self, host: str) -> None:
        super().__init__((host, 0), _Handler)
        self.key = secrets.token_urlsafe(32)
        self.base_url = f"http://{host}:{self.server_address[1]}/v1"
        self.events: queue.Queue[_Waiting | None] = queue.Queue()
        """Requests; None when the agent has ended."""
        self.rewards: queue.Queue[float] = queue.Queue()


class _Refused(Exception):
    """Answer of a request that is not served: HTTP status and reason."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Gateway

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        model = {"id": _MODEL, "object": "model", "owned_by": "gxpo"}
        self._serve({"/v1/models": lambda: json.dumps({"object": "list", "data": [model]})})

    def do_POST(self) -> None:
        reward = self._take_reward
        paths = {"/v1/chat/completions": self._complete, "/v1/episodes/reward": reward, "/episodes/reward": reward}
        self._serve(paths)

    def _serve(self, paths: Mapping[str, Callable[[], str]]) -> None:
        self._type, status = "application/json", 200
        try:
            given = self.headers.get("Authorization", "").encode("latin-1")
            if not hmac.compare_digest(given, f"Bearer {self.server.key}".encode()):
                raise _Refused(401, "the key is not that of this episode; send OPENAI_API_KEY as bearer token")
            if (serve := paths.get(self.path.partition("?")[0])) is None:
                raise _Refused(404, f"{self.command} {self.path[:100]} does not exist; use /v1/chat/completions")
            text = serve()
        except _Refused as refused:
            status, reason, *code = refused.args
            if status in (401, 404, 413):  # the body was not read
                discard_body(self)
            kind = "authentication_error" if status == 401 else "invalid_request_error"
            text = json.dumps({"error": {"message": reason, "type": kind, "param": None, "code": (*code, None)[0]}})
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", self._type)
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def _body(self) -> dict[str, Any]:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_BODY:
            raise _Refused(413, f"Content-Length is {length or 'missing'}; it must be at most {MAX_BODY:,} bytes")
        try:
            body = json.loads(self.rfile.read(int(length)))
            json.dumps(body, ensure_ascii=False).encode()  # half of a surrogate pair is no character
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            raise _Refused(400, "the body is no JSON object of Unicode text")
        return body

    def _take_reward(self) -> str:
        reward = self._body().get("reward")
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
            raise _Refused(400, f"reward = {reward!r:.100}: must be a finite number")
        self.server.rewards.put(float(reward))
        return "{}"

    def _complete(self) -> str:
        body = self._body()
        try:
            waiting = _Waiting(chat_request(body))
        except (ValueError, TypeError) as error:
            raise _Refused(400, str(error)) from None
        if self.server.events.qsize() >= MAX_WAITING:
            raise _Refused(429, f"{MAX_WAITING} requests of this episode wait already; send fewer at the same time")
        self.server.events.put(waiting)
        waiting.answered.wait()
        answer = waiting.answer
        if "error" in answer:
            raise _Refused(400, answer["error"], answer["code"])
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": body.get("model") or _MODEL}
        prompt, completion = answer["usage"]
        usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        message, reason = answer["message"], answer["finish_reason"]
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
            return json.dumps({**head, "object": "chat.completion", "choices": [choice], "usage": usage})
        # The turn is complete: tools can be parsed only then, and the engine has sampled it as a whole.
        self._type = "text/event-stream"
        delta = dict(message)
        if "tool_calls" in message:
            delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(message["tool_calls"])]
        parts: list[dict[str, Any]] = [
            {"choices": [{"index": 0, "delta": part, "finish_reason": end, "logprobs": None}]}
            for part, end in ((delta, None), ({}, reason))
        ]
        if (body.get("stream_options") or {}).get("include_usage"):
            parts.append({"choices": [], "usage": usage})
        chunks = [json.dumps({**head, "object": "chat.completion.chunk", **part}) for part in parts]
        return "".join(f"data: {chunk}\n\n" for chunk in (*chunks, "[DONE]"))


class Agent:
    """One episode of an agent. settings: those of AgentConfig. function: what `environment.function` names."""

    def __init__(self, settings: Mapping[str, Any], function: Callable[[dict[str, Any]], Any] | None) -> None:
        self._settings, self._function = settings, function
        self._output: collections.deque[bytes] = collections.deque(maxlen=4)
        self._waiting: _Waiting | None = None
        self._exit_code: int | None = None

    def reset(self, problem: Problem, seed: int) -> ChatRequest:
        """Start the agent; its first request. Raises EnvironmentFailed when it ends without one."""
        try:
            self._gateway = Gateway(self._settings["host"])
        except OSError as error:
            raise EnvironmentFailed(
                f"environment.host = {self._settings['host']!r} is no address of this machine ({error})"
            ) from None
        given = {name: getattr(problem, name) for name in ("id", "text", "gold", "extra")}
        self._start(given | {"seed": seed})
        threading.Thread(target=self._gateway.serve_forever, daemon=True).start()
        if isinstance(first := self._next(), Turn):
            raise EnvironmentFailed(
                "the agent ended without a request; let it use the address OPENAI_BASE_URL and the key OPENAI_API_KEY"
            )
        return first

    def step(self, action: str) -> ChatRequest | Turn:
        """Answer the last request. action: JSON of `message`, `finish_reason` and `usage` (tokens of prompt and
        answer), or of `error` and `code`."""
        assert self._waiting is not None, "reset comes first"
        self._waiting.answer = json.loads(action)
        self._waiting.answered.set()
        return self._next()

    def _next(self) -> ChatRequest | Turn:
        """What the agent does next: it asks, or has ended."""
        event, code = self._gateway.events.get(), self._exit_code
        posted = [self._gateway.rewards.get() for _ in range(self._gateway.rewards.qsize())]
        reward = sum(posted) if posted else None
        if event is not None and code is None:  # nobody waits for the answer to an agent that has ended
            self._waiting = event
            return replace(event.request, reward=reward)
        if code:
            self._reader.join(1.0)  # a descendant may keep the pipe
            last = b"".join(self._output).decode(errors="replace").strip().rpartition("\n")[2]
            how = f"ended with exit code {code}" if code > 0 else f"was killed by signal {-code}"
            raise EnvironmentFailed(f"the agent {how}{f': {last:.300}' if last else ''}")
        return Turn(reward=reward, done=True)

    def _start(self, problem: dict[str, Any]) -> None:
        """Start the agent's process, and threads that read its output and wait for its end."""
        errors, theirs = os.pipe()
        pid = os.fork()  # before this process has threads
        if pid == 0:
            self._become_agent(problem, theirs)
        os.close(theirs)

        def read() -> None:
            while part := os.read(errors, 4096):
                self._output.append(part)

        def wait() -> None:
            _, status = os.waitpid(pid, 0)
            self._exit_code = os.waitstatus_to_exitcode(status)
            self._gateway.events.put(None)

        self._reader = threading.Thread(target=read, daemon=True)
        self._reader.start()
        threading.Thread(target=wait, daemon=True).start()

    def _become_agent(self, problem: dict[str, Any], errors: int) -> NoReturn:
        code = 1
        try:
            os.dup2(errors, 2)
            os.environ |= {"OPENAI_BASE_URL": self._gateway.base_url, "OPENAI_API_KEY": self._gateway.key}
            if self._settings["url"]:
                self._post(problem)
            elif self._function is not None:
                if inspect.isawaitable(result := self._function(problem)):
                    asyncio.run(result)  # type: ignore[arg-type]
            else:
                os.write(given := os.memfd_create("problem"), json.dumps(problem).encode())
                os.lseek(given, 0, os.SEEK_SET)
                os.dup2(given, 0)
                os.execvp(self._settings["command"][0], self._settings["command"])
            code = 0
        except BaseException as error:
            code = 0 if isinstance(error, SystemExit) and not error.code else 1
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def _post(self, problem: dict[str, Any]) -> None:
        """Have a running agent play the episode; its answer is the end."""
        url = urlsplit(self._settings["url"])
        body = {"problem": problem, "base_url": self._gateway.base_url, "api_key": self._gateway.key}
        connection = (HTTPSConnection if url.scheme == "https" else HTTPConnection)(url.netloc)  # follows no redirect
        connection.request("POST", url.path or "/", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if not 200 <= response.status < 300:
            raise RuntimeError(f"{self._settings['url']} answers {response.status} {response.reason}")
        response.read()
