"""Jobs of the scheduler: the run's folder that a job works in, the launcher interface, and Ray's job server."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, get_args
from urllib.parse import quote

import httpx
import psutil

from gxpo_client.client import is_loopback
from gxpo_services.db.tables import Run
from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.io import to_toml
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.jsonl import replace_file
from gxpo_trainer.runtime.locks import LOCK, process_start

_CONFIG, _SERVICE = "config.toml", "service.json"
JobState = Literal["pending", "running", "succeeded", "failed", "stopped", "unknown"]
_RESPONSE_S = 10.0
_LONGEST_MESSAGE = 1000
_OUT_OF_MEMORY = re.compile(r"OutOfMemory|out of memory|low on memory|oom[ -]?kill", re.IGNORECASE)


class LauncherUnavailable(Exception):
    """The job server does not answer or rejects our token; the state of every job is unknown."""


class JobRefused(Exception):
    """The job server rejected a request for this job."""


@dataclass(frozen=True, slots=True)
class Job:
    """One launch of a run. id: never reused. log: file for the output, in the run's folder, the working directory. env:
    environment variables, none of them secret. owner: who submitted the run."""

    id: str
    command: tuple[str, ...]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    owner: str = ""

    @property
    def metadata(self) -> dict[str, str]:
        """What Ray's own dashboard shows of the job. `gxpo_artifacts` tells the jobs of one service from others'."""
        run, _, launch = self.id.rpartition("-")
        artifacts = str(self.log.parent.parent)
        return {"gxpo_run": run, "gxpo_launch": launch, "gxpo_owner": self.owner, "gxpo_artifacts": artifacts}

    @property
    def entrypoint(self) -> str:
        """The command as one line for a shell; `exec` leaves no shell between the job and the trainer."""
        # In the run's folder, relative paths of a config cannot refer to files of others.
        folder, log = shlex.quote(str(self.log.parent)), shlex.quote(str(self.log))
        return f"cd {folder} && exec {shlex.join(self.command)} >> {log} 2>&1"


@dataclass(frozen=True, slots=True)
class JobStatus:
    """Status of a job. unknown: the launcher has no record of it."""

    state: JobState
    message: str = ""

    @property
    def is_alive(self) -> bool:
        return self.state in ("pending", "running")

    @property
    def out_of_memory(self) -> bool:
        return self.state == "failed" and _OUT_OF_MEMORY.search(self.message) is not None

    @property
    def summary(self) -> str:
        """The message, shortened: an out-of-memory report lists a whole node, and one line of it names the cause."""
        lines = [line.strip() for line in self.message.splitlines() if _OUT_OF_MEMORY.search(line)]
        return (lines[0] if self.out_of_memory else self.message)[:_LONGEST_MESSAGE]


class Launcher(Protocol):
    """Runs jobs. Every method is idempotent. Raises LauncherUnavailable, JobRefused."""

    def submit(self, job: Job) -> None:
        """Start a job; does nothing when its id is already known."""

    def status(self, job_id: str) -> JobStatus: ...

    def stop(self, job_id: str) -> None:
        """Terminate a job, then kill it; returns immediately. Does nothing when the job has ended or is unknown."""

    def delete(self, job_id: str) -> None:
        """Forget a job that has ended. Does nothing when it is unknown."""

    def statuses(self, artifacts: Path) -> dict[str, JobStatus]:
        """Status of every known job of the service with this artifact folder, by id."""

    def resources(self) -> tuple[float, float]:
        """Logical CPUs and GPUs of the whole cluster, free or not."""


def trainer_command(folder: Path) -> tuple[str, ...]:
    """The command of a job: starts the run in `folder`, or resumes it from its checkpoint."""
    files = str(folder / _CONFIG), "--out", str(folder), "--continue", "--service", str(folder / _SERVICE)
    return (sys.executable, "-m", "gxpo_trainer.cli", "train", *files)


def prepare(folder: Path, run: Run, *, url: str, token: str) -> None:
    """Write config.toml and service.json (mode 0600), each atomically.

    Raises pydantic's ValidationError for a config that this version does not support, OSError.
    """
    text = to_toml(RunConfig.model_validate(run.config), [f"run {run.id}"])
    address = {"url": url, "run": run.id, "attempt": run.launch, "token": token, "after": run.attempt}
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / _CONFIG, text, 0o644)
    replace_file(folder / _SERVICE, json.dumps(address, indent=2) + "\n", 0o600)


def kill_orphaned_trainer(folder: Path) -> bool:
    """Kill a trainer on this machine that still holds the folder's lock; returns whether there was one.

    Its job is over, e.g. because Ray's head was restarted. An orphan on another machine is not reachable from here: its
    token is invalid, so it stops at its next step.
    """
    try:
        with (folder / LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
    except (FileNotFoundError, NotADirectoryError):
        return False
    except BlockingIOError:
        holder = (folder / LOCK).read_text(encoding="utf-8", errors="replace").split()
    with suppress(ValueError, psutil.NoSuchProcess):
        pid, start = (int(word) for word in holder)
        process = psutil.Process(pid)  # which knows its start time: a reused pid is not signalled
        if process_start(pid) == start and any(str(folder) in word for word in process.cmdline()):
            process.kill()
            return True
    return False


class RayLauncher:
    """Ray's job server over its documented REST interface.

    Ray's own client is not used: it has no time-out, so a hanging head would let leases expire, and RAY_ADDRESS
    overrides its address argument.

    address: of the job server. The token is RAY_AUTH_TOKEN, or the content of the file RAY_AUTH_TOKEN_PATH, as in all
    of Ray; raises ConfigError when the file cannot be read. Jobs reserve no logical CPU; the run's actors do. A job
    contains no secret, because every client of the job server can read it.
    """

    def __init__(self, address: str, *, transport: httpx.BaseTransport | None = None) -> None:
        self._address = address.rstrip("/")
        self._client = httpx.Client(
            base_url=self._address,
            headers=_authorization(os.environ),
            timeout=_RESPONSE_S,
            transport=transport,
            trust_env=not is_loopback(self._address),
        )

    def submit(self, job: Job) -> None:
        # Ray responds with 500 to a known id.
        if self.status(job.id).state != "unknown":
            return
        body = {
            "entrypoint": job.entrypoint,
            "submission_id": job.id,
            "entrypoint_num_cpus": 0,
            "metadata": job.metadata,
            "runtime_env": {"env_vars": {"PYTHONUNBUFFERED": "1", **job.env}},
        }
        response = self._ask("POST", "/api/jobs/", json=body)
        if response.status_code != 200 and self.status(job.id).state == "unknown":
            raise JobRefused(f"Ray at {self._address} rejected job {job.id}: {_reason(response)}")

    def status(self, job_id: str) -> JobStatus:
        response = self._ask("GET", f"/api/jobs/{quote(job_id, safe='')}")
        if response.status_code == 404:
            return JobStatus("unknown")
        with self._reading(response):
            return _status(response.json())

    def stop(self, job_id: str) -> None:
        response = self._ask("POST", f"/api/jobs/{quote(job_id, safe='')}/stop")
        # Ray responds with an error when the job has just ended; its status shows that.
        if response.status_code not in (200, 404) and self.status(job_id).is_alive:
            raise JobRefused(f"Ray at {self._address} did not stop job {job_id}: {_reason(response)}")

    def delete(self, job_id: str) -> None:
        response = self._ask("DELETE", f"/api/jobs/{quote(job_id, safe='')}")
        if response.status_code not in (200, 404):
            raise JobRefused(f"Ray at {self._address} did not delete job {job_id}: {_reason(response)}")

    def statuses(self, artifacts: Path) -> dict[str, JobStatus]:
        response, folder = self._ask("GET", "/api/jobs/"), str(artifacts)
        with self._reading(response):
            mine = [job for job in response.json() if (job.get("metadata") or {}).get("gxpo_artifacts") == folder]
            return {str(job["submission_id"]): _status(job) for job in mine}

    def resources(self) -> tuple[float, float]:
        response = self._ask("GET", "/api/v0/nodes", params={"detail": "true", "limit": 10000})
        with self._reading(response):
            nodes = response.json()["data"]["result"]["result"]
            totals: list[Mapping[str, float]] = [node["resources_total"] for node in nodes if node["state"] == "ALIVE"]
            cpus, gpus = (sum(float(total.get(name, 0)) for total in totals) for name in ("CPU", "GPU"))
            return cpus, gpus

    def _ask(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        try:
            response = self._client.request(method, path, **arguments)
        except httpx.HTTPError as error:
            raise LauncherUnavailable(f"Ray at {self._address} does not answer: {error!r}") from error
        if response.status_code in (401, 403):
            raise LauncherUnavailable(
                f"Ray at {self._address} rejects our token ({response.status_code}); "
                "set RAY_AUTH_TOKEN to the cluster's"
            )
        return response

    @contextmanager
    def _reading(self, response: httpx.Response) -> Iterator[None]:
        """Raise LauncherUnavailable for an error response, and for one of another format than the block expects."""
        try:
            if response.status_code != 200:
                raise ValueError(_reason(response))
            yield
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise LauncherUnavailable(f"Ray at {self._address} returned an invalid response: {error!r}") from error


_STATES: dict[str, JobState] = {state.upper(): state for state in get_args(JobState) if state != "unknown"}


def _status(job: Mapping[str, Any]) -> JobStatus:
    message = str(job.get("message") or "")
    return JobStatus(_STATES[job["status"]], message.replace("\0", ""))


def _authorization(environment: Mapping[str, str]) -> dict[str, str]:
    token, file = environment.get("RAY_AUTH_TOKEN", ""), environment.get("RAY_AUTH_TOKEN_PATH", "")
    if not token and file:
        try:
            token = Path(file).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigError(f"RAY_AUTH_TOKEN_PATH = {file} cannot be read: {error.strerror}") from None
    return {"Authorization": f"Bearer {token}"} if token else {}


def _reason(response: httpx.Response) -> str:
    """The last line with a letter of what is often a traceback."""
    lines = [line.strip() for line in response.text.splitlines() if any(map(str.isalpha, line))]
    return f"{response.status_code} {lines[-1][:300] if lines else ''}".strip()
