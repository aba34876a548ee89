"""The contract of an environment, its checks, and what a sampling engine asks the processes that run episodes. Pure.

An error message names class and method, so that the author knows what to change.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypedDict


class Message(TypedDict):
    """One message of a chat template. role: usually "user" or "system"."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Problem:
    """text: the problem in the run's template (`data.template`). gold: the final answer alone. extra: further
    JSON-serializable fields of the problem's row."""

    id: str
    text: str
    gold: str
    extra: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Observation:
    """What the policy sees first."""

    messages: tuple[Message, ...]

    @classmethod
    def of_text(cls, text: str) -> Observation:
        """One message of the user."""
        return cls((Message(role="user", content=text),))


@dataclass(frozen=True, slots=True)
class Turn:
    """Answer to one turn of the policy.

    observation: text that the policy sees next, as a message of the user; not shown when `done`. reward: added to the
    episode's reward; None in every turn leaves the verdict to the verifier. done: the episode ends.
    """

    observation: str = ""
    reward: float | None = None
    done: bool = False


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What an agent asks the policy (gateway.py); in place of an Observation or a Turn that is not done.

    messages, tools: as in OpenAI's API, with texts as contents. max_tokens: most tokens of the answer. stop: texts that
    end it. sampling: settings that must be those of the run. reward: posted since the last request.
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    sampling: Mapping[str, float] = field(default_factory=dict)
    reward: float | None = None


class Environment(Protocol):
    """One episode.

    `reset` is called once, then `step` for every turn of the policy. The same problem and seed must give the same
    first observation, and the same actions the same turns: an episode whose process was lost is played again from its
    actions.
    """

    def reset(self, problem: Problem, seed: int) -> Observation: ...

    def step(self, action: str) -> Turn: ...


@dataclass(frozen=True, slots=True)
class Call:
    """Advance an episode by its last action, or begin it: the history is complete, so that an episode whose process
    was lost can be played again.

    episode: unique in the run. actions: all turns of the policy so far; empty: reset.
    """

    episode: str
    problem: Problem
    seed: int
    actions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reply:
    """answer: an Observation to a reset, else a Turn; None when the environment failed, with the reason in `detail`."""

    answer: Observation | Turn | ChatRequest | None
    failure: Literal["timeout", "error"] | None = None
    detail: str = ""


MAX_TEXT = 100_000
"""Most characters of an answer. An observation that is longer is cut; first messages that are longer are refused."""
MAX_MESSAGE = 1 << 12
"""Bytes of a datagram between the process that forks episodes and its host."""


class EnvironmentFailed(Exception):
    """The environment raised an exception, or returned what the contract does not allow."""


def checked_observation(value: object, name: str) -> Observation:
    """What `reset` of the class `name` returned. Raises EnvironmentFailed."""
    method = f"{name}.reset"
    if not isinstance(value, Observation):
        raise EnvironmentFailed(f"{method} returned {_described(value)}; it must return an Observation")
    messages = value.messages
    if not isinstance(messages, list | tuple) or not messages:
        raise EnvironmentFailed(f"{method}: Observation.messages is {_described(messages)}; it must have a message")
    for message in messages:
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            raise EnvironmentFailed(f"{method}: a message has other entries than `role` and `content`")
        for part in message.values():
            _check_text(part, f"{method}: role or content of a message")
    length = sum(len(message["content"]) for message in messages)
    if length > MAX_TEXT:
        raise EnvironmentFailed(f"{method}: its messages have {length:,} characters; at most {MAX_TEXT:,} are allowed")
    return Observation(tuple(Message(role=m["role"], content=m["content"]) for m in messages))


def checked_turn(value: object, name: str) -> Turn:
    """What `step` of the class `name` returned, its observation cut to MAX_TEXT. Raises EnvironmentFailed."""
    method = f"{name}.step"
    if not isinstance(value, Turn):
        raise EnvironmentFailed(f"{method} returned {_described(value)}; it must return a Turn")
    _check_text(value.observation, f"{method}: Turn.observation")
    if not isinstance(value.done, bool):
        raise EnvironmentFailed(f"{method}: Turn.done is {_described(value.done)}; it must be True or False")
    reward = value.reward
    try:
        valid = reward is None or (isinstance(reward, numbers.Real) and math.isfinite(reward))
    except OverflowError:  # an integer beyond the floats
        valid = False
    if not valid:
        raise EnvironmentFailed(f"{method}: Turn.reward is {_described(reward)}; it must be a finite number or None")
    return Turn(value.observation[:MAX_TEXT], None if reward is None else float(reward), value.done)


def _check_text(value: object, what: str) -> None:
    if not isinstance(value, str):
        raise EnvironmentFailed(f"{what} is {_described(value)}; it must be a text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise EnvironmentFailed(f"{what} has half of a surrogate pair, which is not a character") from None


def _described(value: object) -> str:
    """A value of any size in an error message."""
    if value is None or isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 10**40):
        return repr(value)
    return f"a value of type {type(value).__name__}"


def answer_from_json(fields: Mapping[str, Any]) -> Observation | Turn:
    """The answer whose `dataclasses.asdict` this is. Raises TypeError or KeyError for fields of no kind."""
    if "messages" in fields:
        return Observation(tuple(Message(role=m["role"], content=m["content"]) for m in fields["messages"]))
    return Turn(**fields)
