"""Checks an environment against the contract, and carries problems and answers as JSON. Pure.

A message of an error names class and method, so that the author knows what to change.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from gxpo_trainer.environments.base import Message, Observation, Problem, Turn

MAX_TEXT = 100_000
"""Most characters of an answer. An observation that is longer is cut; first messages that are longer are refused."""

_METHODS: Mapping[str, tuple[str, ...]] = {"reset": ("problem", "seed"), "step": ("action",)}


class EnvironmentFailed(Exception):
    """The environment raised an exception, or returned what the contract does not allow."""


def class_problem(found: object) -> str | None:
    """Why an object is no environment class, with the fix; None when it is one."""
    if not inspect.isclass(found):
        return "it is not a class; name one as package.module:Class"
    if problem := _signature_problem(found, ()):
        return f"its constructor {problem}; give all arguments a default"
    for method, arguments in _METHODS.items():
        function = inspect.getattr_static(found, method, None)
        signature = f"{method}(self, {', '.join(arguments)})"
        if function is None:
            return f"it has no method {method}; define {signature}"
        if inspect.iscoroutinefunction(function):
            return f"its method {method} is a coroutine; define {signature} without async"
        if not inspect.isfunction(function):
            return f"its {method} is no method of an instance; define {signature}"
        if problem := _signature_problem(function, ("self", *arguments)):
            return f"its method {method} {problem}; define {signature}"
    return None


def _signature_problem(function: Any, arguments: Sequence[str]) -> str | None:
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        return f"does not take these arguments ({error})"
    except ValueError:  # a class written in C has no signature
        return None
    return None


def checked_observation(value: object, name: str) -> Observation:
    """What `reset` of the class `name` returned. Raises EnvironmentFailed."""
    method = f"{name}.reset"
    if not isinstance(value, Observation):
        raise EnvironmentFailed(f"{method} returned {_shown(value)}; it must return an Observation")
    messages = value.messages
    if not isinstance(messages, list | tuple) or not messages:
        raise EnvironmentFailed(f"{method}: Observation.messages is {_shown(messages)}; it must have a message")
    for message in messages:
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            raise EnvironmentFailed(f"{method}: a message is {_shown(message)}; it must have `role` and `content` only")
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
        raise EnvironmentFailed(f"{method} returned {_shown(value)}; it must return a Turn")
    _check_text(value.observation, f"{method}: Turn.observation")
    if not isinstance(value.done, bool):
        raise EnvironmentFailed(f"{method}: Turn.done is {_shown(value.done)}; it must be True or False")
    reward = value.reward
    if reward is not None:
        if not isinstance(reward, numbers.Real):
            raise EnvironmentFailed(f"{method}: Turn.reward is {_shown(reward)}; it must be a number or None")
        reward = float(reward)
        if not math.isfinite(reward):
            raise EnvironmentFailed(f"{method}: Turn.reward is {reward}; it must be a finite number")
    return Turn(value.observation[:MAX_TEXT], reward, value.done)


def _check_text(value: object, what: str) -> None:
    if not isinstance(value, str):
        raise EnvironmentFailed(f"{what} is {_shown(value)}; it must be a text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise EnvironmentFailed(f"{what} has half of a surrogate pair, which is not a character") from None


def _shown(value: object) -> str:
    """A value of any size in an error message."""
    if value is None or isinstance(value, bool | int | float):
        return f"{value!r:.40}"
    return f"a value of type {type(value).__name__}"


def problem_to_json(problem: Problem) -> dict[str, Any]:
    return {"id": problem.id, "text": problem.text, "gold": problem.gold, "extra": dict(problem.extra)}


def problem_from_json(fields: Mapping[str, Any]) -> Problem:
    return Problem(**fields)


def answer_to_json(answer: Observation | Turn) -> dict[str, Any]:
    if isinstance(answer, Observation):
        return {"messages": list(answer.messages)}
    return {"observation": answer.observation, "reward": answer.reward, "done": answer.done}


def answer_from_json(fields: Mapping[str, Any]) -> Observation | Turn:
    """Raises TypeError or KeyError for fields of neither kind."""
    if "messages" in fields:
        return Observation(tuple(Message(role=m["role"], content=m["content"]) for m in fields["messages"]))
    return Turn(**fields)
