"""The environments of a run: a Ray actor that all engines share, and its handle in each engine.

The actor is asynchronous; its processes do the work. Ray restarts it when it dies and calls it again for what was
running; as each call has the history of its episode, the episodes continue. A call that was running in `MAX_DEATHS`
actors that died fails alone. When engines stall, the actor is restarted with them, because they may wait for it.
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from typing import Any

import ray

from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.tasks import EnvironmentConfig
from gxpo_trainer.environments.contract import Call, Reply
from gxpo_trainer.environments.host import EnvironmentHost
from gxpo_trainer.runtime.placement import Placement

MAX_DEATHS = 5
CLOSE_LIMIT_S = 10.0


class EnvironmentHandle:
    """`Environments` over the actor; may be sent to another process."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def advance(self, call: Call) -> Future[Reply]:
        reply: Future[Reply] = Future()

        def settle(done: Future[Reply]) -> None:
            error = done.exception()
            if isinstance(error, ray.exceptions.RayActorError):
                detail = f"the environment actor died {MAX_DEATHS} times while this call was running"
                reply.set_result(Reply(None, "error", detail))
            elif error is not None:
                reply.set_exception(error)
            else:
                reply.set_result(done.result())

        self._actor.advance.remote(call).future().add_done_callback(settle)
        return reply

    def end(self, episode: str) -> None:
        self._actor.end.remote(episode)


class EnvironmentActor:
    """An EnvironmentHost in an actor."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self._host = EnvironmentHost(config)

    async def advance(self, call: Call) -> Reply:
        """The environment's answer. Raises ConfigError, TrainingError when no process can be started."""
        return await self._host.advance(call)

    async def end(self, episode: str) -> None:
        self._host.end(episode)

    async def pid(self) -> int:
        """Process id; returned while calls are running."""
        return os.getpid()

    async def episode_pids(self) -> dict[str, int]:
        return self._host.pids

    async def close(self) -> None:
        """End all processes, also those that episodes have started."""
        await self._host.close()


class RunEnvironments:
    """The actor of a run with an environment of several turns; nothing in other runs."""

    def __init__(self, config: RunConfig, placement: Placement) -> None:
        self._config, self._placement = config.environment, placement
        self.actor: Any = None

    def start(self) -> EnvironmentHandle | None:
        """Start the actor without waiting; its handle for the engines."""
        if not self._config.multi_turn:
            return None
        # Ray itself restarts it and repeats the calls: the engines, not this process, wait for them.
        restarted = {"max_restarts": -1, "max_task_retries": MAX_DEATHS - 1}
        options = {**self._placement.environment_options(), **restarted}
        self.actor = ray.remote(EnvironmentActor).options(**options).remote(self._config)
        return EnvironmentHandle(self.actor)

    def restart(self) -> None:
        """Let Ray restart an actor that may hang; its calls are repeated."""
        if self.actor is not None:
            ray.kill(self.actor, no_restart=False)

    def kill(self) -> None:
        if self.actor is None:
            return
        # A process that an episode has started survives when its ancestors are killed all at once.
        ray.wait([self.actor.close.remote()], timeout=CLOSE_LIMIT_S)
        ray.kill(self.actor, no_restart=True)
        self.actor = None
