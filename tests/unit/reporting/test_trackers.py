"""Trackers: files read back by their own formats, real MLflow and Trackio servers, and clients that fail.

The two servers and their clients run under GXPO_TEST_TRACKERS, a Python with requirements/trackers.txt, where the
environment of the tests has them not.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.service_processes import free_port, until

import gxpo_trainer
from gxpo_trainer.config.io import build, check_implementations
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.reporting import trackers
from gxpo_trainer.reporting.identity import run_identity
from gxpo_trainer.reporting.reporter import RunReporter
from gxpo_trainer.reporting.trackers import Feed, Trackers, ended_as

PYTHON = os.environ.get("GXPO_TEST_TRACKERS", sys.executable)
LOGGER = '''
import json, time
class Lines:
    """Notes what it gets; `plan.json` says how often each step fails, and which one hangs."""
    def __init__(self, out_dir, *, run_name, config):
        self.out_dir, self.name = out_dir, run_name
    def write(self, row):
        plan = json.loads((self.out_dir / "plan.json").read_text())
        step = str(row["step"])
        if plan.get(step, 0) == "hang":
            time.sleep(3600)
        if plan.get(step, 0) > 0:
            plan[step] -= 1
            (self.out_dir / "plan.json").write_text(json.dumps(plan))
            raise OSError(f"no answer to {SECRET}")
        with (self.out_dir / "lines.txt").open("a") as file:
            print(self.name, row["step"], row["metrics"]["reward/mean"], file=file)
    def close(self):
        pass
SECRET = "s3cret-of-mine"
'''


def start(out_dir: Path, tracker: Any, **logging: Any) -> RunReporter:
    config = build({"name": "demo", "logging": {"trackers": [tracker], "project": "lab", **logging}})
    reporter = RunReporter(out_dir, clock=lambda: 1000.0)
    reporter.write_identity(run_identity(config))
    return reporter


def write(reporter: RunReporter, attempt: int, steps: range, scale: float) -> None:
    for step in steps:
        row = {"prompt": "2+2", "response": f"\\boxed{{{step}}}", "gold": "4", "verdict": "wrong", "reward": 0.0}
        reporter._files["samples.jsonl"].append({"attempt": attempt, "step": step, "time": 1000.0, **row})
        reporter.log_metrics(step, {"reward/mean": step * scale, "eval/average/pass@1": 0.5, "gate/z": math.nan})


def send(out_dir: Path, tracker: Any, *, python: str = sys.executable, finish_s: float = 60.0) -> list[str]:
    """Steps 1 to 4, a crash, and steps 3 to 5 again from the checkpoint at step 2, live; returns the messages."""
    said: list[str] = []
    with start(out_dir, tracker) as reporter:
        logging = build({"logging": {"trackers": [tracker]}}).logging
        with Trackers(out_dir, logging, said.append, python=python, finish_s=finish_s) as running:
            write(reporter, 1, range(1, 5), 0.1)
            reporter.start_attempt(2, 2)
            write(reporter, 2, range(3, 6), 0.01)
            running.status = "finished"
    return said


def test_tensorboard_shows_each_attempt_with_the_config_and_samples(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert send(tmp_path, "tensorboard") == []
    runs = []
    for folder in sorted((tmp_path / "tensorboard").iterdir(), key=lambda folder: len(folder.name)):
        events = accumulator.EventAccumulator(str(folder))
        events.Reload()
        tags = events.Tags()["scalars"]
        runs.append({tag: [(e.step, round(e.value, 6)) for e in events.Scalars(tag)] for tag in tags})
    first, second = runs
    assert first["reward/mean"] == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    assert second["reward/mean"] == [(3, 0.03), (4, 0.04), (5, 0.05)]
    assert all(math.isnan(value) for _, value in second["gate/z"])
    texts = {tag: events.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]}
    assert '"learning_rate": 1e-05' in texts["config"]
    assert "    response: \\boxed{5}" in texts["samples"].splitlines()


def test_wandb_without_a_key_writes_one_offline_run_per_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("HOME", str(tmp_path))  # without ~/.netrc
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    said = send(tmp_path / "run", "wandb")
    assert said == [f"wandb is offline; `wandb sync {tmp_path}/run/wandb/offline-run-*` uploads it"]
    # The second attempt is a run of its own.
    assert len(list(tmp_path.glob("run/wandb/offline-run-*/*.wandb"))) == 2
    tables = list(tmp_path.glob("run/wandb/offline-run-*/files/media/table/samples_*.json"))
    assert len(tables) == 7


@pytest.fixture
def other_python(monkeypatch: pytest.MonkeyPatch) -> str:
    if sys.executable != PYTHON:
        monkeypatch.setenv("PYTHONPATH", str(Path(gxpo_trainer.__file__).parents[1]))
    return PYTHON


@pytest.fixture
def serve(other_python: str) -> Iterator[Callable[..., str]]:
    """Starts a server on a free port of loopback: `serve(module, *arguments)`; returns its address."""
    running: list[subprocess.Popen[bytes]] = []

    def begin(module: str, *arguments: str, port: int = 0) -> str:
        if subprocess.run([other_python, "-c", f"import {module}"], capture_output=True, check=False).returncode:
            pytest.skip(f"{module} is not installed; pip install -r requirements/trackers.txt into GXPO_TEST_TRACKERS")
        port = port or free_port()
        command = [other_python, *(part.replace("PORT", str(port)) for part in arguments)]
        running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0))
        until(lambda: answers(port), f"{module} to start")
        return f"http://127.0.0.1:{port}"

    yield begin
    for server in running:
        os.killpg(server.pid, 9)  # with its workers
        server.wait()


def answers(port: int) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return bool(httpx.get(f"http://127.0.0.1:{port}/", trust_env=False))
    return False


def mlflow_runs(url: str) -> list[dict[str, Any]]:
    api = f"{url}/api/2.0/mlflow"
    ids = httpx.get(f"{api}/experiments/get-by-name", params={"experiment_name": "lab"}).json()
    body = {"experiment_ids": [ids["experiment"]["experiment_id"]]}
    runs = httpx.post(f"{api}/runs/search", json=body).json()["runs"]
    for run in runs:
        params = {"run_id": run["info"]["run_id"], "metric_key": "reward/mean"}
        history = httpx.get(f"{api}/metrics/get-history", params=params).json()["metrics"]
        run["history"] = [(int(each.get("step", 0)), round(each["value"], 6)) for each in history]
    return sorted(runs, key=lambda run: str(run["info"]["run_name"]))


@pytest.mark.long("a server of MLflow and its client; the other clients and outages run in every suite")
def test_a_late_mlflow_server_gets_config_curves_and_samples_and_the_key_stays_out_of_the_files(
    serve: Callable[..., str], other_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://user:hidden-word@127.0.0.1:{port}")
    said = send(tmp_path / "run", "mlflow", python=other_python)
    assert len(said) == 2, said
    assert said[0].startswith("mlflow cannot be reached or refuses the run; training goes on")
    assert said[1] == f"mlflow has not been sent everything; `gxpo track {tmp_path / 'run'}` sends the rest"
    store = [f"--backend-store-uri=sqlite:///{tmp_path}/mlflow.db", f"--artifacts-destination={tmp_path}/artifacts"]
    url = serve("mlflow", "-m", "mlflow", "server", "--port", "PORT", "--workers", "1", *store, port=port)
    logging = build({"logging": {"trackers": ["mlflow"]}}).logging
    with Trackers(tmp_path / "run", logging, said.append, python=other_python, finish_s=60.0) as running:
        running.status = "finished"
    assert running.complete
    first, second = mlflow_runs(url)
    assert first["history"] == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    assert second["history"] == [(3, 0.03), (4, 0.04), (5, 0.05)]
    assert [run["info"]["run_name"] for run in (first, second)] == ["demo", "demo (attempt 2)"]
    assert second["info"]["status"] == "FINISHED"
    assert {each["key"] for each in first["data"]["metrics"]} >= {"eval/average/pass_at_1", "gate/z"}
    assert {"key": "learner.optimizer.learning_rate", "value": "1e-05"} in first["data"]["params"]
    assert list(tmp_path.glob("artifacts/**/samples/step-000005.txt"))
    written = b"".join(file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file())
    assert b"hidden-word" not in written + " ".join(said).encode()


@pytest.mark.long("a server of Trackio and its client; the other clients and outages run in every suite")
@pytest.mark.parametrize("token", ["right", "wrong"])
def test_trackio_gets_config_curves_and_samples_with_the_right_token(
    serve: Callable[..., str], other_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "server"))
    code = (
        "import pathlib, sys, time, trackio\n"
        "url = trackio.show(open_browser=False, block_thread=False, server_port=int(sys.argv[1]), share=False)[3]\n"
        "pathlib.Path(sys.argv[2]).write_text(url.partition('write_token=')[2]); time.sleep(3600)"
    )
    url = serve("trackio", "-c", code, "PORT", str(tmp_path / "token"))
    until(lambda: (tmp_path / "token").exists(), "its token")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "client"))
    monkeypatch.setenv("TRACKIO_WRITE_TOKEN", (tmp_path / "token").read_text() if token == "right" else "wrong-token")
    said = send(tmp_path / "run", {"name": "trackio", "address": url}, python=other_python)
    listing = httpx.post(f"{url}/api/get_runs_for_project", json={"kwargs": {"project": "lab"}}).text
    if token == "wrong":
        assert len(said) == 2, said
        assert "training goes on" in said[0]
        assert "answered 400" in said[0]
        assert "demo" not in listing
        return
    assert said == []
    assert "demo (attempt 2)" in listing
    stored = (tmp_path / "server" / "lab.db").read_bytes()
    assert all(word in stored for word in (b"reward/mean", b"boxed", b"learning_rate"))


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_logger.py").write_text(LOGGER)
    (tmp_path / "plan.json").write_text("{}")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(trackers, "POLL_S", 0.001)
    monkeypatch.setattr(trackers, "LAST_RETRY_S", 0.004)
    return "own_logger:Lines"


class Soon(threading.Event):
    """Set after some waits, none of which takes time."""

    def __init__(self, waits: int) -> None:
        super().__init__()
        self.left, self.waited = waits, list[float]()

    def wait(self, timeout: float | None = None) -> bool:
        self.waited.append(timeout or 0.0)
        self.left -= 1
        if not self.left:
            self.set()
        return self.is_set()


def feed(out_dir: Path, name: str, waits: int = 20) -> tuple[bool, list[str], list[float]]:
    """Run a feed, which then has ended as by a kill; returns whether all was sent, what it said, its waits."""
    said: list[str] = []
    ending = Soon(waits)
    return Feed(out_dir, name, said.append).run(ending), said, ending.waited


def lines(out_dir: Path) -> list[str]:
    return (out_dir / "lines.txt").read_text().splitlines()


def test_a_logger_that_fails_for_a_while_gets_every_row_once_and_is_reported_once(
    own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "s3cret-of-mine")
    (tmp_path / "plan.json").write_text('{"2": 2, "6": 99, "7": 99}')
    with start(tmp_path, own) as reporter:
        write(reporter, 1, range(1, 5), 0.5)
        done, said, waited = feed(tmp_path, own)
        assert done
        assert lines(tmp_path) == ["demo 1 0.5", "demo 2 1.0", "demo 3 1.5", "demo 4 2.0"]
        (message,) = said
        assert message.startswith(f"{own} cannot be reached or refuses the run; training goes on")
        assert message.endswith("OSError: no answer to …"), "messages have no key"
        assert waited[:2] == [trackers.POLL_S, 2 * trackers.POLL_S], "the pause doubles"
        write(reporter, 1, range(5, 7), 0.5)
        done, said, _ = feed(tmp_path, own)
        assert lines(tmp_path)[4:] == ["demo 5 2.5"], "the next process continues"
        assert done
        assert any("refuses a row of step 6, which is skipped: OSError" in message for message in said)
        write(reporter, 1, range(7, 8), 0.5)
        done, said, waited = feed(tmp_path, own, waits=1)
        assert (done, len(waited)) == (True, 2), "also when nothing is waited for any more"
        assert any("refuses a row of step 7, which is skipped: OSError" in message for message in said)
        write(reporter, 1, range(8, 9), 0.5)
        (tmp_path / "own_logger.py").rename(tmp_path / "away.py")
        monkeypatch.delitem(sys.modules, "own_logger")
        assert feed(tmp_path, own, waits=1)[0] is False, "one that cannot be reached has not been sent everything"
    assert b"s3cret-of-mine" not in b"".join(file.read_bytes() for file in tmp_path.rglob("*.json*"))


@pytest.mark.parametrize(
    ("outcome", "status"),
    [("", "stopped"), ('{"outcome": "paused"}', "stopped"), ('{"outcome": "failed"}', "failed"),
     ('{"outcome": "succeeded"}', "finished")],
)  # fmt: skip
def test_what_is_sent_later_has_the_status_of_the_run(outcome: str, status: str, tmp_path: Path) -> None:
    assert ended_as(tmp_path) == "stopped"
    (tmp_path / "outcome.json").write_text(outcome)
    assert ended_as(tmp_path) == status


def test_a_client_that_hangs_is_killed_and_named(own: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"2": "hang"}')
    said: list[str] = []
    with (
        start(tmp_path, own) as reporter,
        Trackers(tmp_path, build({"logging": {"trackers": [own]}}).logging, said.append, finish_s=0.5),
    ):
        write(reporter, 1, range(1, 4), 0.1)
        while not (tmp_path / "lines.txt").exists():
            time.sleep(0.01)
    assert said == [f"{own} has not been sent everything; `gxpo track {tmp_path}` sends the rest"]
    assert lines(tmp_path) == ["demo 1 0.1"]


def test_a_feed_ends_by_itself_when_its_trainer_is_killed(own: str, tmp_path: Path) -> None:
    with start(tmp_path, own) as reporter:
        write(reporter, 1, range(1, 4), 0.5)
    command = [sys.executable, "-m", "gxpo_trainer.reporting.trackers", str(tmp_path), own, "20"]
    orphan = subprocess.run(command, stdin=subprocess.DEVNULL, check=False, timeout=60)
    assert orphan.returncode == 0
    assert len(lines(tmp_path)) == 3


def test_a_missing_package_is_reported_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    config = build({"logging": {"trackers": ["mlflow"], "project": "x"}})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=re.escape("logging.trackers[0]") + ".*pip install mlflow-skinny, or remove"):
        check_implementations(config, "run.toml")
    config = build({"logging": {"trackers": ["mlflow", "wandb"], "project": "x"}})
    with pytest.raises(ConfigError) as caught:
        check_implementations(config, "run.toml")
    first, *others = str(caught.value).splitlines()
    assert (first, len(others)) == ("run.toml cannot be used:", 2), "all at once"
