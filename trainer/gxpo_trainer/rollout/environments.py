"""The environments of a run: an EnvironmentHost in a Ray actor that all engines share, and its handle in each engine.

The actor is asynchronous; its processes do the work. Ray restarts it when it dies and calls it again for what was
running; as each call has the history of its episode, the episodes continue.

In each engine a thread watches the actor while calls are waiting. When the actor does not answer within
`PROBE_LIMIT_S`, it is killed; Ray restarts it and repeats the calls. A call that was running in `MAX_DEATHS` actors
that died fails alone; when the actor does not answer `MAX_SILENT` times in a row, all calls fail with a TrainingError.
What the run waits meanwhile is not counted as training time.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import Any

import ray

from gxpo_trainer.config import RunConfig
from gxpo_trainer.environments.contract import Call, Reply
from gxpo_trainer.environments.host import EnvironmentHost
from gxpo_trainer.errors import TrainingError
from gxpo_trainer.runtime.placement import Placement
from gxpo_trainer.runtime.progress import ProgressWatch
from gxpo_trainer.runtime.ray_session import TracedProcess, end_stalled, trace_this_process

PROBE_INTERVAL_S = 5.0
PROBE_LIMIT_S = 60.0
"""The actor's event loop answers in milliseconds; it takes seconds to start on a busy machine."""
LOOK_S = 1.0
"""Between two looks of the driver."""
NOTICED_S = 10.0
"""An answer that takes longer was not late by load."""
MAX_SILENT = 5
MAX_DEATHS = 5
CLOSE_LIMIT_S = 10.0


class EnvironmentActor(EnvironmentHost):
    """The host in a process of its own."""

    _process: TracedProcess | None = None

    def process(self) -> TracedProcess:
        """The same for as long as it runs; answered while calls are running."""
        self._process = self._process or trace_this_process()
        return self._process


class EnvironmentHandle:
    """Runs the episodes of a run, by the actor. May be sent to another process before the first call."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self._changed = threading.Condition()
        self._deaths: dict[Future[Reply], int] = {}
        """Of the actor, since each of the calls that wait was made."""
        self._killed = threading.Event()
        threading.Thread(target=self._watch, name="environments", daemon=True).start()

    def __reduce__(self) -> tuple[type[EnvironmentHandle], tuple[Any]]:
        return EnvironmentHandle, (self.actor,)

    def advance(self, call: Call) -> Future[Reply]:
        """Reply to a call; a failure of the environment is a Reply. The future has an exception, a GxpoError, only when
        no environment can be run at all."""
        future: Future[Reply] = Future()
        with self._changed:
            self._deaths[future] = 0
            self._changed.notify_all()
        self.actor.advance.remote(call).future().add_done_callback(lambda done: self._settle(future, done))
        return future

    def end(self, episode: str) -> None:
        """The episode needs its process no longer. May be called for an unknown or ended episode."""
        self.actor.end.remote(episode)

    def end_all(self, prefix: str) -> None:
        """End the episodes of an engine that was lost, whose names have this prefix."""
        self.actor.end_all.remote(prefix)

    def exclude_waits(self, watch: ProgressWatch) -> None:
        """Exclude from the run's time what it waits while the actor restarts or is stopped, until `kill`."""
        threading.Thread(target=self._exclude_waits, args=(watch,), name="environment waits", daemon=True).start()

    def _exclude_waits(self, watch: ProgressWatch) -> None:
        last = None
        while not self._killed.wait(LOOK_S):
            begin = time.monotonic()
            try:
                process = ray.get(self.actor.process.remote())
            except ray.exceptions.RayError:
                return  # dead for good, or Ray is shut down
            waited_s = time.monotonic() - begin
            if last not in (None, process) or waited_s > NOTICED_S:
                watch.exclude_wait(waited_s + LOOK_S)
            last = process

    def kill(self) -> None:
        """End the actor and its processes."""
        self._killed.set()
        # A process that an episode has started survives when its ancestors are killed all at once.
        ray.wait([self.actor.aclose.remote()], timeout=CLOSE_LIMIT_S)
        ray.kill(self.actor, no_restart=True)

    def _settle(self, future: Future[Reply], done: Future[Reply]) -> None:
        error = done.exception()
        if isinstance(error, ray.exceptions.RayActorError):
            first_line = str(error).strip().splitlines()[0]
            error = TrainingError(f"the environment actor died ({first_line})", reason="setup_failed")
        self._finish(future, error or done.result())

    def _finish(self, future: Future[Reply], reply: Reply | BaseException) -> None:
        """Resolve a call unless it is resolved already."""
        with self._changed:
            if self._deaths.pop(future, None) is None:
                return
        if isinstance(reply, BaseException):
            future.set_exception(reply)
        else:
            future.set_result(reply)

    def _watch(self) -> None:
        """Kill the actor when it does not answer, and fail calls that have lost too many; in a thread of its own."""
        silent, last = 0, None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._deaths)
            try:
                process = ray.get(self.actor.process.remote(), timeout=PROBE_LIMIT_S)
                silent = 0
            except ray.exceptions.GetTimeoutError:
                end_stalled({"environment actor": (self.actor, last if silent == 0 else None)})
                silent, process = silent + 1, last
            except ray.exceptions.RayActorError:
                return  # dead for good: the calls fail by themselves
            with self._changed:
                if last not in (None, process):
                    self._deaths = {future: deaths + 1 for future, deaths in self._deaths.items()}
                waiting, last = dict(self._deaths), process
            for future, deaths in waiting.items():
                if silent >= MAX_SILENT:
                    times = f"{MAX_SILENT} times in a row, each time for {PROBE_LIMIT_S:g} s"
                    stalled = TrainingError(f"the environment actor did not answer {times}", reason="stalled")
                    self._finish(future, stalled)
                elif deaths >= MAX_DEATHS:
                    detail = f"the environment actor died {deaths} times while this call was running"
                    self._finish(future, Reply(None, "error", detail))
            time.sleep(PROBE_INTERVAL_S)


def start_environments(config: RunConfig, placement: Placement) -> EnvironmentHandle | None:
    """Start the actor of a run with an environment of several turns, without waiting; None for other runs."""
    if not config.environment.multi_turn:
        return None
    # Placed with the verifier, whose logical CPUs it shares: a run waits for one or the other. Ray itself restarts it
    # and repeats the calls: the engines, not this process, wait for them.
    options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}
    options = placement.verifier_options() | options
    # For a call that a lost engine made just before its episodes were ended; no turn is sampled for longer.
    idle_s = 2 * max(config.timeouts.sampling_s, config.timeouts.evaluating_s)
    handle = EnvironmentHandle(ray.remote(EnvironmentActor).options(**options).remote(config.environment, idle_s))
    handle.exclude_waits(placement.group.watch)
    return handle
