"""Checks the environment of a run before it starts."""

from __future__ import annotations

import asyncio
import os

from gxpo_trainer.config.environment import EnvironmentConfig
from gxpo_trainer.environments.host import EnvironmentHost
from gxpo_trainer.environments.loading import check_allowed
from gxpo_trainer.errors import ConfigError, TrainingError


def check_environment(config: EnvironmentConfig) -> None:
    """Raises ConfigError when the class or address is not allowed, the class cannot be imported, which is tried in a
    process of its own, or it violates the contract."""
    if config.multi_turn:
        check_allowed(config.model_dump(), os.environ)
        asyncio.run(_start(config))


async def _start(config: EnvironmentConfig) -> None:
    host = EnvironmentHost(config)
    try:
        await host.start()
    except TrainingError as error:
        raise ConfigError(f"environment: {error}") from error
    finally:
        await host.close()
