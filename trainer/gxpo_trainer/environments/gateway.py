"""The gateway: agents ask the policy here by OpenAI's chat API, each at the address and with the key of its episode.

An agent exists already, with a loop and tools of its own; worker.py starts it. One server, in the event loop of the
host, answers all of its agents. The order of an episode, seen from the engine (rollout/agents.py):

    the problem -> the agent starts -> its first request
    an answer to it, as JSON -> the next request; or Turn(done) when the agent has ended with exit code 0

Requests of an episode that arrive together are answered one after the other, and the body of each is read when its turn
has come: an agent that floods has one body in memory. Those of an episode that ends are answered with an error.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import secrets
import socket
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from gxpo_trainer.environments.contract import ChatRequest, EnvironmentFailed, Turn
from gxpo_trainer.environments.processes import LOST, EpisodeDied, EpisodeProcess
from gxpo_trainer.environments.worker import SUCCESS
from gxpo_trainer.grading.rewards import reward_number
from gxpo_trainer.grading.sandbox import received

MAX_BODY = 500_000
"""Bytes of a request."""
MAX_WAITING = 64
"""Requests of an episode that may wait for an answer, in addition to the one that is answered."""
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
    "functions": ([],),
    "function_call": ("auto", "none"),
    "chat_template_kwargs": ({},),
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
    limits = (body.get(name) for name in ("max_completion_tokens", "max_tokens"))
    limit = next((limit for limit in limits if limit is not None), None)
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise ValueError(f"max_tokens = {limit!r:.100}: must be a positive integer")
    if not isinstance(body.get("stream_options") or {}, dict):
        raise ValueError("stream_options: must be an object")
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


class _Refused(Exception):
    """Answer of a request that is not served: HTTP status, reason and, where clients know one, code."""


class Gateway:
    """`/<episode>/v1/chat/completions`, `…/models` and `…/episodes/reward` at a free port of an address, until `close`.

    agents: by the first part of these paths. Raises EnvironmentFailed.
    """

    def __init__(self, host: str) -> None:
        try:
            listener = socket.create_server((host, 0), backlog=1024)
        except OSError as error:
            raise EnvironmentFailed(f"environment.host = {host!r} is no address of this machine ({error})") from None
        self.address = f"http://{host}:{listener.getsockname()[1]}"
        self.agents: dict[str, AgentProcess] = {}
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._answer,
                interface="asgi3",
                http="h11",  # it limits the size of headers
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                timeout_keep_alive=3600,
                timeout_graceful_shutdown=1,
            )
        )
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientDisconnect):
            response = await _serve(Request(scope, receive), self.agents)
            await response(scope, receive, send)

    async def close(self) -> None:
        self._server.should_exit = True
        await self._serving


async def _serve(request: Request, agents: Mapping[str, AgentProcess]) -> Response:
    try:
        episode, _, path = request.scope["path"].removeprefix("/").partition("/")
        agent = agents.get(episode)
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if agent is None or not secrets.compare_digest(key.encode(), agent.key.encode()):
            raise _Refused(
                401, "the key is not that of the episode at this address; send OPENAI_API_KEY to OPENAI_BASE_URL"
            )
        match request.method, path:
            case "GET", "v1/models":
                model = {"id": _MODEL, "object": "model", "owned_by": "gxpo"}
                return JSONResponse({"object": "list", "data": [model]})
            case "POST", "v1/episodes/reward":
                posted = (await _body(request)).get("reward")
                try:
                    agent.reward = (agent.reward or 0.0) + reward_number(posted)
                except ValueError:
                    raise _Refused(400, f"reward = {posted!r:.100}: must be a finite number") from None
                return JSONResponse({})
            case "POST", "v1/chat/completions":
                return await _complete(request, agent)
        raise _Refused(404, f"{request.method} /{path[:100]} does not exist; use /v1/chat/completions")
    except _Refused as refused:
        status, reason, *code = refused.args
        if status in (401, 404, 429):
            await received(request, 0)
        kind = "authentication_error" if status == 401 else "invalid_request_error"
        error = {"message": reason, "type": kind, "param": None, "code": code[0] if code else None}
        return JSONResponse({"error": error}, status)


async def _body(request: Request) -> dict[str, Any]:
    content = await received(request, MAX_BODY)
    if content is None:
        raise _Refused(413, f"the body must have at most {MAX_BODY:,} bytes")
    try:
        body = json.loads(content)
        json.dumps(body, ensure_ascii=False).encode()  # half of a surrogate pair is no character
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise _Refused(400, "the body must be a JSON object in UTF-8")
    return body


async def _complete(request: Request, agent: AgentProcess) -> Response:
    if agent.num_waiting > MAX_WAITING:
        raise _Refused(429, f"{MAX_WAITING} requests of this episode are in flight; send fewer at the same time")
    agent.num_waiting += 1
    try:
        async with agent.turn:
            body = await _body(request)
            try:
                asked = chat_request(body)
            except (ValueError, TypeError) as error:
                raise _Refused(400, str(error)) from None
            answering, disconnect = asyncio.create_task(agent.sampled(asked)), asyncio.ensure_future(request.receive())
            try:
                await asyncio.wait([answering, disconnect], return_when=asyncio.FIRST_COMPLETED)
                if not answering.done():
                    agent.record_disconnect()
                    raise ClientDisconnect
                answer = answering.result()
            finally:
                answering.cancel()
                disconnect.cancel()
    finally:
        agent.num_waiting -= 1
    if "error" in answer:
        raise _Refused(400, answer["error"], answer["code"])
    head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": body.get("model") or _MODEL}
    prompt, completion = answer["usage"]
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    message, reason = answer["message"], answer["finish_reason"]
    if not body.get("stream"):
        choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
        return JSONResponse({**head, "object": "chat.completion", "choices": [choice], "usage": usage})
    # The turn is complete: tools can be parsed only then, and the engine has sampled it as a whole.
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
    text = "".join(f"data: {chunk}\n\n" for chunk in (*chunks, "[DONE]"))
    return Response(text, media_type="text/event-stream")


class AgentProcess(EpisodeProcess):
    """An episode's process that is an agent: it asks by the gateway, and its socket is its standard error."""

    def __init__(self, gateway: Gateway, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._gateway = gateway
        self._path, self.key = secrets.token_urlsafe(16), secrets.token_urlsafe(32)
        self.turn = asyncio.Lock()
        """Of the request that is answered."""
        self.num_waiting = 0
        self.reward: float | None = None
        """Posted since the last request."""
        self._requests: asyncio.Queue[ChatRequest | None] = asyncio.Queue()
        """None when the agent has ended, or closed the connection of a request before its answer."""
        self._answer: asyncio.Future[dict[str, Any]] | None = None
        self._has_asked = self._disconnected = False
        self._output: collections.deque[bytes] = collections.deque(maxlen=4)
        self._reading = asyncio.create_task(self._read())
        self.ended.add_done_callback(lambda _: self._requests.put_nowait(None))

    @property
    def alive(self) -> bool:
        """Also of an agent that has ended by itself: the next call tells how, and starts no other."""
        return not self.ended.done() or self.ended.result() != LOST

    async def ask(self, request: Mapping[str, Any], deadline_s: float) -> ChatRequest | Turn:
        """Start the agent, or answer its request: with JSON of `message`, `finish_reason` and `usage` (tokens of prompt
        and answer), or of `error` and `code`. What the agent does next: it asks, or has ended."""
        async with asyncio.timeout(deadline_s):
            if "problem" in request:
                self._gateway.agents[self._path] = self
                problem = {**request["problem"], "seed": request["seed"]}
                base_url = f"{self._gateway.address}/{self._path}/v1"
                given = {"problem": problem, "base_url": base_url, "api_key": self.key}
                self._writer.write(json.dumps(given).encode() + b"\n")
            elif self._answer is not None and not self._answer.done():
                self._answer.set_result(json.loads(request["action"]))
            asked = await self._requests.get()
        reward, self.reward = self.reward, None
        # Nobody waits for the answer to an agent that has ended.
        if asked is not None and not self._disconnected and not self.ended.done():
            self._has_asked = True
            return replace(asked, reward=reward)
        if not self.ended.done():  # an agent that ends closes its connections first
            await asyncio.wait([self.ended], timeout=1.0)
        cause = self.ended.result() if self.ended.done() else SUCCESS
        if cause == SUCCESS and self._disconnected:
            raise EnvironmentFailed("the agent closed a connection before its request was answered")
        if cause == LOST:
            raise EpisodeDied(cause)
        if cause != SUCCESS:
            await asyncio.wait([self._reading], timeout=1.0)  # a descendant may keep the socket
            last = b"".join(self._output).decode(errors="replace").strip().rpartition("\n")[2]
            raise EnvironmentFailed(f"the agent {cause}{f': {last:.300}' if last else ''}")
        if not self._has_asked:
            raise EnvironmentFailed(
                "the agent ended without a request; let it use the address OPENAI_BASE_URL and the key OPENAI_API_KEY"
            )
        return Turn(reward=reward, done=True)

    async def sampled(self, request: ChatRequest) -> dict[str, Any]:
        """The answer to a request, for the gateway."""
        if self._disconnected or self._path not in self._gateway.agents:
            return _ENDED
        self._answer = asyncio.get_running_loop().create_future()
        self._requests.put_nowait(request)
        return await self._answer

    def record_disconnect(self) -> None:
        """End the episode: a request's connection was closed before its answer, so no history has what is sampled."""
        self._disconnected = True
        self._requests.put_nowait(None)

    def kill(self) -> None:
        super().kill()
        self._gateway.agents.pop(self._path, None)
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(_ENDED)

    async def _read(self) -> None:
        """Keep the end of what the agent writes to its standard error."""
        with contextlib.suppress(ConnectionError):
            while part := await self._reader.read(4096):
                self._output.append(part)


_ENDED = {"error": "the episode has ended", "code": "episode_ended"}
