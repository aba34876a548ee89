"""When a run last made progress, and how long each phase may make none."""

from __future__ import annotations

import time
from collections.abc import Callable

from gxpo_trainer.config.timeouts import Phase, TimeoutsConfig
from gxpo_trainer.errors import Stalled

MAIN_THREAD_GRACE_S = 30.0
"""Time beyond its limit that the main thread has to notice a stall by itself, before the watchdog ends the process."""


class ProgressWatch:
    """Time since the last progress. One thread reports progress, another may read it.

    A wait for an actor is a phase: `begin` before it, `check` while it lasts, `progressed` after each answer. Between
    waits the last phase continues, so a main thread that hangs anywhere is noticed. clock: monotonic seconds.
    """

    def __init__(self, timeouts: TimeoutsConfig | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeouts = timeouts or TimeoutsConfig()
        self.phase: Phase = "setup"
        self._stalled_s = 0.0
        self._clock = clock
        self._since = clock()

    def begin(self, phase: Phase) -> None:
        """Enter a phase, or wait for its next answer."""
        self.phase, self._since = phase, self._clock()

    def progressed(self) -> None:
        self._since = self._clock()

    def excuse(self, seconds: float) -> None:
        """Do not count a time in which progress was impossible, such as a wait for a lost node or a stopped process."""
        self._since += seconds
        self._stalled_s += seconds

    @property
    def idle_s(self) -> float:
        """Seconds since the last progress."""
        return self._clock() - self._since

    @property
    def limit_s(self) -> float:
        """Seconds without progress after which the present phase has stalled."""
        return self.timeouts.limit_s(self.phase)

    @property
    def remaining_s(self) -> float:
        """Seconds until the phase counts as stalled, not negative."""
        return max(0.0, self.limit_s - self.idle_s)

    @property
    def working_s(self) -> float:
        """A clock that stands still while the run is stalled or excused; only differences have a meaning."""
        return self._clock() - self._stalled_s

    def check(self) -> None:
        """Raise Stalled when the phase has made no progress within its limit."""
        if self.remaining_s > 0:
            return
        self._stalled_s += self.idle_s
        error = self.describe()
        self.progressed()
        raise error

    def check_since(self, begin: float, phase: Phase) -> None:
        """Raise Stalled when `phase`, begun at `begin` of `working_s`, has lasted beyond its limit.

        For a call during which others make progress, which would hide that this one does not return.
        """
        lasted = self.working_s - begin
        if lasted > self.timeouts.limit_s(phase):
            self._stalled_s += lasted
            raise _stalled(phase, lasted, self.timeouts)

    def describe(self) -> Stalled:
        """The error of the present phase."""
        return _stalled(self.phase, self.idle_s, self.timeouts)


def _stalled(phase: Phase, seconds: float, timeouts: TimeoutsConfig) -> Stalled:
    doing = "setting up" if phase == "setup" else phase
    setting = f"timeouts.{phase}_s = {timeouts.limit_s(phase):g}"
    return Stalled(f"no progress for {seconds:.0f} s while {doing} ({setting})")
