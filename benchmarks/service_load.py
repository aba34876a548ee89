"""The job service at the size of a large lab: trainers that report, viewers that list runs, and open event streams.

A real API process and a real scheduler with a job server that only states that all jobs run; this process is all
trainers and viewers. Each trainer follows the uploader's protocol: a heartbeat after `heartbeat_s` without a call, a
batch of one step × 60 metrics every `step_s`, an event with every fourth batch, and retries of the same batch until it
is answered. Each viewer asks for a page of the list every `list_s`. The first viewers have event streams: half of the
streams follow all runs by id, as the dashboard does, the others ten runs each in full, as `gxpo watch` does.

At the end every batch and event is looked for in the database, and every event of the followed runs in what the
streams received. The delay of a stream is the time from sending a batch to receiving its event.

    python -m benchmarks.service_load [--trainers 1000] [--viewers 100] [--seconds 120] [--databases postgresql]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlencode, urlsplit

import numpy as np
import psutil
from sqlalchemy import select

from benchmarks.measure import Figure, save, single
from benchmarks.service import LISTS, NAMES, TOTALS, Api, serving
from benchmarks.service_data import add_runs, settle
from gxpo_services.api.principals import hash_token, new_token
from gxpo_services.auth import tokens
from gxpo_services.auth.tokens import TokenRequest
from gxpo_services.db.tables import Event, Run
from gxpo_services.outputs import metrics
from gxpo_services.run_states import RunState

ENDED_RUNS = 2_000
"""Runs in the lists in addition to those of the trainers."""
WARM_UP_S = 10.0
"""Left out of all times."""
SAMPLE_S = 2.0
GIVE_UP_S = 60.0
"""Wait for the last answers at the end."""
EVENT_EVERY = 4
QUERIES = [*LISTS, {"sort": "metric:reward/mean", "state": "running"}]


class Client:
    """One kept connection; the standard library's asyncio costs less than a client that does more."""

    def __init__(self, url: str, token: str) -> None:
        self._address = urlsplit(url).hostname, urlsplit(url).port
        self._head = f"Host: localhost\r\nAuthorization: Bearer {token}\r\n"
        self._connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Status and body. Raises OSError, EOFError."""
        if self._connection is None:
            self._connection = await asyncio.open_connection(*self._address)
        reader, writer = self._connection
        try:
            writer.write(f"{method} {path} HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])
            answer = await reader.readexactly(length)
        except BaseException:
            self.close()
            raise
        if b"connection: close" in head:
            self.close()
        return int(head.split(b" ", 2)[1]), answer

    async def lines(self, path: str) -> AsyncIterator[bytes]:
        """Lines of a response without end."""
        reader, writer = await asyncio.open_connection(*self._address, limit=1 << 24)
        try:
            writer.write(f"GET {path} HTTP/1.1\r\n{self._head}\r\n".encode())
            status = int((await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[1])
            if status != 200:
                raise RuntimeError(f"{path}: {status}")
            rest = b""
            while size := int(await reader.readuntil(b"\r\n"), 16):
                *whole, rest = (rest + (await reader.readexactly(size + 2))[:-2]).split(b"\n")
                for line in whole:
                    yield line
        finally:
            writer.close()

    def close(self) -> None:
        if self._connection is not None:
            self._connection[1].close()
            self._connection = None


@dataclass
class Measured:
    """Times in ms since the warm-up, and what went wrong."""

    begin: float
    times: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    statuses: Counter[int] = field(default_factory=Counter)
    retries: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str, seconds: float) -> None:
        if time.monotonic() - self.begin > WARM_UP_S:
            self.times[kind].append(1e3 * seconds)


@dataclass
class Trainer:
    run: str
    client: Client
    batches: int = 0
    steps: int = 0
    events: int = 0
    answered: int = 0
    """Batches that were answered with success."""
    first_event: int = field(default_factory=lambda: random.randrange(EVENT_EVERY))
    _values: ClassVar[dict[str, float]] = dict.fromkeys(NAMES, 0.5)

    async def report(self, measured: Measured, end: float, heartbeat_s: float, step_s: float, delay: float) -> None:
        await asyncio.sleep(delay)
        next_step = time.monotonic() + random.random() * step_s
        while (now := time.monotonic()) < end:
            if now >= next_step:
                next_step += step_s
                self.batches += 1
                await self._send(measured, end, "batches", self._batch())
            else:
                await self._send(measured, end, "heartbeats", {"attempt": 1, "batch": None, "phase": "training"})
            await asyncio.sleep(max(0.0, min(heartbeat_s, next_step - time.monotonic(), end - time.monotonic())))

    def _batch(self) -> dict[str, Any]:
        totals = {name: float(self.steps) for name in TOTALS}
        row = {"attempt": 1, "step": self.steps, "time": time.time(), "metrics": self._values | totals}
        offsets = {"metrics": self.steps, "samples": 0, "evaluations": 0, "events": self.events}
        batch = {"attempt": 1, "batch": self.batches, "offsets": offsets, "metrics": [row]}
        self.steps += 1
        if (self.batches + self.first_event) % EVENT_EVERY == 0:
            message = f"{self.batches}"
            batch["events"] = [{"attempt": 1, "time": time.time(), "kind": "bench", "message": message, "fields": {}}]
            self.events += 1
        return batch

    async def _send(self, measured: Measured, end: float, kind: str, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        give_up = end + GIVE_UP_S
        pause = 0.5
        while time.monotonic() < give_up:
            begin = time.monotonic()
            try:
                async with asyncio.timeout(10.0):
                    status, answer = await self.client.ask("POST", f"/api/v1/runs/{self.run}/ingest", body)
            except (OSError, EOFError) as error:
                measured.retries[type(error).__name__] += 1
            else:
                measured.statuses[status] += 1
                measured.add(kind, time.monotonic() - begin)
                if status == 200:
                    self.answered += kind == "batches"
                    return
                measured.retries[str(status)] += 1
                if status < 500:
                    raise RuntimeError(f"{self.run}: {status} {answer[:300]!r}")
            await asyncio.sleep(pause * random.random())
            pause = min(2 * pause, 15.0)


async def view(client: Client, measured: Measured, end: float, list_s: float) -> None:
    await asyncio.sleep(random.random() * list_s)
    number = random.randrange(len(QUERIES))
    while (begin := time.monotonic()) < end:
        number += 1
        query = urlencode({"limit": 50, **QUERIES[number % len(QUERIES)]}, doseq=True)
        try:
            async with asyncio.timeout(30.0):
                status, _ = await client.ask("GET", f"/api/v1/runs?{query}")
        except (OSError, EOFError) as error:
            measured.retries[f"list {type(error).__name__}"] += 1
        else:
            measured.statuses[status] += 1
            measured.add("lists", time.monotonic() - begin)
        await asyncio.sleep(max(0.0, min(begin + list_s, end) - time.monotonic()))


@dataclass
class Stream:
    """runs: those that it follows; none for all."""

    client: Client
    runs: list[str]
    received: set[int] = field(default_factory=set)
    messages: int = 0
    ends: int = 0

    async def follow(self, measured: Measured, after: int) -> None:
        query = urlencode({"after": after, **({"runs": self.runs} if self.runs else {"ids_only": "true"})}, doseq=True)
        while True:
            kind = b""
            with suppress(OSError, EOFError):
                async for line in self.client.lines(f"/api/v1/events/stream?{query}"):
                    if line.startswith(b"event: "):
                        kind = line[7:]
                        self.messages += 1
                    elif line.startswith(b"data: ") and kind == b"event":
                        event = json.loads(line[6:])
                        self.received.add(event["number"])
                        if event["kind"] == "bench":
                            measured.add("streams", time.time() - event["time"])
            self.ends += 1
            await asyncio.sleep(1.0)


@asynccontextmanager
async def job_server(job_ids: list[str], artifacts: str, asked: Counter[str]) -> AsyncIterator[str]:
    """What the scheduler asks of Ray, of jobs that run for ever; its address. asked: requests by kind."""

    def job(job_id: str) -> dict[str, Any]:
        metadata = {"gxpo_run": job_id[:-2], "gxpo_launch": "1", "gxpo_owner": "bench", "gxpo_artifacts": artifacts}
        entrypoint = "cd /data/runs && exec python -m gxpo_trainer.cli train " + "x" * 200
        own = {"submission_id": job_id, "status": "RUNNING", "message": "Job is currently running."}
        return own | {"entrypoint": entrypoint, "metadata": metadata, "type": "SUBMISSION", "start_time": 1}

    one = {job_id: json.dumps(job(job_id)).encode() for job_id in job_ids}
    every = b"[" + b",".join(one.values()) + b"]"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, EOFError):
            while True:
                path = (await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[1].decode()
                job_id = path.removeprefix("/api/jobs/")
                asked["one" if job_id else "all"] += 1
                body = one.get(job_id, b"{}") if job_id else every
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


@contextmanager
def scheduling(api: Api, home: Path, job_server: str, runs: int) -> Iterator[psutil.Process]:
    """A scheduler of the service."""
    variables = {
        **{"GXPO_HOME": str(home), "GXPO_PUBLIC_URL": api.url, "GXPO_RAY_ADDRESS": job_server},
        "GXPO_DATABASE_URL": api.database.engine.url.render_as_string(hide_password=False),
        **{"GXPO_MAX_CONCURRENT_RUNS": str(runs)},
    }
    with (home / "scheduler.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "gxpo_trainer.cli", "scheduler"], env=os.environ | variables, stdout=log, stderr=log
        )
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


class Usage:
    """CPU and memory of processes over time. PostgreSQL counts with its backends, also those that have ended."""

    def __init__(self, processes: dict[str, psutil.Process]) -> None:
        self._processes = processes
        self.rss: dict[str, list[float]] = {name: [] for name in processes}
        """MiB since the warm-up, every SAMPLE_S."""
        self._cpu_at_begin: dict[str, float] = {}
        self._begin = time.monotonic()
        self.cores: dict[str, float] = {}

    async def watch(self, measured: Measured) -> None:
        while True:
            if (now := time.monotonic()) - measured.begin > WARM_UP_S:
                if not self._cpu_at_begin:
                    self._begin, self._cpu_at_begin = now, self._cpu()
                for name, process in self._processes.items():
                    self.rss[name].append(process.memory_info().rss / 2**20)
            await asyncio.sleep(SAMPLE_S)

    def finish(self) -> None:
        seconds = time.monotonic() - self._begin
        self.cores = {name: (cpu - self._cpu_at_begin[name]) / seconds for name, cpu in self._cpu().items()}

    def _cpu(self) -> dict[str, float]:
        totals = {}
        for name, process in self._processes.items():
            totals[name] = 0.0
            for part in (process, *(process.children(recursive=True) if name == "postgresql" else ())):
                with suppress(psutil.NoSuchProcess):
                    totals[name] += sum(part.cpu_times()[:4] if part == process else part.cpu_times()[:2])
        return totals


async def load(api: Api, home: Path, given: argparse.Namespace) -> tuple[list[Figure], dict[str, Any]]:
    add_runs(api.database, ENDED_RUNS, state=RunState.SUCCEEDED)
    secrets = [new_token("run") for _ in range(given.trainers)]
    now = time.time()
    values: dict[str, Any] = {
        "launch": 1,
        "launched_at": now,
        "heartbeat_at": now,
        "phase": "training",
        "started_at": now,
    }
    ids = add_runs(api.database, given.trainers, state=RunState.RUNNING, **values)
    with api.database.writing() as session:
        rows = {run.id: run for run in session.scalars(select(Run).where(Run.id.in_(ids)))}
        for run_id, secret in zip(ids, secrets, strict=True):
            rows[run_id].run_token_sha256, rows[run_id].job_id = hash_token(secret), f"{run_id}-1"
        viewers = [
            tokens.create(session, TokenRequest(name=f"v{number}", role="viewer"), actor="bench").token
            for number in range(given.viewers)
        ]
    settle(api.database)
    with api.database.reading() as session:
        last_event = max(session.scalars(select(Event.number)), default=0)
    trainers = [Trainer(run_id, Client(api.url, secret)) for run_id, secret in zip(ids, secrets, strict=True)]
    streams = [
        Stream(Client(api.url, token), [] if number % 2 == 0 else random.sample(ids, min(10, len(ids))))
        for token in viewers[: given.streaming_viewers]
        for number in range(given.streams_each)
    ]
    asked: Counter[str] = Counter()
    artifacts = str(home.resolve() / "artifacts")
    async with job_server([f"{run_id}-1" for run_id in ids], artifacts, asked) as address:
        with scheduling(api, home, address, given.trainers) as scheduler:
            processes = {"api": psutil.Process(api.pid), "scheduler": scheduler, "load generator": psutil.Process()}
            if not api.database.is_sqlite:
                with api.database.reading() as session:
                    backend = session.connection().connection.driver_connection.info.backend_pid  # type: ignore[union-attr]
                server = psutil.Process(backend).parent()
                assert server is not None
                processes["postgresql"] = server
            usage = Usage(processes)
            measured = Measured(time.monotonic())
            background = [asyncio.create_task(usage.watch(measured))]
            background += [asyncio.create_task(stream.follow(measured, last_event)) for stream in streams]
            end = measured.begin + WARM_UP_S + given.seconds
            working = [
                trainer.report(measured, end, given.heartbeat_s, given.step_s, random.random() * given.heartbeat_s)
                for trainer in trainers
            ]
            working += [view(Client(api.url, token), measured, end, given.list_s) for token in viewers]
            await asyncio.gather(*working)
            usage.finish()
            await asyncio.sleep(10.0)  # for what the streams have not sent
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
    return results(api, trainers, streams, measured, usage, asked, given)


def results(
    api: Api,
    trainers: list[Trainer],
    streams: list[Stream],
    measured: Measured,
    usage: Usage,
    asked: Counter[str],
    given: argparse.Namespace,
) -> tuple[list[Figure], dict[str, Any]]:
    """Figures, and what else is worth keeping."""
    kind = "sqlite" if api.database.is_sqlite else "postgresql"
    lost, missed = verify(api, trainers, streams)
    figures = []
    for what, goal in (("lists", 200.0), ("heartbeats", None), ("batches", None), ("streams", None)):
        for percent in (50, 95, 99):
            value = float(np.percentile(measured.times[what] or [np.nan], percent))
            figures.append(single(f"{kind}: {what}, p{percent}", value, "ms", at_most=goal if percent == 95 else None))
    requests = sum(len(measured.times[what]) for what in ("lists", "heartbeats", "batches"))
    errors = sum(count for status, count in measured.statuses.items() if status >= 500)
    figures += [
        single(f"{kind}: requests", requests / given.seconds, "1/s"),
        single(f"{kind}: responses with 5xx", errors, at_most=0),
        single(f"{kind}: batches lost", lost, at_most=0),
        single(f"{kind}: events that a stream missed", missed, at_most=0),
        single(f"{kind}: requests repeated", sum(measured.retries.values()), at_most=0),
        single(f"{kind}: streams that ended", sum(stream.ends for stream in streams), at_most=0),
    ]
    for name in usage.cores:
        figures.append(single(f"{kind}: {name}, CPU", usage.cores[name], "cores"))
    for name in ("api", "scheduler"):
        memory = np.array(usage.rss[name])
        quarter = max(1, len(memory) // 4)
        first, last = float(memory[:quarter].mean()), float(memory[-quarter:].mean())
        figures.append(single(f"{kind}: {name}, memory at the end", memory[-1], "MiB"))
        growth = 100 * (last / first - 1)
        figures.append(single(f"{kind}: {name}, memory of the last quarter over the first", growth, "%", at_most=5))
    more = {
        "statuses": dict(measured.statuses),
        "retries": dict(measured.retries),
        "batches": sum(trainer.answered for trainer in trainers),
        "stream messages": sum(stream.messages for stream in streams),
        "requests to the job server": dict(asked),
        "memory": {name: [round(value, 1) for value in values] for name, values in usage.rss.items()},
        "load of the machine": os.getloadavg(),
    }
    return figures, more


def verify(api: Api, trainers: list[Trainer], streams: list[Stream]) -> tuple[int, int]:
    """Batches that were sent and are not in the database, and events that streams did not receive."""
    with api.database.reading() as session:
        runs = {run.id: run for run in session.scalars(select(Run).where(Run.id.in_([t.run for t in trainers])))}
        numbers = [run.number for run in runs.values()]
        name = metrics.find_numbers(session, [NAMES[0]])
        stored = metrics.histories(session, list(name.values()), metrics.first_steps(session, numbers))
        steps = {run: [step for step, _ in records.tolist()] for (run, _), records in stored.items()}
        events = session.execute(select(Event.number, Event.run_number).where(Event.kind == "bench")).all()
    lost = 0
    by_run = Counter(run for _, run in events)
    for trainer in trainers:
        run = runs[trainer.run]
        whole = steps.get(run.number, []) == list(range(trainer.steps)) and by_run[run.number] == trainer.events
        if not (whole and run.last_batch == trainer.batches == trainer.answered):
            lost += max(1, trainer.batches - len(steps.get(run.number, [])))
    missed = 0
    for stream in streams:
        followed = {runs[run_id].number for run_id in stream.runs} if stream.runs else {*numbers}
        missed += len({number for number, run in events if run in followed} - stream.received)
    return lost, missed


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainers", type=int, default=1000)
    parser.add_argument("--viewers", type=int, default=100)
    parser.add_argument("--streaming-viewers", type=int, default=10)
    parser.add_argument("--streams-each", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=120.0, help="at most 600, after a warm-up of 10 s")
    parser.add_argument("--heartbeat-s", type=float, default=4.0)
    parser.add_argument("--step-s", type=float, default=20.0)
    parser.add_argument("--list-s", type=float, default=5.0)
    parser.add_argument("--databases", nargs="+", default=["postgresql"], choices=["sqlite", "postgresql"])
    parser.add_argument("--no-save", action="store_true", help="print only")
    given = parser.parse_args([] if argv is None else argv)
    given.seconds = min(max(given.seconds, 2 * SAMPLE_S), 600.0)
    figures: list[Figure] = []
    more: dict[str, Any] = {}
    for kind in given.databases:
        with serving(kind) as api, tempfile.TemporaryDirectory(prefix="gxpo-bench-") as home:
            limit = given.seconds + WARM_UP_S + 2 * GIVE_UP_S
            made, more[kind] = asyncio.run(asyncio.wait_for(load(api, Path(home), given), limit))
            figures += made
    if given.no_save:
        print("\n".join(figure.line() for figure in figures))
        for kind in more:
            print(json.dumps(more[kind]))
    else:
        save("service_load", figures, {**vars(given), **more})


if __name__ == "__main__":
    main(sys.argv[1:])
