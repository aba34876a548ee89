"""Checks the environment of a run before it starts."""

from __future__ import annotations

import asyncio
import os

from gxpo_trainer.config.environment import EnvironmentConfig
from gxpo_trainer.environments.base import Problem
from gxpo_trainer.environments.calls import Call, Reply
from gxpo_trainer.environments.host import EnvironmentHost
from gxpo_trainer.environments.loading import check_allowed
from gxpo_trainer.errors import ConfigError, TrainingError


def check_environment(config: EnvironmentConfig, problem: Problem, seed: int) -> None:
    """Begin an episode of this problem, in a process of its own as in the run.

    Raises ConfigError when the class or address is not allowed, the class cannot be imported or violates the contract,
    or the episode does not begin.
    """
    if not config.multi_turn:
        return
    check_allowed(config.model_dump(), os.environ)
    try:
        reply = asyncio.run(_first_reply(config, Call("check", problem, seed)))
    except TrainingError as error:
        raise ConfigError(f"environment: {error}") from error
    if reply.answer is None:
        raise ConfigError(
            f"environment.name = {config.name!r} does not begin an episode of problem {problem.id}: {reply.detail}"
        )


async def _first_reply(config: EnvironmentConfig, call: Call) -> Reply:
    host = EnvironmentHost(config)
    try:
        return await host.advance(call)
    finally:
        await host.close()
