"""Killable verifier processes with a wall clock.

Each worker is a thread with its own process; the threads take answers from one queue. Order of events for one answer:

    queued -> sent, clock running -> verdict
                        |-> deadline passed: process killed, verdict `wrong` or `timeout`
                        |-> process died: retried in the next one; died twice: verdict `error`

Which verdict a deadline gives depends on the CPU time of the process. An honest answer is judged in milliseconds; one
that computes for most of the deadline evades a verdict and is `wrong`, with the reason in `detail`. Where
the process did not get that CPU time (a busy machine), or where a reward component was running, it is `timeout`, which
carries no reward. Start-up of a process (about two seconds, in parallel) is not charged to an answer.

The process is this module as a program: `python -m gxpo_trainer.grading.pool MEMORY_MB PARENT REWARDS`; the last is the
JSON of a list of RewardConfig, the reward components that it can score. Messages are lines of JSON on a socket, which
is its standard input. In: `[gold, response]`, with a third entry `{"options": …, "context": …}` for an answer with
options, or one to be scored; with `{"status": …, "context": …}` it is only scored, because its environment gave the
verdict. Out: `{"cpu": …}` once it is ready; then for each answer the fields of its Verdict and `cpu`, the CPU time of
the process so far, seconds. Before reward components of an answer are computed, `{"scoring": true}`; they add
`components` and `score`. The process imports neither torch nor Ray, ends when its input ends, and dies with its parent.

The functions at the top set environment, limits and lifetime of every process that runs untrusted computations.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import json
import os
import queue
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

import gxpo_trainer
from gxpo_trainer.errors import ConfigError, VerifierFailed
from gxpo_trainer.types import EVASION, Verdict, VerifyOptions

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
"""Options of prctl(2): the signal when our parent ends (0: none); whether we adopt descendants without a parent (1)."""


def worker_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """One thread per worker, a fixed hash seed (sympy orders by hashes), and this package on the path."""
    package_root = str(Path(gxpo_trainer.__file__).resolve().parents[1])
    inherited = environment.get("PYTHONPATH", "")
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    path = package_root + (os.pathsep + inherited if inherited else "")
    return {**environment, **one_thread, "PYTHONHASHSEED": "0", "PYTHONPATH": path}


def limit_process(memory_mb: int) -> None:
    """Limit this process and its children to so much address space each, without core files; ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    limit = memory_mb * 1024 * 1024
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def die_with_parent(parent: int) -> None:
    """SIGKILL to ourselves when the parent thread ends, also in the middle of a computation (Linux)."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit("the parent of this worker has ended")


def prctl(option: int, value: int) -> None:
    """Set an option of this process; does nothing outside Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value)


def redirect_to_null(*descriptors: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(null, descriptor)
    os.close(null)


Pair = tuple[str, str] | tuple[str, str, Mapping[str, Any]]
"""Gold and response; a third entry, JSON-able, has `options` (VerifyOptions.to_dict), `context` (rewards), `status`."""

READ_BYTES = 1 << 16


class WorkerDied(Exception):
    """The worker's end of the socket is closed."""


class WorkerProcess:
    """A verifier process and the socket to it.

    Must be created by the thread that lives as long as the worker should: the worker asks the kernel to be killed
    when its parent thread ends. rewards: settings of the components that it can score (RewardConfig); empty: none.
    """

    def __init__(self, memory_mb: int, rewards: Sequence[Mapping[str, Any]] = ()) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `close`
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, "-m", "gxpo_trainer.grading.pool", str(memory_mb), str(os.getpid())]
        with theirs:
            self._process = subprocess.Popen(
                [*command, json.dumps(list(rewards))],
                stdin=theirs.fileno(),
                stdout=self._output,
                stderr=self._output,
                env=worker_environment(os.environ),
                process_group=0,
            )
        self.pid = self._process.pid
        self._incoming = bytearray()
        self._reported_cpu_s = 0.0

    def kill(self) -> None:
        """Kill the process and what it has started; a thread that waits for a message gets WorkerDied. Safe from any
        thread."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # reaped meanwhile, by another thread
                os.killpg(self.pid, signal.SIGKILL)

    def cpu_seconds(self) -> float:
        """CPU time that the process has used since its last message, seconds; 0 when it has ended."""
        try:
            times = psutil.Process(self.pid).cpu_times()
        except psutil.NoSuchProcess:
            return 0.0
        return float(times.user + times.system) - self._reported_cpu_s

    def ask(self, pair: Pair, until: float) -> dict[str, Any] | None:
        """Send a pair; the first message about it, as in `receive`."""
        try:
            self._socket.settimeout(max(1e-3, until - time.monotonic()))
            self._socket.sendall(json.dumps(pair).encode() + b"\n")
        except TimeoutError:
            return None
        except OSError as error:
            raise WorkerDied(str(self.pid)) from error
        return self.receive(until)

    def receive(self, until: float) -> dict[str, Any] | None:
        """The next message; None when none has come by `until` (monotonic clock). Raises WorkerDied."""
        while (end := self._incoming.find(b"\n")) < 0:
            try:
                self._socket.settimeout(max(1e-3, until - time.monotonic()))
                data = self._socket.recv(READ_BYTES)
            except TimeoutError:
                return None
            except OSError:
                data = b""
            if not data:
                raise WorkerDied(str(self.pid))
            self._incoming += data
        message: dict[str, Any] = json.loads(self._incoming[:end])
        del self._incoming[: end + 1]
        self._reported_cpu_s = message.pop("cpu", self._reported_cpu_s)
        return message

    def close(self) -> str:
        """Kill and reap the process; returns the end of its output."""
        self.kill()
        self._process.wait()
        self._socket.close()
        return close_output(self._output)


def close_output(output: IO[bytes]) -> str:
    """The last 2,000 bytes of a process's output file, which is closed."""
    with output:
        output.seek(max(0, output.seek(0, os.SEEK_END) - 2_000))
        return output.read().decode(errors="replace").strip() or "(none)"


MAX_DEATHS = 2
MAX_FAILED_STARTS = 3
START_LIMIT_S = 120.0
MAX_SCARCE, SCARCE_WAIT_S = 60, 1.0
"""Tries to start a process on a machine that has no free one, and the time between them."""
EVASION_CPU_SHARE = 0.5
"""Share of the deadline, in CPU time, from which an answer without a verdict is `wrong`."""


@dataclass(slots=True, eq=False)
class _Job:
    """One call of `submit`: its verdicts, filled in any order, delivered together."""

    future: concurrent.futures.Future[list[Verdict]]
    verdicts: list[Verdict | None]
    missing: int


class VerifierPool(contextlib.AbstractContextManager["VerifierPool"]):
    """Verifies (gold, response) pairs in `workers` killable processes.

    deadline_s: wall clock of one answer. memory_mb: address space of a process, MiB; an answer that reaches it is
    `error`. rewards: settings of the components (RewardConfig) that are scored for pairs with a `context`.
    Futures raise VerifierFailed where workers cannot be started.
    """

    def __init__(
        self,
        workers: int = 2,
        deadline_s: float = 5.0,
        memory_mb: int = 2048,
        rewards: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.deadline_s = deadline_s
        self._memory_mb = memory_mb
        self._rewards = tuple(rewards)
        self._queue: queue.SimpleQueue[tuple[_Job, int, Pair] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._jobs: set[_Job] = set()
        self._failure: Exception | None = None
        self._failed_starts = 0
        self._processes: list[WorkerProcess | None] = [None] * workers
        self._threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(workers)]
        for thread in self._threads:
            thread.start()

    def submit(self, pairs: Sequence[Pair]) -> concurrent.futures.Future[list[Verdict]]:
        """Submit (gold, response) pairs; the future has one verdict per pair, in order. Thread-safe."""
        job = _Job(concurrent.futures.Future(), [None] * len(pairs), len(pairs))
        if not pairs:
            job.future.set_result([])
            return job.future
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._jobs.add(job)
        for i, pair in enumerate(pairs):
            self._queue.put((job, i, pair))
        return job.future

    def close(self) -> None:
        """Kill the workers and fail what is still open. May be called twice."""
        self._fail(RuntimeError("the verifier pool was closed before this answer was verified"))
        for thread in self._threads:
            thread.join()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _fail(self, failure: Exception) -> None:
        """End the pool: every open future gets `failure`, every process is killed. The first failure counts."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = failure
            jobs, self._jobs = self._jobs, set()
        for job in jobs:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(failure)
        for process in self._processes:
            self._queue.put(None)
            if process is not None:
                process.kill()

    def _settle(self, job: _Job, index: int, verdict: Verdict) -> None:
        """Record a verdict, and deliver its job's when it was the last."""
        with self._lock:
            job.verdicts[index] = verdict
            job.missing -= 1
            delivered = job.missing == 0 and job in self._jobs
            if delivered:
                self._jobs.remove(job)
        if delivered and job.future.set_running_or_notify_cancel():
            job.future.set_result([verdict for verdict in job.verdicts if verdict is not None])

    # In the workers' threads, each with the number of its worker.

    def _run(self, worker: int) -> None:
        """Judge answers until the pool ends; the next process starts before there is an answer for it."""
        try:
            while self._process(worker) and (entry := self._queue.get()) is not None:
                job, index, pair = entry
                self._settle(job, index, self._verdict(worker, pair))
        except Exception as error:
            self._fail(error)
        finally:
            self._stop(worker)

    def _process(self, worker: int) -> WorkerProcess:
        """The worker's process, started where there is none.

        Raises VerifierFailed after `MAX_FAILED_STARTS` in a row, and when the pool has ended.
        """
        scarce = 0
        while (process := self._processes[worker]) is None:
            failure = "(none)"
            try:
                process = self._processes[worker] = WorkerProcess(self._memory_mb, self._rewards)
                if self._failure is not None:
                    process.kill()
                ready = process.receive(time.monotonic() + START_LIMIT_S) is not None
            except WorkerDied as error:
                ready, failure = False, str(error)
            except OSError as error:  # no free process or file descriptor, which may pass
                scarce += 1
                if scarce >= MAX_SCARCE or self._failure is not None:
                    raise VerifierFailed(f"this machine cannot start a process of the verifier: {error}") from None
                time.sleep(SCARCE_WAIT_S)
                continue
            output = "" if ready else self._stop(worker) or failure
            with self._lock:
                self._failed_starts = 0 if ready else self._failed_starts + 1
                failed = self._failed_starts
            if failed >= MAX_FAILED_STARTS or self._failure is not None:
                raise VerifierFailed(
                    f"verifier workers cannot be started ({failed} attempts in a row); is "
                    f"verifier.memory_mb = {self._memory_mb} enough? Last output: {output}"
                )
        return process

    def _stop(self, worker: int) -> str:
        """Kill the worker's process; the end of its output."""
        process, self._processes[worker] = self._processes[worker], None
        return "" if process is None else process.close()

    def _verdict(self, worker: int, pair: Pair) -> Verdict:
        """The verdict on one answer; one that crashes its process twice gets no third one."""
        for _ in range(MAX_DEATHS):
            try:
                return self._judged(worker, pair)
            except WorkerDied:
                self._stop(worker)
        return Verdict("error", None, 0.0, f"this answer crashed its worker process {MAX_DEATHS} times")

    def _judged(self, worker: int, pair: Pair) -> Verdict:
        """The process's verdict, or the pool's when the deadline passes first. Raises WorkerDied."""
        process = self._process(worker)
        since = time.monotonic()
        until = since + self.deadline_s
        message = process.ask(pair, until)
        scoring = message == {"scoring": True}
        if scoring:
            message = process.receive(until)
        if message is not None:
            if message["detail"] == OUT_OF_MEMORY:  # the process ends; it does not count against the next answer
                self._stop(worker)
            return Verdict(**message)
        seconds = time.monotonic() - since
        cpu_s = 0.0 if scoring else process.cpu_seconds()
        self._stop(worker)
        if cpu_s >= EVASION_CPU_SHARE * self.deadline_s:
            return Verdict("wrong", None, seconds, f"{EVASION}: {cpu_s:.1f} s of CPU time without a verdict")
        return Verdict("timeout", None, seconds, f"no verdict within verifier.deadline_s = {self.deadline_s:g} s")


_LONGEST_DETAIL = 1000
OUT_OF_MEMORY = "out of memory (verifier.memory_mb)"


def serve(memory_mb: int, parent: int, rewards: Sequence[Mapping[str, Any]]) -> None:
    """Serve answers until the input ends, or until out of memory was reported, so that the process must be replaced."""
    # Not for the parent and for the processes of episodes, which import this module too.
    from gxpo_trainer.grading.engine import engine_equal
    from gxpo_trainer.grading.rewards import Scorer
    from gxpo_trainer.grading.verify import verify

    channel = socket.socket(fileno=os.dup(0))
    redirect_to_null(0)  # what a component starts must not read the socket
    try:
        scorer = Scorer.load(rewards, os.environ)
    except ConfigError as error:
        sys.exit(str(error))
    die_with_parent(parent)
    limit_process(memory_mb)
    replies = channel.makefile("w")
    # Imports math-verify and builds its parser's tables (about 1.5 s), which no answer should be charged for.
    engine_equal("x+1", "1+x")
    redirect_to_null(1, 2)  # nobody reads it any more, so that it would only fill the disk
    print(json.dumps({"cpu": time.process_time()}), file=replies, flush=True)
    for line in channel.makefile("rb"):
        gold, response, *rest = json.loads(line)
        extras = rest[0] if rest else {}
        start = time.perf_counter()
        try:
            if "status" in extras:
                verdict = Verdict(extras["status"], None, 0.0)
            else:
                verdict = verify(gold, response, VerifyOptions.from_dict(extras.get("options", {})))
            fields = {"status": verdict.status, "extracted": verdict.extracted, "detail": verdict.detail}
            if rewards and "context" in extras:
                print(json.dumps({"scoring": True}), file=replies, flush=True)
                fields |= scorer.score(gold, response, verdict, extras["context"])
        except Exception as error:
            # The grader's own failure says nothing about the answer: it is reported, never scored.
            memory = isinstance(error, MemoryError)
            detail = OUT_OF_MEMORY if memory else f"{type(error).__name__}: {str(error)[:_LONGEST_DETAIL]}"
            fields = {"status": "error", "extracted": None, "detail": detail}
        times = {"seconds": time.perf_counter() - start, "cpu": time.process_time()}
        print(json.dumps(fields | times), file=replies, flush=True)
        if fields["detail"] == OUT_OF_MEMORY:
            return


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
