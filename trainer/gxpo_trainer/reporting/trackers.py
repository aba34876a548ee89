"""Sends a run to experiment trackers while it trains: TensorBoard, W&B, MLflow, Trackio and loggers of your own.

`Trackers` starts a process for each tracker, which reads the run's files as they grow. A slow, unreachable or failing
client therefore never delays training; what it has not accepted is retried and survives in the files. `Feed` is what
such a process does:

    trackers/NAME.json      {"metrics", "samples": bytes sent of each file, "step", "attempt": last ones, "first": see
                            below}

A run that recovers from a checkpoint repeats steps, which trackers cannot replace: from there on it is a new run of the
tracker, named after its first attempt, in the same group.

A logger of your own is a class created as `Class(out_dir, run_name=…, config=…)`, with its settings as first argument
where it has a settings class (gxpo_trainer.config.LoggerSettings). It has `write(row)`, for a row of metrics.jsonl with
numbers, `close()` and, if it wants them, `samples(step, rows)`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import httpx

from gxpo_trainer import plugins
from gxpo_trainer.compare.rows import flatten
from gxpo_trainer.config.run import LoggingConfig
from gxpo_trainer.jsonl import Row, decode_number, replace_file
from gxpo_trainer.reporting.outcome import OUTCOME
from gxpo_trainer.reporting.reading import METRICS, SAMPLES, lines_from, read_identity

Status = Literal["finished", "failed", "stopped"]
FOLDER = "trackers"
POLL_S = 0.5
FINISH_S = 20.0
"""Longest wait for the trackers at the end of a run."""
LAST_RETRY_S = 60.0
ANSWER_S = 10.0
MOST_TRIES = 3
"""Of a row that a tracker refuses although it answers."""
LONGEST_TEXT = 4000
"""Characters of a prompt or response."""
COLUMNS = ("prompt", "response", "gold", "verdict", "reward")
_SHOWN = "\n".join(f"{name}: {{{name}}}" for name in COLUMNS)


@dataclass
class TrackedRun:
    """One run of a tracker. id: unique; group: the same for all attempts. address: of the server, None for that of the
    environment. status: set before the tracker is closed."""

    out_dir: Path
    name: str
    id: str
    group: str
    config: Mapping[str, Any]
    project: str
    address: str | None
    status: Status = "stopped"


class TensorBoard:
    """Event files in the run's folder, by TensorBoard's own writer, without torch."""

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # type: ignore[import-untyped]

        self._writer = EventFileWriter(str(run.out_dir / "tensorboard" / run.id))
        self._config = run.config

    def write(self, row: Row) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        if self._config:
            self._text("config", row["step"], json.dumps(self._config, indent=2))
            self._config = {}
        values = [Summary.Value(tag=name, simple_value=value) for name, value in row["metrics"].items()]
        self._add(row["step"], row["time"], summary=Summary(value=values))

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._text("samples", step, "\n\n".join(map(_SHOWN.format_map, rows)))

    def close(self) -> None:
        self._writer.close()

    def _text(self, tag: str, step: int, text: str) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb  # type: ignore[import-untyped]

        code = "\n".join(f"    {line}" for line in text.splitlines())  # a code block: shown as it is
        self._add(step, time.time(), summary=text_pb(tag, code))

    def _add(self, step: int, wall_time: float, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]

        self._writer.add_event(Event(wall_time=wall_time, step=step, **content))
        self._writer.flush()


class Wandb:
    """A run of W&B; without WANDB_API_KEY (or `wandb login`) an offline one below `<out_dir>/wandb`."""

    def __init__(self, run: TrackedRun) -> None:
        self._url = run.address or os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai"
        # Read at import.
        os.environ |= {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true", "WANDB_BASE_URL": self._url}
        import wandb

        mode: Any = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False) else "offline")
        self._online = mode == "online"
        offline = f"wandb is offline; `wandb sync {run.out_dir}/wandb/offline-run-*` uploads it"
        self.note = "" if self._online else offline
        self._check()
        kept: dict[str, Any] = {"id": run.id, "resume": "allow"} if self._online else {}
        quiet: dict[str, Any] = {"console": "off", "disable_git": True, "save_code": False, "silent": True}
        self._tracked = run
        self._run: Any = wandb.init(
            mode=mode,
            dir=str(run.out_dir),
            project=run.project,
            group=run.group,
            name=run.name,
            config=dict(run.config),
            reinit="create_new",
            settings=wandb.Settings(**quiet, init_timeout=30, x_disable_stats=True, x_disable_meta=True),
            **kept,
        )
        # Not W&B's own step, which an evaluation after a resume could not add to.
        self._run.define_metric("*", step_metric="step")

    def _check(self) -> None:
        if self._online:
            _check_answer(httpx.get(self._url, timeout=ANSWER_S), 500)

    def write(self, row: Row) -> None:
        self._check()
        self._run.log({"step": row["step"], **row["metrics"]})

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        import wandb

        table = wandb.Table(columns=list(COLUMNS), data=[[str(row[name]) for name in COLUMNS] for row in rows])
        self._run.log({"step": step, "samples": table})

    def close(self) -> None:
        self._run.finish(exit_code=1 if self._tracked.status == "failed" else 0)


class MLflow:
    """A run of an MLflow server: the config as parameters and as config.json, samples as text files."""

    def __init__(self, run: TrackedRun) -> None:
        # The feed retries; the client's own retries take minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        from mlflow import MlflowClient  # type: ignore[import-not-found, unused-ignore]
        from mlflow.entities import Param  # type: ignore[import-not-found, unused-ignore]

        self._run = run
        if not (run.address or os.environ.get("MLFLOW_TRACKING_URI")):
            raise ValueError("no server; set MLFLOW_TRACKING_URI, or address in the run file")
        self._client: Any = MlflowClient(run.address)
        found = self._client.get_experiment_by_name(run.project)
        experiment = found.experiment_id if found else self._client.create_experiment(run.project)
        same = self._client.search_runs([experiment], f"tags.gxpo_id = '{run.id}'", max_results=1)
        if same:
            self._id = same[0].info.run_id
            self._client.update_run(self._id, "RUNNING")
            return
        tags = {"gxpo_id": run.id, "gxpo_group": run.group}
        self._id = self._client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
        settings = [Param(name, value[:500]) for name, value in flatten(run.config).items()]
        for begin in range(0, len(settings), 100):
            self._client.log_batch(self._id, params=settings[begin : begin + 100])
        self._client.log_dict(self._id, dict(run.config), "config.json")

    def write(self, row: Row) -> None:
        from mlflow.entities import Metric

        when, step = int(row["time"] * 1000), row["step"]
        names = {name: re.sub(r"[^\w/. -]", "_", name.replace("@", "_at_")) for name in row["metrics"]}
        metrics = [Metric(names[name], value, when, step) for name, value in row["metrics"].items()]
        for begin in range(0, len(metrics), 1000):
            self._client.log_batch(self._id, metrics=metrics[begin : begin + 1000])

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._client.log_text(self._id, "\n\n".join(map(_SHOWN.format_map, rows)), f"samples/step-{step:06}.txt")

    def close(self) -> None:
        ended = {"finished": "FINISHED", "failed": "FAILED"}.get(self._run.status, "KILLED")
        self._client.set_terminated(self._id, ended)


class Trackio:
    """A run of Trackio: of a server, of a Space (TRACKIO_SPACE_ID), or in its folder on this machine."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio  # type: ignore[import-not-found, unused-ignore]

        self._url = run.address or os.environ.get("TRACKIO_SERVER_URL")
        self._check()
        # Names are Trackio's ids.
        self._run: Any = trackio.init(
            run.project,
            name=f"{run.name} {run.id}",
            group=run.group,
            server_url=self._url,
            config=dict(run.config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def _check(self) -> None:
        """Raise unless the server accepts a write."""
        if self._url:
            headers = {"X-Trackio-Write-Token": os.environ.get("TRACKIO_WRITE_TOKEN", "")}
            nothing: dict[str, Any] = {"kwargs": {"logs": [], "hf_token": None}}
            url = f"{self._url.rstrip('/')}/api/bulk_log"
            _check_answer(httpx.post(url, headers=headers, json=nothing, timeout=ANSWER_S), 400)

    def write(self, row: Row) -> None:
        self._check()
        # What Trackio could not send it sends again as JSON, which has no NaN.
        self._run.log({name: value for name, value in row["metrics"].items() if math.isfinite(value)}, step=row["step"])

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        import trackio

        table = trackio.Table(data=[{name: str(row[name]) for name in COLUMNS} for row in rows])
        self._run.log({"samples": table}, step)

    def close(self) -> None:
        self._run.finish()


CLIENTS: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": MLflow, "trackio": Trackio}


class Feed:
    """Sends the lines of one run to one tracker, each once unless a process is killed between sending and noting it.

    say: takes a sentence for the user: the first failure of an outage, a row that is refused.
    """

    def __init__(self, out_dir: Path, name: str, say: Callable[[str], None]) -> None:
        self._config = current_config(out_dir)
        self._logging = LoggingConfig.model_validate(self._config.pop("logging"))
        (self._settings,) = (tracker for tracker in self._logging.trackers if tracker.name == name)
        self._out_dir, self._name, self._say = out_dir, name, say
        self._path = out_dir / FOLDER / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}.json"
        self._path.parent.mkdir(exist_ok=True)
        # Held until this process ends: that of an earlier launch may still be sending.
        self._lock = self._path.with_suffix(".lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._sent: dict[str, int] = dict.fromkeys(("metrics", "samples", "step", "attempt", "first"), 0)
        if self._path.exists():
            self._sent |= json.loads(self._path.read_text())
        identity = read_identity(out_dir)
        began = f"{identity['config_sha256']} {identity['attempts'][0]['time']}"
        self._group = hashlib.sha256(began.encode()).hexdigest()[:8]
        self._tracker: Any = None
        self._failed, self._tries = False, 0

    def run(self, ending: threading.Event) -> bool:
        """Send until `ending` is set and the rest is sent; returns whether it was."""
        delay = POLL_S
        while True:
            final, tries = ending.is_set(), self._tries  # before the files are read
            try:
                more = self.advance()
            except Exception as error:  # clients raise anything
                self._fail(error)
                if final and self._tries == tries:  # it was not reached; what it refuses is skipped soon
                    return False
                ending.wait(delay)
                delay = min(2 * delay, LAST_RETRY_S)
                continue
            delay = POLL_S
            if not more:
                if final:
                    return True
                ending.wait(POLL_S)

    def advance(self) -> bool:
        """Send the next row with the samples of its step. Returns False when there is none."""
        text, end = next(lines_from(self._out_dir / METRICS, self._sent["metrics"]), (b"", 0))
        if not end:
            return False
        line = json.loads(text)
        step, attempt = int(line["step"]), int(line["attempt"])
        if not self._sent["first"] or (attempt > self._sent["attempt"] and step <= self._sent["step"]):
            self.close("stopped")
            self._sent["first"] = attempt
        self._sent["attempt"] = max(attempt, self._sent["attempt"])
        if self._tracker is None:
            self._tracker = self._open()
        samples: list[dict[str, Any]] = []
        samples_end = self._sent["samples"]
        for text, row_end in lines_from(self._out_dir / SAMPLES, samples_end):
            row = json.loads(text)
            if (row["attempt"], row["step"]) > (attempt, step):
                break
            samples_end = row_end
            if row["step"] == step and len(samples) < self._logging.samples_per_step:
                prompt, response = row.get("rendered_prompt") or row["prompt"], row["response"]
                texts = {"prompt": prompt[:LONGEST_TEXT], "response": response[:LONGEST_TEXT]}
                samples.append(texts | {name: row[name] for name in ("gold", "verdict", "reward")})
        if samples and hasattr(self._tracker, "samples"):
            self._deliver(lambda: self._tracker.samples(step, samples), f"samples of step {step}")
            self._note(samples=samples_end)
        metrics = {name: decode_number(value) for name, value in line["metrics"].items()}
        self._deliver(lambda: self._tracker.write({**line, "metrics": metrics}), f"a row of step {step}")
        self._note(metrics=end, samples=samples_end, step=step)
        self._failed = False
        return True

    def close(self, status: Status) -> None:
        """Close the tracker's run. Raises what the client raises."""
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            self._run.status = status
            tracker.close()

    def _open(self) -> Any:
        attempt = self._sent["first"]
        name = self._config["name"]
        self._run = TrackedRun(
            self._out_dir,
            name=name if attempt == 1 else f"{name} (attempt {attempt})",
            id=self._group if attempt == 1 else f"{self._group}-{attempt}",
            group=self._group,
            config=self._config,
            project=self._logging.project,
            address=self._settings.address,
        )
        if self._name in CLIENTS:
            tracker = CLIENTS[self._name](self._run)
            if (note := getattr(tracker, "note", "")) and not self._sent["metrics"]:
                self._say(note)
            return tracker
        if hasattr(self._settings, "implementation"):
            make: Callable[..., Any] = partial(plugins.implementation(self._settings), self._settings)
        else:
            make = plugins.load("loggers", self._name)
        return make(self._out_dir, run_name=name, config=self._config)

    def _deliver(self, send: Callable[[], None], what: str) -> None:
        """Send. The tracker was opened, so it answers: what it refuses again and again is skipped."""
        try:
            send()
        except Exception as error:
            self._tries += 1
            if self._tries < MOST_TRIES:
                raise
            self._say(f"{self._name} refuses {what}, which is skipped: {_words(error)}")
        self._tries = 0

    def _fail(self, error: Exception) -> None:
        if not self._failed:
            self._say(
                f"{self._name} cannot be reached or refuses the run; training goes on, and what is missing is "
                f"sent when it answers: {_words(error)}"
            )
        self._failed = True
        with contextlib.suppress(Exception):  # told already
            self.close("stopped")

    def _note(self, **sent: int) -> None:
        self._sent |= sent
        replace_file(self._path, json.dumps(self._sent))


class Trackers:
    """The processes that feed the trackers of a run, as a context: entered once run.json exists, left at the run's end.

    report: takes a sentence for the user, on a thread of its own. status: of the run, for trackers that show it.
    finish_s: longest wait at the end.
    """

    def __init__(
        self,
        out_dir: Path,
        logging: LoggingConfig,
        report: Callable[[str], None],
        *,
        finish_s: float = FINISH_S,
        python: str = sys.executable,
    ) -> None:
        self._out_dir, self._logging, self._report, self._python = out_dir, logging, report, python
        self.finish_s = finish_s
        self.status: Status = "stopped"
        self.complete = True
        """Whether, after the end, every tracker has been sent everything."""
        self._feeds: list[tuple[str, subprocess.Popen[str], threading.Thread]] = []

    def __enter__(self) -> Self:
        for tracker in self._logging.trackers:
            # A group of its own: Ctrl-C is for the run, whose end ends the feed.
            feed = subprocess.Popen(
                [self._python, "-m", __name__, str(self._out_dir), tracker.name, str(self.finish_s)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # clients may print addresses and keys
                text=True,
                process_group=0,
            )
            reader = threading.Thread(target=self._forward, args=(feed,), daemon=True)
            reader.start()
            self._feeds.append((tracker.name, feed, reader))
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        for _, feed, _ in self._feeds:
            assert feed.stdin is not None
            try:
                with feed.stdin as pipe:
                    print("failed" if kind and issubclass(kind, Exception) else self.status, file=pipe)
            except BrokenPipeError:
                pass  # it has ended; see below
        deadline = time.monotonic() + self.finish_s
        for name, feed, reader in self._feeds:
            try:
                code = feed.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                feed.kill()
                code = feed.wait()
            reader.join(1.0)
            if code:
                self.complete = False
                self._report(f"{name} has not been sent everything; `gxpo track {self._out_dir}` sends the rest")

    def _forward(self, feed: subprocess.Popen[str]) -> None:
        assert feed.stdout is not None
        for line in feed.stdout:
            self._report(line.strip())


def current_config(out_dir: Path) -> dict[str, Any]:
    """The config of the run's last launch. Raises DataError."""
    identity = read_identity(out_dir)
    changed = identity["attempts"][-1].get("changed", {})
    config: dict[str, Any] = changed.get("config", {}).get("now") or identity["config"]
    return config


def ended_as(out_dir: Path) -> Status:
    """How a run has ended; one without an outcome was stopped."""
    try:
        outcome = json.loads((out_dir / OUTCOME).read_text(encoding="utf-8"))["outcome"]
    except (FileNotFoundError, ValueError):
        return "stopped"
    return "finished" if outcome == "succeeded" else "failed" if outcome == "failed" else "stopped"


def _check_answer(response: httpx.Response, least: int) -> None:
    """Raise for this HTTP status and above: W&B and Trackio queue, and do not tell that their server is away."""
    if response.status_code >= least:
        raise ConnectionError(f"{response.url} answered {response.status_code}: {response.text}")


def _words(error: Exception) -> str:
    """An error in one line, without the keys of the environment."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    for name, value in os.environ.items():
        if re.search("KEY|TOKEN|PASSWORD|SECRET", name) and len(value) > 5:
            text = text.replace(value, "…")
    return re.sub(r"//[^/@\s]+@", "//…@", text)[:400]


def main(out_dir: Path, name: str, finish_s: float) -> None:
    """Feed one tracker until stdin has the run's status, or ends because the trainer was killed."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # clients print to stdout
    ending = threading.Event()
    status: Any = "stopped"

    def wait_for_end() -> None:
        nonlocal status
        status = sys.stdin.readline().strip() or status
        # Clients may hang.
        timer = threading.Timer(finish_s, os._exit, (1,))
        timer.daemon = True
        timer.start()
        ending.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    feed = Feed(out_dir, name, lambda text: print(text, file=channel))
    done = feed.run(ending)
    if done:
        feed.close(status)
    channel.flush()
    os._exit(0 if done else 1)  # hooks of clients at exit may hang


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
