"""Killable verifier processes with a wall clock.

A thread of the pool owns the workers and is the only one that starts, feeds, times and kills them; callers hand
work over with `submit` from any thread and wait on a future. Order of events for one answer:

    queued -> sent (in a batch) -> in progress, clock running -> verdict
                                         |-> deadline passed: worker killed, verdict `wrong` or `timeout`
                                         |-> worker died: answer resubmitted alone; died twice: verdict `error`

Which verdict a deadline gives depends on the CPU time of the worker. An honest answer is judged in milliseconds; one
that computes for most of the deadline is built to evade a verdict, and is `wrong`, with the reason in `detail`. Where
the worker did not get that CPU time (a busy machine), or where a reward component was running, it is `timeout`, which
carries no reward. The rest of a killed worker's batch goes back to the head of the queue. Start-up of a worker (about
two seconds, in parallel) is not charged to an answer.
"""

from __future__ import annotations

import collections
import concurrent.futures
import os
import queue
import selectors
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

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
    """One pair on its way. `deaths`: workers that died while it was in progress."""

    job: _Job
    index: int
    pair: Pair
    deaths: int = 0


@dataclass(slots=True, eq=False)
class _Worker:
    """A process and its batch; the first answer of the batch is in progress since `since`, when the process had used
    `cpu_before` seconds of CPU time. `scoring`: its verdict is there, reward components are being computed."""

    process: WorkerProcess
    since: float
    cpu_before: float = 0.0
    scoring: bool = False
    ready: bool = False
    batch: collections.deque[_Answer] = field(default_factory=collections.deque)


class VerifierPool:
    """Verifies (gold, response) pairs in killable processes.

    Args:
        workers: processes, at least 1.
        deadline_s: wall clock of one answer, seconds; past it the worker is killed and the verdict is `timeout`.
        memory_mb: address-space limit of a worker, MiB; an answer that reaches it gets the verdict `error`.
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
        self._num_workers = workers
        self._deadline_s = deadline_s
        self._memory_mb = memory_mb
        self._rewards = tuple(rewards)
        self._inbox: queue.SimpleQueue[list[_Answer]] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._closing = threading.Event()
        self._manager = threading.Thread(target=self._run, name="verifier-pool", daemon=True)
        self._selector = selectors.DefaultSelector()
        self._queue: collections.deque[_Answer] = collections.deque()
        self._workers: list[_Worker] = []
        self._failed_starts = 0
        self._submit_lock = threading.Lock()
        self._manager.start()

    def submit(self, pairs: Sequence[Pair]) -> concurrent.futures.Future[list[Verdict]]:
        """Hand over (gold, response) pairs; the future gives one verdict a pair, in order. Thread-safe."""
        future: concurrent.futures.Future[list[Verdict]] = concurrent.futures.Future()
        if not pairs:
            future.set_result([])
            return future
        job = _Job(future, [None] * len(pairs), len(pairs))
        with self._submit_lock:
            if self._closing.is_set():
                raise RuntimeError("this verifier pool is closed")
            self._inbox.put([_Answer(job, i, pair) for i, pair in enumerate(pairs)])
            self._wake()
        return future

    def verify_many(self, pairs: Sequence[Pair]) -> list[Verdict]:
        """One verdict a pair, in order; waits for all of them."""
        return self.submit(pairs).result()

    def worker_pids(self) -> list[int]:
        """Process ids of the present workers."""
        return [worker.process.pid for worker in list(self._workers)]

    def close(self) -> None:
        """Kill the workers and fail what is still open. May be called twice."""
        with self._submit_lock:
            self._closing.set()
            self._wake()
        self._manager.join()

    def __enter__(self) -> VerifierPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b"w")
        except OSError:
            # A full pipe wakes the manager just as well; a closed one means that it has ended.
            return

    # Everything below runs in the manager thread only.

    def _run(self) -> None:
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        failure: Exception = RuntimeError("the verifier pool was closed before this answer was verified")
        try:
            for _ in range(self._num_workers):
                self._start_worker()
            while not self._closing.is_set():
                self._step()
        except Exception as error:
            failure = error
        finally:
            self._shut_down(failure)

    def _step(self) -> None:
        """One turn: hand out work, wait for news or the next deadline, take the news, enforce deadlines."""
        for worker in list(self._workers):
            if worker.ready and not worker.batch and self._queue:
                self._feed(worker)
        events = self._selector.select(self._seconds_to_next_deadline())
        for key, mask in events:
            if key.data is None:
                os.read(self._wake_read, 4096)
            elif key.data in self._workers:
                self._serve(key.data, mask)
        while not self._inbox.empty():
            self._queue.extend(self._inbox.get())
        now = time.monotonic()
        for worker in list(self._workers):
            if now >= self._deadline(worker):
                self._expire(worker, now)

    def _start_worker(self) -> None:
        worker = _Worker(WorkerProcess(self._memory_mb, self._rewards), since=time.monotonic())
        self._workers.append(worker)
        self._selector.register(worker.process.read_fd, selectors.EVENT_READ, worker)

    def _deadline(self, worker: _Worker) -> float:
        if not worker.ready:
            return worker.since + START_LIMIT_S
        return worker.since + self._deadline_s if worker.batch else float("inf")

    def _seconds_to_next_deadline(self) -> float | None:
        earliest = min(self._deadline(worker) for worker in self._workers)
        return None if earliest == float("inf") else max(0.0, earliest - time.monotonic())

    def _feed(self, worker: _Worker) -> None:
        """Send the worker its share of the queue: small enough to keep all workers busy, large enough to be cheap."""
        share = max(1, min(MAX_BATCH, len(self._queue) // (2 * self._num_workers)))
        chars = 0
        while self._queue and len(worker.batch) < share:
            answer = self._queue[0]
            chars += len(answer.pair[0]) + len(answer.pair[1])
            alone = answer.deaths > 0
            if worker.batch and (alone or chars > MAX_BATCH_CHARS):
                break
            worker.batch.append(self._queue.popleft())
            if alone:
                break
        worker.since = time.monotonic()
        try:
            worker.process.send([answer.pair for answer in worker.batch])
        except WorkerDied:
            self._handle_death(worker)
            return
        if worker.process.has_outgoing:
            self._selector.register(worker.process.write_fd, selectors.EVENT_WRITE, worker)

    def _serve(self, worker: _Worker, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            try:
                worker.process.flush()
            except WorkerDied:
                self._handle_death(worker)
                return
            if not worker.process.has_outgoing:
                self._selector.unregister(worker.process.write_fd)
        if mask & selectors.EVENT_READ:
            messages, is_open = worker.process.receive()
            for message in messages:
                self._take(worker, message)
            if not is_open:
                self._handle_death(worker)

    def _take(self, worker: _Worker, message: dict[str, Any]) -> None:
        if "scoring" in message:
            worker.scoring = True
            return
        worker.since = time.monotonic()
        if "ready" in message:
            worker.ready = True
            self._failed_starts = 0
            return
        worker.cpu_before, worker.scoring = message["cpu"], False
        answer = worker.batch.popleft()
        fields = {name: message.get(name) for name in ("components", "score")}
        found = [message[name] for name in ("status", "extracted", "seconds", "detail")]
        self._settle(answer, Verdict(*found, **fields))

    def _settle(self, answer: _Answer, verdict: Verdict) -> None:
        job = answer.job
        job.verdicts[answer.index] = verdict
        job.missing -= 1
        if job.missing == 0 and job.future.set_running_or_notify_cancel():
            job.future.set_result([verdict for verdict in job.verdicts if verdict is not None])

    def _expire(self, worker: _Worker, now: float) -> None:
        """The deadline of a worker has passed: settle the answer in progress, requeue the rest, replace the worker."""
        if worker.ready:
            answer = worker.batch.popleft()
            cpu_s = worker.process.cpu_seconds() - worker.cpu_before
            if not worker.scoring and cpu_s >= EVASION_CPU_SHARE * self._deadline_s:
                detail = f"{EVASION}: {cpu_s:.1f} s of CPU time without a verdict"
                self._settle(answer, Verdict("wrong", None, now - worker.since, detail))
            else:
                detail = f"no verdict within verifier.deadline_s = {self._deadline_s:g} s"
                self._settle(answer, Verdict("timeout", None, now - worker.since, detail))
        self._replace(worker)

    def _handle_death(self, worker: _Worker) -> None:
        """Handle a worker that crashed or was killed from outside."""
        if worker.batch:
            answer = worker.batch[0]
            answer.deaths += 1
            if answer.deaths >= MAX_DEATHS:
                worker.batch.popleft()
                detail = f"this answer crashed its worker process {MAX_DEATHS} times"
                self._settle(answer, Verdict("error", None, time.monotonic() - worker.since, detail))
        self._replace(worker)

    def _replace(self, worker: _Worker) -> None:
        """Kill what is left of a worker, requeue its batch, start another. Raises VerifierFailed."""
        self._queue.extendleft(reversed(worker.batch))
        errors = self._remove(worker)
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                raise VerifierFailed(
                    f"verifier workers cannot be started ({self._failed_starts} attempts in a row); is "
                    f"verifier.memory_mb = {self._memory_mb} enough? Last output: {errors.strip() or '(none)'}"
                )
        self._start_worker()

    def _remove(self, worker: _Worker) -> str:
        for fd in (worker.process.read_fd, worker.process.write_fd):
            if fd in self._selector.get_map():
                self._selector.unregister(fd)
        self._workers.remove(worker)
        return worker.process.kill()

    def _shut_down(self, failure: Exception) -> None:
        """Kill all workers; every open future gets `failure`."""
        with self._submit_lock:
            self._closing.set()
            while not self._inbox.empty():
                self._queue.extend(self._inbox.get())
        open_answers = list(self._queue)
        for worker in list(self._workers):
            open_answers.extend(worker.batch)
            self._remove(worker)
        for job in {id(answer.job): answer.job for answer in open_answers}.values():
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(failure)
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
