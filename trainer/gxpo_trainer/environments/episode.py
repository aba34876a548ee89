"""The process of one episode: creates the environment and answers its calls, one JSON line each, on a socket.

In: `{"problem": …, "seed": …}` once, then `{"action": …}`. Out: the answer's fields (`contract.answer_to_json`), or
`{"failure": "what went wrong"}`. The environment's standard streams are /dev/null: what it prints does not reach
the socket.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from gxpo_trainer.environments.base import Environment, Observation, Turn
from gxpo_trainer.environments.contract import (
    EnvironmentFailed,
    answer_to_json,
    checked_observation,
    checked_turn,
    problem_from_json,
)

OUT_OF_MEMORY = "out of memory (environment.memory_mb)"
_MAX_DETAIL = 500


def serve_episode(channel: socket.socket, create: Callable[[], Environment], name: str) -> None:
    """Answer calls until the other end is closed. name: of the class, for messages."""
    redirect_to_null(0, 1, 2)
    environment: Environment | None = None
    for line in channel.makefile("rb"):
        try:
            request = json.loads(line)
            if environment is None:
                environment = _call(create, f"{name}.__init__")
            reply = answer_to_json(_answer(environment, request, name))
        except EnvironmentFailed as error:
            reply = {"failure": str(error)[:_MAX_DETAIL]}
        except MemoryError:
            reply = {"failure": OUT_OF_MEMORY}
        channel.sendall(json.dumps(reply).encode() + b"\n")


def _answer(environment: Environment, request: Mapping[str, Any], name: str) -> Observation | Turn:
    if "action" in request:
        action = request["action"]
        return checked_turn(_call(lambda: environment.step(action), f"{name}.step"), name)
    problem, seed = problem_from_json(request["problem"]), request["seed"]
    return checked_observation(_call(lambda: environment.reset(problem, seed), f"{name}.reset"), name)


def _call(function: Callable[[], Any], name: str) -> Any:
    """The function's result. Raises MemoryError, and EnvironmentFailed for any other exception."""
    try:
        return function()
    except MemoryError:
        raise
    except BaseException as error:  # third-party code may raise anything, also SystemExit
        raise EnvironmentFailed(
            f"{name} raised {type(error).__name__}: {str(error)[:300]} ({_place(error.__traceback__)})"
        ) from error


def _place(trace: TracebackType | None) -> str:
    """File and line that raised, without reading the file."""
    assert trace is not None
    while trace.tb_next is not None:
        trace = trace.tb_next
    return f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"


def redirect_to_null(*descriptors: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(null, descriptor)
    os.close(null)
