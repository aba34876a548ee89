"""The reward component `http`: a server answers with the reward of a response, or of all responses of a group.

docs/http-rewards.md has the bodies and answers. A failed call fails the whole group. Order of events for one body:

    known -> its value
    under way -> the value of that call
    else waits for one of `concurrency` places -> deadline runs -> attempt, back-off, attempt, … -> value or failure

The server is not trusted: redirects are not followed, at most `MAX_ANSWER_BYTES` are read whatever length is declared,
compressed answers are not decoded, and every attempt has a connection of its own, so that bytes after an answer cannot
be taken for the next one.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import httpx
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_attempt,
    stop_before_delay,
    wait_random_exponential,
)

from gxpo_trainer.config.tasks import HttpRewardConfig
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.grading.rewards import reward_number
from gxpo_trainer.types import HttpUsage

MAX_ANSWER_BYTES = 64 * 1024
CACHED_VALUES = 100_000
"""Answers kept per component; one takes about 200 bytes, and that of a group 32 more for each further response."""
_RETRIED = (429, 502, 503, 504)
_BACK_OFF = wait_random_exponential(multiplier=0.25, max=10.0)
_SECONDS = re.compile(r"[0-9]{1,9}")
"""`Retry-After` as seconds; a date is ignored."""


class _Refused(Exception):
    """The answer cannot be used; asking again would not help."""


class _Unavailable(Exception):
    """Asking again may help. retry_after_s: what the server asked for, 0 if nothing."""

    def __init__(self, reason: str, retry_after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """Reward of one response, or None with the status that its verdict gets and the reason.

    usage: what the call cost; for a call of a group that of its first response, and nothing for the others.
    """

    value: float | None
    usage: HttpUsage = field(default_factory=HttpUsage)
    failure: Literal["timeout", "error"] = "error"
    detail: str = ""


class HttpReward:
    """One component `http` of a run. Its methods belong to one event loop.

    token: sent as a bearer token, None for none. Raises ConfigError when the address cannot be used.
    """

    def __init__(self, config: HttpRewardConfig, token: str | None = None) -> None:
        self.config = config
        try:
            self._url = httpx.URL(config.url)
        except httpx.InvalidURL as error:
            raise ConfigError(f"verifier.rewards: {config.url} is not a URL ({error})") from None
        self._places = asyncio.Semaphore(config.concurrency)
        self._values: OrderedDict[bytes, tuple[float, ...]] = OrderedDict()
        self._under_way: dict[bytes, asyncio.Task[list[HttpAnswer]]] = {}
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", "Connection": "close"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        # A client would also keep the server's cookies, and parse the target of a redirect before it is refused.
        self._transport = httpx.AsyncHTTPTransport(
            verify=self._url.scheme == "https",  # loading certificates takes time
            trust_env=False,
            limits=httpx.Limits(max_keepalive_connections=0),
        )
        self.close = self._transport.aclose

    async def answers(self, bodies: Sequence[Mapping[str, Any]]) -> list[HttpAnswer]:
        """The server's reward for each response of a group, in order; never raises for what the server does.

        bodies: those of single responses.
        """
        if self.config.per == "response" or not bodies:
            return [answer for (answer,) in await asyncio.gather(*(self._ask(body, None) for body in bodies))]
        body = {name: bodies[0][name] for name in ("problem", "gold", "extra")}
        responses = [{name: body[name] for name in ("answer", "response", "turns")} for body in bodies]
        return await self._ask({**body, "responses": responses}, len(bodies))

    async def _ask(self, body: Mapping[str, Any], size: int | None) -> list[HttpAnswer]:
        """Answers of one call. size: responses of a group, None for a single one."""
        content = json.dumps(body, sort_keys=True).encode()
        key = hashlib.sha256(content).digest()
        if key in self._values:
            self._values.move_to_end(key)
            return _charged([HttpAnswer(value) for value in self._values[key]], HttpUsage(cache_hits=1))
        if (under_way := self._under_way.get(key)) is not None:
            return _charged(await under_way, HttpUsage(cache_hits=1))
        task = self._under_way[key] = asyncio.create_task(self._call(content, size))
        try:
            answers = await task
        finally:
            del self._under_way[key]
        values = tuple(answer.value for answer in answers if answer.value is not None)
        if values:
            self._values[key] = values
            if len(self._values) > CACHED_VALUES:
                self._values.popitem(last=False)
        return answers

    async def _call(self, content: bytes, size: int | None) -> list[HttpAnswer]:
        """All attempts of one call within one deadline."""
        config = self.config
        durations: list[float] = []
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_Unavailable),
            wait=_wait,
            stop=stop_after_attempt(config.retries + 1) | stop_before_delay(config.deadline_s),
            reraise=True,
        )
        try:
            async with self._places, asyncio.timeout(config.deadline_s):
                values: tuple[float, ...] = await retrying(self._attempt, content, size, durations)
            answers = [HttpAnswer(value) for value in values]
        except (TimeoutError, _Refused, _Unavailable) as error:
            late = isinstance(error, TimeoutError)
            reason = f"no answer within deadline_s = {config.deadline_s:g}" if late else str(error)
            detail = f"reward {config.label}: {reason}"
            answers = [HttpAnswer(None, failure="timeout" if late else "error", detail=detail)] * (size or 1)
        return _charged(answers, HttpUsage(len(durations), sum(durations)))

    async def _attempt(self, content: bytes, size: int | None, durations: list[float]) -> tuple[float, ...]:
        """One request, whose seconds are appended to `durations`. Raises _Unavailable, _Refused."""
        begin = time.perf_counter()
        try:
            request = httpx.Request("POST", self._url, headers=self._headers, content=content)
            async with aclosing(await self._transport.handle_async_request(request)) as response:
                return _rewards(await _body(response), size)
        except httpx.HTTPError as error:
            may_pass = isinstance(error, httpx.NetworkError | httpx.RemoteProtocolError)
            reason = f"failed with {type(error).__name__}: {error}".rstrip(": ")
            raise (_Unavailable if may_pass else _Refused)(reason) from error
        finally:
            durations.append(time.perf_counter() - begin)


def _charged(answers: Sequence[HttpAnswer], usage: HttpUsage) -> list[HttpAnswer]:
    """The same answers with the usage of their call, counted once."""
    return [replace(answer, usage=HttpUsage() if n else usage) for n, answer in enumerate(answers)]


def _wait(state: RetryCallState) -> float:
    """Seconds to the next attempt: random, growing, and no fewer than the server asked for."""
    error = state.outcome and state.outcome.exception()
    return max(error.retry_after_s if isinstance(error, _Unavailable) else 0.0, _BACK_OFF(state))


async def _body(response: httpx.Response) -> bytes:
    """The body of an answer with status 200 as it arrives, not decoded. Raises _Unavailable, _Refused."""
    status = response.status_code
    if status in _RETRIED:
        asked = _SECONDS.fullmatch(response.headers.get("Retry-After", ""))
        raise _Unavailable(f"was answered with HTTP {status}", float(asked[0]) if asked else 0.0)
    if 300 <= status < 400:
        place = response.headers.get("Location", "nowhere")
        raise _Refused(f"was redirected to {place[:200]} (HTTP {status}); redirects are not followed")
    if status != 200:
        raise _Refused(f"was answered with HTTP {status}")
    body = bytearray()
    async for part in response.aiter_raw():
        body += part
        if len(body) > MAX_ANSWER_BYTES:
            raise _Refused(f"was answered with more than {MAX_ANSWER_BYTES // 1024} KiB")
    return bytes(body)


def _rewards(body: bytes, size: int | None) -> tuple[float, ...]:
    """The number of an answer, or those of a group of `size` responses. Raises _Refused."""
    name = "reward" if size is None else "rewards"
    shown = repr(body[:80].decode(errors="replace"))
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        raise _Refused(f"was answered with {shown}, which is not JSON") from None
    if not isinstance(answer, dict) or name not in answer:
        raise _Refused(f'was answered with {shown}, which has no "{name}"')
    values = [answer[name]] if size is None else answer[name]
    if not isinstance(values, list) or len(values) != (size or 1):
        count = f"{len(values)} numbers" if isinstance(values, list) else repr(values)[:80]
        raise _Refused(f"was answered with the rewards {count}; must be a list of {size}, one for each response")
    try:
        return tuple(reward_number(value) for value in values)
    except ValueError as error:
        raise _Refused(f"was answered with the reward {error}") from None
