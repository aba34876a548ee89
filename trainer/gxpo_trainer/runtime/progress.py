"""When a run last made progress, and a thread that notices when its main thread makes none for too long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

from gxpo_trainer.config.base import Phase, TimeoutsConfig
from gxpo_trainer.errors import Interrupted, Stalled

MAIN_THREAD_GRACE_S = 30.0
"""Time beyond its limit that the main thread has to notice a stall by itself, before the watchdog ends the process."""
_PAUSED_S = 10.0
"""A poll that is this late was not late by load: the process was stopped."""
_SAMPLES: tuple[Phase, ...] = ("sampling", "evaluating")
_ABANDONABLE: tuple[Phase, ...] = ("setup", "sampling", "verifying", "evaluating")
"""Waits that leave the learner as it is."""


class ProgressWatch:
    """Time since the last progress. One thread reports progress, another may read it.

    A wait for an actor is a phase: `begin` before it, `check` while it lasts, `progressed` after each answer. Between
    waits the last phase continues, so a main thread that hangs anywhere is noticed. clock: monotonic seconds.
    interrupted: whether the run must end now; see `abandonable`.
    """

    def __init__(
        self,
        timeouts: TimeoutsConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        self.timeouts = timeouts or TimeoutsConfig()
        self._interrupted, self._abandonable = interrupted, False
        self.phase: Phase = "setup"
        self._stalled_s = self._starting_s = 0.0
        self._clock = clock
        self._since = clock()
        self._changing = threading.RLock()
        self.learning = False
        """Whether the learner works, also while the phase is that of what is sampled meanwhile."""
        self._next_poll: float | None = None

    def begin(self, phase: Phase) -> None:
        """Enter a phase, or wait for its next answer. Raises Interrupted as `check` does."""
        self.phase, self._since = phase, self._now()
        self.check_interrupted()

    def progressed(self) -> None:
        """The wait was answered, or nothing is waited for."""
        if self.phase == "setup":  # a process that starts does no work of the run
            self._starting_s += self.idle_s
        self._since = self._now()

    def exclude(self, seconds: float) -> None:
        """Do not count a time in which progress was impossible, such as a wait for a lost node or a stopped process."""
        with self._changing:
            self._since = min(self._since + seconds, self._clock())
            self._stalled_s += seconds

    def exclude_wait(self, seconds: float) -> None:
        """Exclude the last `seconds` of a wait for samples alone, as far as nothing progressed in them."""
        with self._changing:
            if self.phase in _SAMPLES and not self.learning:
                self.exclude(min(seconds, self.idle_s))

    def poll(self, next_s: float | None) -> None:
        """Exclude a pause of the whole process. The watchdog calls it again within next_s, None: not again.

        Each look at the clock asks as well: after a pause the main thread may wake before the watchdog.
        """
        with self._changing:
            self._exclude_pause()
            self._next_poll = None if next_s is None else time.monotonic() + next_s

    def _exclude_pause(self) -> None:
        with self._changing:
            now = time.monotonic()
            if self._next_poll is not None and (paused_s := now - self._next_poll) > _PAUSED_S:
                self._next_poll = now
                self.exclude(paused_s)

    def _now(self) -> float:
        self._exclude_pause()
        return self._clock()

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Exclude the time that this block takes."""
        begin = self.working_s
        try:
            yield
        finally:
            self.exclude(max(0.0, self.working_s - begin))  # less than nothing after `exclude_wait`

    @contextmanager
    def abandonable(self) -> Iterator[None]:
        """Raise Interrupted from a wait in this block, unless the learner works or weights are sent."""
        self._abandonable = True
        try:
            yield
        finally:
            self._abandonable = False

    @property
    def idle_s(self) -> float:
        """Seconds since the last progress."""
        return self._now() - self._since

    @property
    def remaining_s(self) -> float:
        """Seconds until the phase counts as stalled, not negative."""
        return max(0.0, self.timeouts.limit_s(self.phase) - self.idle_s)

    @property
    def running_s(self) -> float:
        """A clock that stands still while the run is stalled or a time is excluded; only differences have a meaning."""
        return self._now() - self._stalled_s

    @property
    def working_s(self) -> float:
        """The same without the waits for a process to start: the clock of training time."""
        return self.running_s - self._starting_s

    def check(self) -> None:
        """Raise Stalled when the phase has made no progress within its limit, Interrupted when the run must stop."""
        self.check_interrupted()
        if self.remaining_s > 0:
            return
        with self._changing:
            error = _stalled(self.phase, self.idle_s, self.timeouts)
            self.exclude(self.idle_s)
        raise error

    def check_interrupted(self) -> None:
        """Raise Interrupted when the run must stop and the wait is abandonable."""
        if self._abandonable and self.phase in _ABANDONABLE and self._interrupted():
            raise Interrupted

    def check_since(self, begin: float, phase: Phase) -> None:
        """Raise Stalled when `phase`, begun at `begin` of `running_s`, has lasted beyond its limit.

        For a call during which others make progress, which would hide that this one does not return.
        """
        lasted = self.running_s - begin
        if lasted > self.timeouts.limit_s(phase):
            raise _stalled(phase, lasted, self.timeouts)


def _stalled(phase: Phase, seconds: float, timeouts: TimeoutsConfig) -> Stalled:
    doing = "setting up" if phase == "setup" else phase
    setting = f"timeouts.{phase}_s = {timeouts.limit_s(phase):g}"
    return Stalled(f"no progress for {seconds:.0f} s while {doing} ({setting})")


class Watchdog:
    """Calls `on_stall` once, from its own thread, when a phase exceeds its limit by `grace_s`.

    Waits for actors end at the limit by themselves and are recovered; what is left is a main thread that hangs in its
    own code, such as a write to a file server that does not answer. show_idle: called with whole minutes without
    progress (0 when there is progress again) and the phase's limit in seconds. A pause of the whole process (SIGSTOP)
    is not counted.
    """

    def __init__(
        self,
        watch: ProgressWatch,
        on_stall: Callable[[Stalled], None],
        show_idle: Callable[[int, float], None] = lambda minutes, limit_s: None,
        *,
        grace_s: float = MAIN_THREAD_GRACE_S,
        poll_s: float = 1.0,
    ) -> None:
        self._watch, self._on_stall, self._show_idle = watch, on_stall, show_idle
        self._grace_s, self._poll_s = grace_s, poll_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._watch.progressed()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        self._watch.poll(None)

    def _run(self) -> None:
        reported = 0
        self._watch.poll(self._poll_s)
        while not self._stop.wait(self._poll_s):
            self._watch.poll(self._poll_s)
            phase, idle_s = self._watch.phase, self._watch.idle_s
            limit_s = self._watch.timeouts.limit_s(phase)
            if idle_s > limit_s + self._grace_s:
                self._on_stall(_stalled(phase, idle_s, self._watch.timeouts))
                return
            if (minutes := int(idle_s / 60)) != reported:
                reported = minutes
                self._show_idle(minutes, limit_s)
