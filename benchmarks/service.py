"""The job service under load: reports of trainers, curves, lists and submissions, on SQLite and on PostgreSQL.

A real API process (`gxpo serve`) and four clients in this one, on the same machine. Both databases keep
committed data through a loss of power (SQLite: WAL, synchronous=NORMAL; PostgreSQL: fsync and synchronous commit on).

- reports: each client is the trainer of one run and sends batches of 20 steps × 60 metrics, one after the other;
  points per second, all clients together, by rounds
- curves: one metric of 20 runs × 5,000 steps, thinned to 1,000 points each, over steps and over backward passes
- lists: 10,000 runs, 50 at a time: newest first, later pages, by state, rule, tag and text, sorted by a metric
- lists during comparisons: the same lists while two more clients ask for comparisons of 40 runs, each with other
  budgets, so that none is answered from the cache; against the lists alone, measured in turn
- submissions: 50 at the same time with one idempotency key

Curves and lists are asked for by four clients at once, over connections that they keep; the time from the question to
the last byte of its answer counts. These clients are the standard library's, which take a tenth of a millisecond for
a question: on two cores a client that takes more is part of what it measures.

    python -m benchmarks.service [--rounds 20] [--questions 400] [--runs 10000] [--databases postgresql sqlite]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import httpx
import numpy as np

from benchmarks.measure import Figure, median, percentile, ratio, save
from benchmarks.service_data import add_evaluations, add_metrics, add_runs, settle
from gxpo_services.api.principals import hash_token
from gxpo_services.auth import tokens
from gxpo_services.auth.tokens import TokenRequest
from gxpo_services.db.database import Database
from gxpo_services.db.migrate import upgrade
from gxpo_services.ingest.batches import MetricRow
from gxpo_services.local.ray_head import free_port
from gxpo_services.outputs import metrics
from gxpo_services.run_states import RunState
from gxpo_trainer.config.io import load_preset

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support.postgres import NOT_INSTALLED, PostgresServer, find_programs

CLIENTS = 4
STEPS, METRICS = 20, 60
BATCHES = 5
"""Batches of a client in one round."""
CURVES, CURVE_STEPS = 20, 5_000
KEYS_AT_ONCE = 50
SEEDS = 10
ROUNDS_DURING = 5
NAMES = [f"group{n % 7}/metric_{n}" for n in range(METRICS - 3)]
LISTS: list[dict[str, Any]] = [
    {},
    {"state": "running"},
    {"state": ["queued", "failed"], "rule": "sfpo"},
    {"tag": "t3"},
    {"text": "run 77"},
    {"sort": "score_best", "rule": "gxpo"},
]
TOTALS = [metrics.BACKWARD_PASSES, metrics.TOKENS, metrics.TRAINING_S]


class Api:
    """A service on one database: its process, direct access to the database, and an admin's token."""

    def __init__(self, url: str, home: Path) -> None:
        upgrade(url)
        self.database = Database(url)
        with self.database.writing() as session:
            made = tokens.create(session, TokenRequest(name="bench", role="admin"), actor="bench")
        self.headers = {"Authorization": f"Bearer {made.token}"}
        port = free_port(8000)
        self.url = f"http://127.0.0.1:{port}"
        environment = os.environ | {"GXPO_HOME": str(home), "GXPO_DATABASE_URL": url, "GXPO_PORT": str(port)}
        self._log = (home / "api.log").open("wb")
        command = [sys.executable, "-m", "gxpo_trainer.cli", "serve"]
        self._process = subprocess.Popen(command, env=environment, stdout=self._log, stderr=self._log)
        self.pid = self._process.pid
        with self.client() as client:
            while True:
                try:
                    client.get("/health/ready").raise_for_status()
                    return
                except httpx.HTTPError:
                    if self._process.poll() is not None:
                        raise RuntimeError((home / "api.log").read_text()) from None
                    time.sleep(0.1)

    def client(self, headers: dict[str, str] | None = None) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers=headers or self.headers, timeout=60, trust_env=False)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._log.close()
        self.database.close()


# ---- reports ---------------------------------------------------------------------------------------------------


def reports(api: Api, rounds: int) -> list[float]:
    """Points per second of each round."""
    senders = [_Sender(api) for _ in range(CLIENTS)]
    rates = []
    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(_Sender.send_round, senders))  # names are made, caches are warm
        for _ in range(rounds):
            begin = time.perf_counter()
            list(pool.map(_Sender.send_round, senders))
            rates.append(CLIENTS * BATCHES * STEPS * METRICS / (time.perf_counter() - begin))
    for sender in senders:
        sender.check(api)
    return rates


class _Sender:
    """A trainer's reports of one run."""

    def __init__(self, api: Api) -> None:
        secret = f"run_{random.getrandbits(128):x}"
        self.run = add_runs(api.database, 1, state=RunState.RUNNING, launch=1, run_token_sha256=hash_token(secret))[0]
        self.client = api.client({"Authorization": f"Bearer {secret}"})
        self.random = random.Random(self.run)
        self.step = self.batch = 0

    def send_round(self) -> None:
        for _ in range(BATCHES):
            self.batch += 1
            rows = [self._row(self.step + n) for n in range(STEPS)]
            offsets = {"metrics": self.step, "samples": 0, "evaluations": 0, "events": 0}
            content = {"attempt": 1, "batch": self.batch, "offsets": offsets, "metrics": rows}
            answer = self.client.post(f"/api/v1/runs/{self.run}/ingest", content=json.dumps(content))
            answer.raise_for_status()
            self.step += STEPS

    def check(self, api: Api) -> None:
        """Everything that was sent is there."""
        with api.client() as client:
            query: dict[str, str | int] = {"names": NAMES[0], "max_points": 20_000}
            response = client.get(f"/api/v1/runs/{self.run}/metrics", params=query).json()
        assert response["series"][NAMES[0]]["steps"] == list(range(self.step)), f"run {self.run} lost points"

    def _row(self, step: int) -> dict[str, Any]:
        values = {name: self.random.random() for name in NAMES} | {name: float(step) for name in TOTALS}
        return {"attempt": 1, "step": step, "time": time.time(), "metrics": values}


# ---- questions -------------------------------------------------------------------------------------------------


def ask(api: Api, paths: Sequence[tuple[str, dict[str, Any]]], questions: int, clients: int = CLIENTS) -> list[float]:
    """Milliseconds of each answer; the clients ask, each the next question when it has its answer."""
    times: list[float] = []
    waiting = [paths[n % len(paths)] for n in range(questions)]
    random.Random(0).shuffle(waiting)
    lock = threading.Lock()

    def asking() -> None:
        address = urlsplit(api.url)
        with closing(HTTPConnection(str(address.hostname), address.port, timeout=60)) as connection:
            while True:
                with lock:
                    if not waiting:
                        return
                    path, query = waiting.pop()
                target = f"{path}?{urlencode(query, doseq=True)}"
                begin = time.perf_counter()
                connection.request("GET", target, headers=api.headers)
                answer = connection.getresponse()
                body = answer.read()
                seconds = time.perf_counter() - begin
                if answer.status != 200:
                    raise RuntimeError(f"{target}: {answer.status} {body[:500]!r}")
                with lock:
                    times.append(1e3 * seconds)

    with ThreadPoolExecutor(clients) as pool:
        for done in [pool.submit(asking) for _ in range(clients)]:
            done.result()
    return times


def curve_questions(api: Api) -> list[tuple[str, dict[str, Any]]]:
    ids = add_runs(api.database, CURVES, state=RunState.SUCCEEDED)
    for run_id in ids:
        rows = [
            MetricRow(1, step, {"reward/mean": random.random(), metrics.BACKWARD_PASSES: 3.0 * step})
            for step in range(CURVE_STEPS)
        ]
        add_metrics(api.database, run_id, rows)
    settle(api.database)
    query = {"runs": ids, "names": "reward/mean", "max_points": 1000}
    return [("/api/v1/metrics", query), ("/api/v1/metrics", query | {"x": "backward_passes"})]


def list_questions(api: Api, count: int) -> list[tuple[str, dict[str, Any]]]:
    ids = add_runs(api.database, count, state=None)
    for run_id in ids[:: max(1, count // 2000)]:
        add_metrics(api.database, run_id, [MetricRow(1, 1, {"reward/mean": random.random()})])
    settle(api.database)
    queries = [*LISTS, {"sort": "name", "order": "asc"}, {"sort": "metric:reward/mean"}]
    paths = [("/api/v1/runs", {"limit": 50, **query}) for query in queries]
    with api.client() as client:
        for path, query in list(paths):
            cursor = client.get(path, params=query).raise_for_status().json()["next_cursor"]
            if cursor is not None:
                paths.append((path, query | {"cursor": cursor}))
    return paths


def comparison_questions(api: Api) -> Callable[[], tuple[str, dict[str, Any]]]:
    """Asks for another comparison of all rules over seeds each time; for several threads."""
    ids: list[str] = []
    for number, rule in enumerate(("grpo", "sfpo", "gxpo", "gxpo")):
        config = load_preset("demo").model_dump(mode="json")
        config["learner"]["rule"] = {"name": rule} | ({"k": 3 + number} if rule != "grpo" else {})
        made = add_runs(api.database, SEEDS, state=RunState.SUCCEEDED, config=config)
        for run_id in made:
            add_evaluations(api.database, run_id)
        ids += made
    settle(api.database)
    numbers = itertools.count(10)
    return lambda: ("/api/v1/compare", {"runs": ",".join(ids), "budgets": f"steps:{next(numbers)}.5"})


def lists_during_comparisons(api: Api, runs: int, questions: int) -> tuple[list[float], list[float]]:
    """p95 of lists alone and while two clients compare, in ms, by rounds."""
    lists, comparison = list_questions(api, runs), comparison_questions(api)
    alone, during = [], []
    for _ in range(ROUNDS_DURING):
        alone.append(float(np.percentile(ask(api, lists, questions), 95)))
        done = threading.Event()

        def compare(done: threading.Event = done) -> int:
            asked = 0
            while not done.is_set():
                ask(api, [comparison()], 1, clients=1)
                asked += 1
            return asked

        with ThreadPoolExecutor(2) as pool:
            viewers = [pool.submit(compare) for _ in range(2)]
            try:
                during.append(float(np.percentile(ask(api, lists, questions), 95)))
            finally:
                done.set()
            assert sum(viewer.result() for viewer in viewers) >= 2
    return alone, during


def submissions(api: Api) -> list[float]:
    """How many runs were made by 50 submissions at once with one key; each round has a key of its own."""
    counts = []
    for number in range(3):
        start = threading.Barrier(KEYS_AT_ONCE)
        headers = api.headers | {"Idempotency-Key": f"bench-{number}-{time.time_ns()}"}

        def submit(_: int, start: threading.Barrier = start, headers: dict[str, str] = headers) -> str:
            with api.client(headers) as client:
                start.wait()
                answer = client.post("/api/v1/runs", json={"preset": "demo"})
                answer.raise_for_status()
                return str(answer.json()["id"])

        with ThreadPoolExecutor(KEYS_AT_ONCE) as pool:
            counts.append(float(len(set(pool.map(submit, range(KEYS_AT_ONCE))))))
    return counts


# ---- all together ----------------------------------------------------------------------------------------------


@contextmanager
def serving(kind: str) -> Iterator[Api]:
    """A service on a fresh database of this kind."""
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gxpo-bench-")))
        url = f"sqlite:///{home / 'gxpo.sqlite'}"
        if kind == "postgresql":
            programs = find_programs()
            if programs is None:
                raise SystemExit(f"nothing is measured: {NOT_INSTALLED}")
            server = stack.enter_context(closing(PostgresServer(programs, fsync=True)))
            url = server.create("gxpo")
        yield stack.enter_context(closing(Api(url, home)))


def figures(kind: str, rounds: int, questions: int, runs: int) -> list[Figure]:
    measured: list[Callable[[Api], Figure]] = [
        lambda api: median(f"{kind}: reports", reports(api, rounds), "points/s", at_least=20_000),
        lambda api: percentile(
            f"{kind}: curves of {CURVES} runs, p95", ask(api, curve_questions(api), questions), 95, "ms", at_most=200
        ),
        lambda api: percentile(
            f"{kind}: list of {runs} runs, p95", ask(api, list_questions(api, runs), questions), 95, "ms", at_most=50
        ),
        lambda api: ratio(
            f"{kind}: p95 of lists during two comparisons, to that alone",
            *reversed(lists_during_comparisons(api, runs, questions)),
            at_most=2.0,
        ),
        lambda api: median(f"{kind}: runs of {KEYS_AT_ONCE} submissions, one key", submissions(api), "runs", at_most=1),
    ]
    results = []
    with serving(kind) as api:
        for measure in measured:
            results.append(measure(api))
            print(results[-1].line(), flush=True)
    return results


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--questions", type=int, default=400)
    parser.add_argument("--runs", type=int, default=10_000)
    # PostgreSQL, which may be missing, comes first, so that nothing is measured in vain.
    parser.add_argument("--databases", nargs="+", default=["postgresql", "sqlite"], choices=["sqlite", "postgresql"])
    arguments = parser.parse_args([] if argv is None else argv)
    results = [
        figure
        for kind in arguments.databases
        for figure in figures(kind, arguments.rounds, arguments.questions, arguments.runs)
    ]
    save("service", results, {"clients": CLIENTS, "batch": f"{STEPS} steps × {METRICS} metrics", **vars(arguments)})


if __name__ == "__main__":
    main(sys.argv[1:])
