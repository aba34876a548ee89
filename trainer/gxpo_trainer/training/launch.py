"""One launch of a run in its folder: lock, pause and cancel requests, outcome, and the service that launched it."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal, Self

from gxpo_trainer.config.base import STOP_WAIT_S, idle_phase
from gxpo_trainer.errors import ConfigError, Stalled, TrainingError
from gxpo_trainer.jsonl import write_json
from gxpo_trainer.reporting.outcome import OUTCOME, Outcome, failure_message, is_recoverable, reason_of
from gxpo_trainer.reporting.reporter import RunReporter
from gxpo_trainer.reporting.uploader import PREPARING, ControlRequest, ServiceAddress, Uploader
from gxpo_trainer.runtime.locks import WAIT_S, RunLock

TERMINATED = 128 + signal.SIGTERM
"""Exit code of a run that SIGTERM ended, as a shell reports it."""
ON_REQUEST: dict[str, Literal["paused", "cancelled"]] = {"pause": "paused", "cancel": "cancelled"}


class Launch:
    """From the lock to the outcome.

    Order: entering starts the heartbeats, then acquires the lock, so that an entered `Launch` owns the folder; `begin`
    once every check has passed and the run's files are open; `control_request` between steps; `end` or an exception.
    Leaving writes outcome.json first, then uploads what the service lacks, and releases the lock last.

    A launch that was stopped from outside (SIGTERM, Ctrl-C) or whose run another launch has taken over leaves no
    outcome. A config that is refused leaves one only for a service, which would otherwise not learn of it.

    SIGTERM ends the run after a checkpoint: a batch that is being sampled is given up, an update that has begun is
    completed. A run that has not ended after GXPO_STOP_WAIT_S seconds exits where it is.
    """

    def __init__(self, out_dir: Path, service: ServiceAddress | None = None, *, wait_s: float = WAIT_S) -> None:
        self.out_dir = out_dir
        self.attempt = service.attempt if service else 1
        self.after = service.after if service else 0
        self.terminated = False
        self._stop_wait_s = stop_wait_s()
        self._killer: threading.Timer | None = None
        self._lock = RunLock(out_dir, wait_s)
        self._uploader = Uploader(service, out_dir) if service else None
        self._reporter: RunReporter | None = None
        self.phase = PREPARING
        """What the launch is doing, in words: `training`, `waiting for 3 GPUs`."""
        self._ended: str | None = None
        self._reason: str | None = None
        self._earlier_handler: Any = None

    @property
    def serves(self) -> bool:
        """Whether a service launched this run."""
        return self._uploader is not None

    @property
    def fenced(self) -> str | None:
        """Why this launch no longer owns the run; None while it does."""
        return self._uploader.fenced if self._uploader is not None else None

    @property
    def exit_code(self) -> int:
        """Of a launch that raised nothing: 143 when SIGTERM ended it, else 0."""
        return TERMINATED if self.terminated and self._ended == "pause" else 0

    def __enter__(self) -> Self:
        if self._uploader is not None:
            self._uploader.start()
        try:
            self._lock.acquire()
        except BaseException:
            if self._uploader is not None:
                self._uploader.abandon()
            raise
        if self.serves:
            (self.out_dir / OUTCOME).unlink(missing_ok=True)
        self.watch_sigterm()
        return self

    def watch_sigterm(self) -> None:
        """Make SIGTERM end the run after a checkpoint. Called again once Ray has started and set its own handler."""
        if threading.current_thread() is threading.main_thread():
            earlier = signal.signal(signal.SIGTERM, self._terminate)
            if self._earlier_handler is None:
                self._earlier_handler = earlier

    def begin(self, reporter: RunReporter) -> None:
        """Start the run: its files are open, and the uploader follows them."""
        (self.out_dir / OUTCOME).unlink(missing_ok=True)
        self._reporter = reporter
        if self._uploader is not None:
            self._uploader.follow()

    def enter_phase(self, phase: str) -> None:
        """Record and report what the launch is doing from now on."""
        if phase != self.phase:
            self.phase = phase
            if self._uploader is not None:
                self._uploader.enter_phase(phase)

    def show_idle(self, minutes: int, limit_s: float) -> None:
        """Show with the phase that it makes no progress, and its time-out; 0 minutes: it does again."""
        if self._uploader is not None:
            self._uploader.enter_phase(idle_phase(self.phase, minutes, limit_s))

    def end_stalled(self, error: Stalled) -> None:
        """End this process, whose main thread hangs: log its stacks and leave an outcome. Ray kills its actors."""
        print(f"gxpo: {error}; the stacks of all threads follow", file=sys.stderr)
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        self._conclude(self._outcome(error))
        os._exit(error.exit_code)

    def control_request(self) -> ControlRequest | None:
        """The pause or cancel request for this step boundary. Raises TrainingError when another launch owns the run."""
        self._check_owner()
        if self._uploader is not None and self._reporter is not None:
            for message in self._uploader.take_events():
                self._reporter.log_event("upload_refused", message)
        if self.terminated:
            return "pause"
        return self._uploader.request if self._uploader is not None else None

    def end(self, ended: str) -> None:
        """Record what ended the run: the bound of the budget that was reached, or `pause` or `cancel`."""
        self._check_owner()
        self._ended = ended

    def fail(self, error: BaseException, *, setting_up: bool) -> str:
        """Record and return the failure reason of the outcome."""
        self._reason = reason_of(error, setting_up=setting_up)
        return self._reason

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._conclude(self._outcome(error))
        finally:
            if self._earlier_handler is not None:
                signal.signal(signal.SIGTERM, self._earlier_handler)
            if self._killer is not None:
                self._killer.cancel()
            self._lock.release(discard=self._reporter is None and not self.serves)

    def _conclude(self, outcome: Outcome | None) -> None:
        """Write outcome.json and upload what the service lacks."""
        told = asdict(outcome) if outcome else None
        if told is not None:
            try:
                write_json(self.out_dir / OUTCOME, told)
            except OSError as error:  # such as a full disk; the error that ended the run must still be reported
                print(f"gxpo: cannot write {self.out_dir / OUTCOME}: {error}", file=sys.stderr)
        if (uploader := self._uploader) is not None:
            delivered = uploader.finish(told)
            for message in uploader.take_events():
                print(f"gxpo: upload refused: {message}", file=sys.stderr)
            if not delivered and uploader.fenced is None:
                lost = f"the service at {uploader.service.url} did not accept the last rows; they are in {self.out_dir}"
                print(f"gxpo: {lost}", file=sys.stderr)

    def _outcome(self, error: BaseException | None) -> Outcome | None:
        now = time.time()
        if self.fenced is not None:
            return None
        if error is not None:
            if not isinstance(error, Exception) or (self._reporter is None and not self.serves):
                return None
            reason = self._reason or reason_of(error, setting_up=self._reporter is None)
            message, recoverable = failure_message(error), is_recoverable(error)
            return Outcome(self.attempt, "failed", now, reason=reason, message=message, recoverable=recoverable)
        if self._ended is None or self.exit_code:
            return None
        if status := ON_REQUEST.get(self._ended):
            return Outcome(self.attempt, status, now, message=f"{status} on request")
        return Outcome(self.attempt, "succeeded", now, ended_by=self._ended, message=f"budget.{self._ended} is reached")

    def _check_owner(self) -> None:
        if self.fenced is not None:
            raise TrainingError(f"{self.out_dir}: {self.fenced}; another launch owns the run, or it was deleted")

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        if not self.terminated:
            self.terminated = True
            self._killer = threading.Timer(self._stop_wait_s, self._end_terminated)
            self._killer.daemon = True
            self._killer.start()

    def _end_terminated(self) -> None:
        """End this process, which SIGTERM has not ended in time. Ray kills its actors."""
        print(
            f"gxpo: not ended {self._stop_wait_s:g} s after SIGTERM, while {self.phase}; --resume continues from the "
            "last checkpoint (GXPO_STOP_WAIT_S sets the limit)",
            file=sys.stderr,
            flush=True,
        )
        os._exit(TERMINATED)


def stop_wait_s() -> float:
    """Seconds from SIGTERM to the end of a run, from GXPO_STOP_WAIT_S. Raises ConfigError."""
    text = os.environ.get("GXPO_STOP_WAIT_S") or str(STOP_WAIT_S)
    try:
        if 0 < float(text) < threading.TIMEOUT_MAX:
            return float(text)
    except ValueError:
        pass
    raise ConfigError(f"GXPO_STOP_WAIT_S = {text!r} must be a number of seconds above 0")
