"""The environments of a run: a Ray actor that all engines share, and its handle in each engine.

The actor is asynchronous; its processes do the work. Ray restarts it when it dies and calls it again for what was
running; as each call has the history of its episode, the episodes continue.

In each engine a thread watches the actor while calls are waiting. When the actor does not answer within
`PROBE_LIMIT_S`, it is killed; Ray restarts it and repeats the calls. A call that was running in `MAX_DEATHS` actors
that died fails alone; when the actor does not answer `MAX_SILENT` times in a row, all calls fail with a TrainingError.
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import ray

from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.tasks import EnvironmentConfig
from gxpo_trainer.environments.contract import Call, Reply
from gxpo_trainer.environments.host import EnvironmentHost
from gxpo_trainer.errors import TrainingError
from gxpo_trainer.runtime.placement import Placement

PROBE_INTERVAL_S = 5.0
PROBE_LIMIT_S = 60.0
"""The actor's event loop answers in milliseconds; it takes seconds to start on a busy machine."""
MAX_SILENT = 5
MAX_DEATHS = 5
CLOSE_LIMIT_S = 10.0


@dataclass(slots=True, eq=False)
class _Waiting:
    future: Future[Reply]
    deaths: int = 0


class EnvironmentHandle:
    """`Environments` over the actor. May be sent to another process before the first call."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._lock: threading.Condition | None = None
        self._waiting: set[_Waiting] = set()
        self._pid: int | None = None

    def __reduce__(self) -> tuple[type[EnvironmentHandle], tuple[Any]]:
        return EnvironmentHandle, (self._actor,)

    def advance(self, call: Call) -> Future[Reply]:
        """Reply to a call. The future has an exception, a GxpoError, only when no environment can be run at all."""
        waiting = _Waiting(Future())
        changed = self._watching()
        with changed:
            self._waiting.add(waiting)
            changed.notify_all()
        self._actor.advance.remote(call).future().add_done_callback(lambda done: self._settle(waiting, done))
        return waiting.future

    def end(self, episode: str) -> None:
        self._actor.end.remote(episode)

    def _settle(self, waiting: _Waiting, done: Future[Reply]) -> None:
        error = done.exception()
        if isinstance(error, ray.exceptions.RayActorError):
            first_line = str(error).strip().splitlines()[0]
            error = TrainingError(f"the environment actor died ({first_line})", reason="setup_failed")
        self._finish(waiting, done.result() if error is None else error)

    def _finish(self, waiting: _Waiting, reply: Reply | BaseException) -> None:
        """Resolve a call unless it is resolved already."""
        with self._watching():
            if waiting not in self._waiting:
                return
            self._waiting.discard(waiting)
        if isinstance(reply, BaseException):
            waiting.future.set_exception(reply)
        else:
            waiting.future.set_result(reply)

    def _watching(self) -> threading.Condition:
        """The lock of `_waiting`; starts the thread at the first call."""
        if self._lock is None:
            self._lock = threading.Condition()
            threading.Thread(target=self._watch, args=(self._lock,), name="environments", daemon=True).start()
        return self._lock

    # In the watching thread.

    def _watch(self, changed: threading.Condition) -> None:
        silent = 0
        while True:
            with changed:
                while not self._waiting:
                    changed.wait()
                known = list(self._waiting)
            alive = self._probe()
            silent = 0 if alive else silent + 1
            for waiting in known:
                if silent >= MAX_SILENT:
                    times = f"{MAX_SILENT} times in a row, each time for {PROBE_LIMIT_S:g} s"
                    error = TrainingError(f"the environment actor did not answer {times}", reason="stalled")
                    self._finish(waiting, error)
                elif waiting.deaths >= MAX_DEATHS:
                    detail = f"the environment actor died {waiting.deaths} times while this call was running"
                    self._finish(waiting, Reply(None, "error", detail))
            time.sleep(PROBE_INTERVAL_S)

    def _probe(self) -> bool:
        """Whether the actor answers. Kills it when it does not, and counts its deaths for the calls that wait."""
        try:
            pid = ray.get(self._actor.pid.remote(), timeout=PROBE_LIMIT_S)
        except ray.exceptions.GetTimeoutError:
            ray.kill(self._actor, no_restart=False)
            return False
        except ray.exceptions.RayActorError:
            return True  # dead for good: the calls fail by themselves
        if self._pid not in (None, pid):
            with self._watching():
                for waiting in self._waiting:
                    waiting.deaths += 1
        self._pid = pid
        return True


class EnvironmentActor:
    """An EnvironmentHost in an actor."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self._config = config
        self._host: EnvironmentHost | None = None

    async def advance(self, call: Call) -> Reply:
        """The environment's answer. Raises ConfigError, TrainingError when no process can be started."""
        return await self._running_host().advance(call)

    async def end(self, episode: str) -> None:
        """The episode needs its process no longer."""
        self._running_host().end(episode)

    async def pid(self) -> int:
        """Process id; returned while calls are running."""
        return os.getpid()

    async def episode_pids(self) -> dict[str, int]:
        """Process ids of the episodes by name."""
        return self._running_host().pids

    async def close(self) -> None:
        """End all processes, also those that episodes have started."""
        await self._running_host().close()

    def _running_host(self) -> EnvironmentHost:
        # In the event loop's thread, with which the processes end.
        if self._host is None:
            self._host = EnvironmentHost(self._config)
        return self._host


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
        restarted = {"max_restarts": -1, "max_task_retries": -1}
        options = {**self._placement.environment_options(), **restarted}
        self.actor = ray.remote(EnvironmentActor).options(**options).remote(self._config)
        return EnvironmentHandle(self.actor)

    def kill(self) -> None:
        """End the actor and its processes."""
        if self.actor is None:
            return
        # A process that an episode has started survives when its ancestors are killed all at once.
        ray.wait([self.actor.close.remote()], timeout=CLOSE_LIMIT_S)
        ray.kill(self.actor, no_restart=True)
        self.actor = None
