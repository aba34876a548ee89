"""The environments of a run as an engine calls them.

A thread watches the actor while calls are waiting. When the actor does not answer within `PROBE_LIMIT_S`, it is killed;
Ray restarts it and repeats the calls. A call that was running in `MAX_DEATHS` actors that died fails alone; when the
actor does not answer `MAX_SILENT` times in a row, all calls fail with a TrainingError.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import ray

from gxpo_trainer.environments.calls import Call, Reply
from gxpo_trainer.errors import TrainingError

PROBE_INTERVAL_S = 5.0
PROBE_LIMIT_S = 60.0
"""The actor's event loop answers in milliseconds; it takes seconds to start on a busy machine."""
MAX_SILENT = 5
MAX_DEATHS = 5


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
        if error is None:
            self._finish(waiting, done.result())
        elif isinstance(error, ray.exceptions.RayActorError):
            first_line = str(error).strip().splitlines()[0]
            self._fail(waiting, TrainingError(f"the environment actor died ({first_line})", reason="setup_failed"))
        else:
            self._fail(waiting, error)

    def _finish(self, waiting: _Waiting, reply: Reply) -> None:
        if self._forget(waiting):
            waiting.future.set_result(reply)

    def _fail(self, waiting: _Waiting, error: BaseException) -> None:
        if self._forget(waiting):
            waiting.future.set_exception(error)

    def _forget(self, waiting: _Waiting) -> bool:
        """Whether the call was still waiting."""
        with self._watching():
            known = waiting in self._waiting
            self._waiting.discard(waiting)
            return known

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
            answered = self._probe()
            silent = 0 if answered else silent + 1
            for waiting in known:
                if silent >= MAX_SILENT:
                    times = f"{MAX_SILENT} times in a row, each time for {PROBE_LIMIT_S:g} s"
                    self._fail(
                        waiting, TrainingError(f"the environment actor did not answer {times}", reason="stalled")
                    )
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
