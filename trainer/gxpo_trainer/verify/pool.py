"""Killable verifier processes with a wall clock.

Each worker is a thread with a process of its own; the threads take batches from one queue, and callers hand work over
with `submit` from any thread and wait on a future. Order of events for one answer:

    queued -> sent (in a batch) -> in progress, clock running -> verdict
                                         |-> deadline passed: process killed, verdict `wrong` or `timeout`
                                         |-> process died: answer resubmitted alone; died twice: verdict `error`

Which verdict a deadline gives depends on the CPU time of the process. An honest answer is judged in milliseconds; one
that computes for most of the deadline is built to evade a verdict, and is `wrong`, with the reason in `detail`. Where
the process did not get that CPU time (a busy machine), or where a reward component was running, it is `timeout`, which
carries no reward. The rest of a killed process's batch goes back to the head of the queue. Start-up of a process (about
two seconds, in parallel) is not charged to an answer.
"""

from __future__ import annotations

import collections
import concurrent.futures
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from gxpo_trainer.errors import VerifierFailed
from gxpo_trainer.types import EVASION, Verdict
from gxpo_trainer.verify.process import Pair, WorkerDied, WorkerProcess

MAX_BATCH = 32
MAX_BATCH_CHARS = 200_000
MAX_DEATHS = 2
MAX_FAILED_STARTS = 3
START_LIMIT_S = 120.0
EVASION_CPU_SHARE = 0.5
"""Share of the deadline, in CPU time, from which an answer without a verdict is `wrong`."""


@dataclass(slots=True, eq=False)
class _Job:
    """One call of `submit`: its verdicts, filled in any order, delivered together."""

    future: concurrent.futures.Future[list[Verdict]]
    verdicts: list[Verdict | None]
    missing: int


@dataclass(slots=True, eq=False)
class _Answer:
    """One pair on its way. `deaths`: processes that died while it was in progress."""

    job: _Job
    index: int
    pair: Pair
    deaths: int = 0


class VerifierPool:
    """Verifies (gold, response) pairs in killable processes.

    Args:
        workers: processes, at least 1.
        deadline_s: wall clock of one answer, seconds; past it the process is killed (see the module's text).
        memory_mb: address-space limit of a process, MiB; an answer that reaches it gets the verdict `error`.
        rewards: (name, weight) of the components that are scored for pairs that bring a `context`.

    Raises:
        ValueError: a setting out of range.
        VerifierFailed: (from a future) workers cannot be started at all.
    """

    def __init__(
        self,
        workers: int = 2,
        deadline_s: float = 5.0,
        memory_mb: int = 2048,
        rewards: Sequence[tuple[str, float]] = (),
    ) -> None:
        for name, value, least in (("workers", workers, 1), ("memory_mb", memory_mb, 256)):
            if value < least:
                raise ValueError(f"verifier.{name} is {value}; set it to at least {least}")
        if not deadline_s > 0:
            raise ValueError(f"verifier.deadline_s is {deadline_s}; set a positive number of seconds")
        self.deadline_s = deadline_s
        self._memory_mb = memory_mb
        self._rewards = tuple(rewards)
        self._queue: collections.deque[_Answer] = collections.deque()
        self._condition = threading.Condition()
        self._failure: Exception | None = None
        self._failed_starts = 0
        self._workers = [_Worker(self) for _ in range(workers)]
        for worker in self._workers:
            worker.start()

    def submit(self, pairs: Sequence[Pair]) -> concurrent.futures.Future[list[Verdict]]:
        """Hand over (gold, response) pairs; the future gives one verdict a pair, in order. Thread-safe."""
        future: concurrent.futures.Future[list[Verdict]] = concurrent.futures.Future()
        if not pairs:
            future.set_result([])
            return future
        job = _Job(future, [None] * len(pairs), len(pairs))
        with self._condition:
            if self._failure is not None:
                raise RuntimeError("this verifier pool is closed") from self._failure
            self._queue.extend(_Answer(job, i, pair) for i, pair in enumerate(pairs))
            self._condition.notify_all()
        return future

    def verify_many(self, pairs: Sequence[Pair]) -> list[Verdict]:
        """One verdict a pair, in order; waits for all of them. Raises VerifierFailed."""
        return self.submit(pairs).result()

    def worker_pids(self) -> list[int]:
        """Process ids of the present workers."""
        return [process.pid for worker in self._workers if (process := worker.process) is not None]

    def close(self) -> None:
        """Kill the workers and fail what is still open. May be called twice."""
        self.fail(RuntimeError("the verifier pool was closed before this answer was verified"))
        for worker in self._workers:
            worker.join()

    def __enter__(self) -> VerifierPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # For the workers' threads.

    def start_process(self) -> WorkerProcess:
        """A process of this pool's settings."""
        return WorkerProcess(self._memory_mb, self._rewards)

    def take_batch(self, worker: _Worker) -> bool:
        """Give a worker its share of the queue, small enough to keep all busy; waits for work. False: the pool ends."""
        with self._condition:
            self._condition.wait_for(lambda: self._queue or self.ended)
            if self.ended:
                return False
            share = max(1, min(MAX_BATCH, len(self._queue) // (2 * len(self._workers))))
            batch = worker.batch
            chars = 0
            while self._queue and len(batch) < share:
                answer = self._queue[0]
                chars += len(answer.pair[0]) + len(answer.pair[1])
                if batch and (answer.deaths or batch[0].deaths or chars > MAX_BATCH_CHARS):
                    break
                batch.append(self._queue.popleft())
            return True

    def requeue_batch(self, worker: _Worker) -> None:
        """Put a worker's unsettled answers back at the head of the queue, unless the pool has ended."""
        with self._condition:
            if not self.ended:
                self._queue.extendleft(reversed(worker.batch))
                worker.batch.clear()
                self._condition.notify_all()

    def settle_first(self, worker: _Worker, verdict: Verdict) -> None:
        """Record the verdict on a worker's first answer, and deliver its job's when it was the last."""
        with self._condition:
            if self.ended:
                return
            answer = worker.batch.pop(0)
            job = answer.job
            job.verdicts[answer.index] = verdict
            job.missing -= 1
            if job.missing == 0 and job.future.set_running_or_notify_cancel():
                job.future.set_result([verdict for verdict in job.verdicts if verdict is not None])

    def record_start(self, errors: str | None) -> None:
        """Count failed starts in a row; `errors` is the process's last output, None for a start that succeeded.

        Raises VerifierFailed after `MAX_FAILED_STARTS`.
        """
        with self._condition:
            self._failed_starts = 0 if errors is None else self._failed_starts + 1
            failed = self._failed_starts
        if failed >= MAX_FAILED_STARTS:
            raise VerifierFailed(
                f"verifier workers cannot be started ({failed} attempts in a row); is "
                f"verifier.memory_mb = {self._memory_mb} enough? Last output: {(errors or '').strip() or '(none)'}"
            )

    def fail(self, failure: Exception) -> None:
        """End the pool: every open future gets `failure`, every process is killed. The first failure counts."""
        with self._condition:
            if self.ended:
                return
            self._failure = failure
            answers = [*self._queue, *(answer for worker in self._workers for answer in worker.batch)]
            for job in {id(answer.job): answer.job for answer in answers}.values():
                if job.future.set_running_or_notify_cancel():
                    job.future.set_exception(failure)
            self._condition.notify_all()
        for worker in self._workers:
            if (process := worker.process) is not None:
                process.kill()

    @property
    def ended(self) -> bool:
        return self._failure is not None


class _Worker(threading.Thread):
    """A thread that feeds one process after the other. `batch`: its answers, the first one in progress."""

    def __init__(self, pool: VerifierPool) -> None:
        super().__init__(name="verifier-pool", daemon=True)
        self._pool = pool
        self.process: WorkerProcess | None = None
        self.batch: list[_Answer] = []
        self._cpu_s = 0.0

    def run(self) -> None:
        try:
            while not self._pool.ended:
                self._serve(self._pool.start_process())
        except Exception as error:
            self._pool.fail(error)

    def _serve(self, process: WorkerProcess) -> None:
        """Judge batches with one process until it has to be replaced or the pool ends."""
        self.process = process
        ready = False
        try:
            ready = process.receive(time.monotonic() + START_LIMIT_S) is not None
            if ready:
                self._pool.record_start(None)
                self._cpu_s = process.cpu_seconds()
                while self._pool.take_batch(self) and self._judge_batch(process):
                    pass
        except WorkerDied:
            if self.batch:
                self._charge_death(self.batch[0])
        finally:
            self.process = None
            errors = process.close()
            self._pool.requeue_batch(self)
        if not ready and not self._pool.ended:
            self._pool.record_start(errors)

    def _judge_batch(self, process: WorkerProcess) -> bool:
        """Settle all answers of the batch; False when a deadline passed first. Raises WorkerDied."""
        since = time.monotonic()
        until = since + self._pool.deadline_s
        scoring = False
        sent = process.send([answer.pair for answer in self.batch], until)
        while self.batch and not self._pool.ended:
            message = process.receive(until) if sent else None
            if message is None:
                cpu_s = 0.0 if scoring else process.cpu_seconds() - self._cpu_s
                self._pool.settle_first(self, self._late(time.monotonic() - since, cpu_s))
                return False
            scoring = "scoring" in message
            if not scoring:
                fields = {name: message.get(name) for name in ("components", "score")}
                found = [message[name] for name in ("status", "extracted", "seconds", "detail")]
                self._pool.settle_first(self, Verdict(*found, **fields))
                self._cpu_s = message["cpu"]
                since = time.monotonic()
                until = since + self._pool.deadline_s
        return True

    def _late(self, seconds: float, cpu_s: float) -> Verdict:
        """The verdict on an answer whose deadline has passed after `cpu_s` of CPU time."""
        if cpu_s >= EVASION_CPU_SHARE * self._pool.deadline_s:
            return Verdict("wrong", None, seconds, f"{EVASION}: {cpu_s:.1f} s of CPU time without a verdict")
        return Verdict("timeout", None, seconds, f"no verdict within verifier.deadline_s = {self._pool.deadline_s:g} s")

    def _charge_death(self, answer: _Answer) -> None:
        """An answer that crashes its process twice gets no third one."""
        answer.deaths += 1
        if answer.deaths >= MAX_DEATHS:
            detail = f"this answer crashed its worker process {MAX_DEATHS} times"
            self._pool.settle_first(self, Verdict("error", None, 0.0, detail))
