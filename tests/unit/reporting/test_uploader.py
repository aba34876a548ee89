"""The uploader delivers every row once and in order, whatever fails."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings, strategies as st
from support.ingest_server import KINDS, IngestServer

from gxpo_trainer.errors import ConfigError
from gxpo_trainer.jsonl import JsonLines, write_json
from gxpo_trainer.reporting.uploader import (
    FILES,
    MAX_EVENTS,
    LineTail,
    ServiceAddress,
    ServiceUnavailable,
    Timing,
    Uploader,
    take_service,
)

QUICK = Timing(poll=0.01, heartbeat=0.05, first_retry=0.005, last_retry=0.02, give_up=20.0)
OUTCOME = {"attempt": 1, "outcome": "succeeded"}


def test_lines_are_on_disk_before_they_are_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a power cut could leave a file with fewer lines than the service received."""
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"a": 1}\n')
    synced: list[Path] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(Path(f"/proc/self/fd/{fd}").readlink()))
    assert LineTail(file).peek(10, 1000, at_least_one=True) == [b'{"a": 1}']
    assert synced == [file]


class Run:
    """The files of a run and an uploader without its thread."""

    def __init__(self, folder: Path, server: IngestServer, timing: Timing = QUICK, attempt: int = 1) -> None:
        self.folder = folder
        address = ServiceAddress(server.url, "run 1", attempt, "secret")
        self.uploader = Uploader(address, folder, timing)
        self.files = {kind: JsonLines(folder / FILES[kind]) for kind in KINDS}
        self.num = 0

    def write(self, kind: str, number: int = 1, **fields: Any) -> None:
        for _ in range(number):
            self.num += 1
            self.files[kind].append({"number": self.num, **fields})

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.step()

    def step(self) -> None:
        with contextlib.suppress(ServiceUnavailable, httpx.HTTPError):
            self.uploader.step()

    def until(self, reached: Callable[[], bool], most: int = 2000) -> None:
        for _ in range(most):
            if reached():
                return
            self.step()
        raise AssertionError("the condition was never reached")

    def on_disk(self) -> dict[str, list[Any]]:
        texts = {kind: (self.folder / FILES[kind]).read_bytes().split(b"\n")[:-1] for kind in KINDS}
        return {kind: list(map(json.loads, lines)) for kind, lines in texts.items()}

    def arrives(self, server: IngestServer) -> None:
        """Follow the files until the service has every line; nothing more, nothing twice, in order."""
        self.uploader.follow()
        self.until(lambda: server.rows == self.on_disk())
        self.steps(3)
        assert server.rows == self.on_disk()


@pytest.fixture
def run(tmp_path: Path, server: IngestServer) -> Run:
    return Run(tmp_path, server)


def test_rows_arrive_as_stored_on_disk(run: Run, server: IngestServer) -> None:
    run.write("metrics", 3, metrics={"a": float("nan"), "b": float("-inf"), "c": 1e-308, "d": 0.1})
    run.write("samples", 2, response='ä "quoted"\n\u2028')
    run.write("events", message="x")
    run.arrives(server)
    assert server.rows["metrics"][0]["metrics"] == {"a": "NaN", "b": "-Infinity", "c": 1e-308, "d": 0.1}
    assert server.calls[0]["path"] == "/api/v1/runs/run%201/ingest"
    assert (server.calls[0]["batch"], server.calls[0]["attempt"]) == (None, 1)


def test_batches_count_from_one_are_limited_in_rows_and_bytes_and_halved_until_they_fit(
    run: Run, server: IngestServer
) -> None:
    run.write("metrics", 450)
    run.write("samples", 5, response="x" * 400_000)
    run.write("evaluations", response="x" * 1_500_000)
    run.arrives(server)
    batches = [call for call in server.calls if call["batch"] is not None]
    assert [call["batch"] for call in batches] == list(range(1, len(batches) + 1))
    assert [len(call["metrics"]) for call in batches][:3] == [200, 200, 50]
    assert max(len(call[kind]) for call in batches for kind in KINDS) == 200
    sizes = [sum(len(json.dumps(row)) for kind in KINDS for row in call[kind]) for call in batches]
    assert sum(size > 1_000_000 for size in sizes) == 1, "one row alone is larger"
    server.most_bytes = 3000
    run.write("samples", 40, response="x" * 400)
    run.arrives(server)
    assert 413 in server.statuses
    assert run.uploader.take_events() == []


def test_an_unterminated_last_line_is_not_sent_and_a_damaged_one_is_null(
    run: Run, server: IngestServer, tmp_path: Path
) -> None:
    run.write("metrics", 2)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"number": 3, "te')
        file.flush()
        run.uploader.follow()
        run.until(lambda: len(server.rows["metrics"]) == 2)
        run.steps(5)
        assert len(server.rows["metrics"]) == 2
        file.write(b'xt": 1}\n')
    run.arrives(server)
    assert server.rows["metrics"][2] == {"number": 3, "text": 1}
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'\0\0\0\n{"a": NaN}\n[1]\n\xff\n{"number": 8}\n')
    run.until(lambda: len(server.rows["metrics"]) == 8)
    assert server.rows["metrics"][3:] == [None, None, None, None, {"number": 8}]


def test_the_back_off_grows_exponentially_to_its_maximum(run: Run, server: IngestServer) -> None:
    server.faults.extend(["500"] * 200)
    waits: list[float] = []
    retrying = run.uploader.retrying.copy(sleep=waits.append)
    retrying(run.uploader.step)
    bounds = [0.005, 0.01, *[0.02] * 198]
    assert all(0.0025 <= wait <= bound for wait, bound in zip(waits, bounds, strict=True))
    assert max(waits) > 0.019
    assert len({round(wait, 6) for wait in waits}) > 100, "no jitter"


def test_only_rejected_rows_are_skipped(run: Run, server: IngestServer) -> None:
    server.bad = lambda kind, row: kind == "metrics" and row["number"] in (38, 39, 250)
    run.write("metrics", 300)
    run.write("events", 5)
    run.uploader.follow()
    run.until(lambda: len(server.rows["metrics"]) == 300)
    assert [i + 1 for i, row in enumerate(server.rows["metrics"]) if row is None] == [38, 39, 250]
    assert server.rows["events"] == run.on_disk()["events"]
    events = run.uploader.take_events()
    assert [event.split(":")[0] for event in events] == [
        f"metrics.jsonl, line {line} was rejected and skipped" for line in (38, 39, 250)
    ]
    assert events[0].endswith("422: metrics: a bad row")
    assert run.uploader.take_events() == []
    # A service that rejects everything does not fill events.jsonl.
    server.bad = lambda kind, row: True
    run.write("samples", 2 * MAX_EVENTS)
    run.until(lambda: len(server.rows["samples"]) == 2 * MAX_EVENTS)
    assert len(run.uploader.take_events()) == MAX_EVENTS - len(events)


@pytest.mark.parametrize("over", [False, True])
def test_a_proxys_refusal_stops_nothing_but_a_fenced_launch_stops_calling(
    over: bool, run: Run, server: IngestServer
) -> None:
    run.write("metrics", 2)
    run.arrives(server)
    server.faults.extend(["401", "410", "401"])
    run.write("metrics", 2)
    run.until(lambda: len(server.rows["metrics"]) == 4)
    assert run.uploader.fenced is None
    assert not server.faults
    server.token, server.over = ("secret", True) if over else ("newer", False)
    run.write("metrics", 2)
    run.until(lambda: run.uploader.fenced is not None)
    assert ("410: Gone" if over else "401: another launch owns the run") in str(run.uploader.fenced)
    before = len(server.statuses)
    run.uploader.start()
    assert run.uploader.finish(OUTCOME) is False
    assert len(server.statuses) == before
    assert server.outcome is None


def test_every_response_carries_the_current_request(run: Run, server: IngestServer) -> None:
    run.uploader.follow()
    for request, expected in ((None, None), ("pause", "pause"), (None, None), ("dance", None)):
        server.request = request
        run.write("metrics")
        run.steps(2)
        assert run.uploader.request == expected


def test_the_identity_is_sent_once_per_change(run: Run, server: IngestServer, tmp_path: Path) -> None:
    write_json(tmp_path / "run.json", {"config": {"threshold": float("inf")}})
    run.write("metrics")
    run.arrives(server)
    run.write("metrics")
    run.arrives(server)
    assert server.identity == {"config": {"threshold": "Infinity"}}
    write_json(tmp_path / "run.json", {"config": {}, "attempts": [1]})
    run.until(lambda: server.identity == {"config": {}, "attempts": [1]})
    assert [call["identity"] is not None for call in server.calls].count(True) == 2


def test_a_change_of_phase_is_sent_at_once_and_repeated_with_later_heartbeats(
    tmp_path: Path, server: IngestServer
) -> None:
    run = Run(tmp_path, server, Timing(heartbeat=3600.0))
    run.steps(2)
    run.uploader.enter_phase("waiting for 3 GPUs")
    server.faults.append("500")
    run.steps(4)
    assert [call["phase"] for call in server.calls] == ["preparing", "waiting for 3 GPUs"]
    assert server.statuses == [200, 500, 200]
    run.write("metrics")
    run.arrives(server)
    assert [call["phase"] for call in server.calls[2:]] == ["waiting for 3 GPUs", None]


def test_the_thread_sends_remaining_rows_then_the_outcome(run: Run, server: IngestServer) -> None:
    run.uploader.start()
    run.uploader.follow()
    server.faults.extend(["ok", "500", "lost", "reset", "ok", "lost"])
    run.write("metrics", 450)
    assert run.uploader.finish(OUTCOME) is True
    assert server.rows == run.on_disk()
    assert server.outcome == OUTCOME
    last = server.calls[-1]
    assert (last["outcome"], [last[kind] for kind in KINDS]) == (OUTCOME, [[] for _ in KINDS])


def test_410_after_a_lost_response_counts_as_a_delivered_outcome(run: Run, server: IngestServer) -> None:
    run.uploader.follow()
    run.steps(2)
    server.faults.append("lost")
    run.uploader._queue.set_outcome(OUTCOME)
    run.steps(1)
    server.over = True
    run.uploader.start()
    assert (run.uploader.finish(OUTCOME), run.uploader.fenced) == (True, None)


def test_finish_gives_up_on_an_unavailable_service(tmp_path: Path) -> None:
    with socket.socket() as taken:  # bound, never listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        address = ServiceAddress(f"http://127.0.0.1:{taken.getsockname()[1]}", "r", 1, "secret")
        uploader = Uploader(address, tmp_path, Timing(first_retry=0.01, give_up=0.1))
        uploader.start()
        uploader.follow()
        assert uploader.finish(OUTCOME) is False


FAULTS = st.sampled_from(["ok", "ok", "500", "reset", "lost", "page"])
ACTIONS = st.one_of(
    st.tuples(st.just("write"), st.sampled_from(KINDS), st.integers(1, 30)),
    st.tuples(st.just("step"), st.just(""), st.integers(1, 6)),
    st.tuples(st.just("faults"), st.lists(FAULTS, min_size=1, max_size=4).map(tuple), st.just(0)),
    st.tuples(st.just("forget"), st.sampled_from(KINDS), st.integers(1, 20)),
    st.tuples(st.just("limit"), st.just(""), st.integers(400, 2000)),
    st.tuples(st.just("relaunch"), st.just(""), st.just(0)),
)


@given(actions=st.lists(ACTIONS, max_size=25))
@settings(max_examples=40, deadline=None)
def test_the_service_ends_with_the_lines_on_disk_whatever_fails(actions: list[tuple[str, Any, int]]) -> None:
    with IngestServer() as server, tempfile.TemporaryDirectory() as name:
        run = Run(Path(name), server)
        run.uploader.follow()
        attempt = 1
        for action, argument, number in actions:
            if action == "write":
                run.write(argument, number)
            elif action == "step":
                run.steps(number)
            elif action == "faults":
                server.faults.extend(argument)
            elif action == "forget":
                server.forget(argument, number)
            elif action == "limit":
                server.most_bytes = number
            else:
                attempt += 1
                num = run.num
                run = Run(Path(name), server, attempt=attempt)
                run.num = num
                run.uploader.follow()
        server.faults.clear()
        run.write("metrics")
        run.arrives(server)


def test_service_json_is_read_once_and_its_token_is_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "service.json"
    path.write_text('{"url": "http://127.0.0.1:8000", "run": "r1", "attempt": 2, "token": "hush"}')
    address = take_service(path)
    assert (address.url, address.run, address.attempt, address.token) == ("http://127.0.0.1:8000", "r1", 2, "hush")
    assert address.after == 0
    assert "hush" not in repr(address)
    assert not path.exists(), "other runs of the account could read it"
    for text in ("", "[]", '{"url": "http://127.0.0.1:8000"}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"cannot be used .*; the service writes it at each launch"):
            take_service(path)
