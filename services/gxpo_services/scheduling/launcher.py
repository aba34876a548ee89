"""Where jobs run: the verbs that the scheduler needs, and Ray's job server behind them."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import quote

import httpx

from gxpo_services.network.addresses import is_loopback
from gxpo_trainer.errors import ConfigError

JobState = Literal["pending", "running", "succeeded", "failed", "stopped", "unknown"]
_ANSWER_S = 10.0
_OUT_OF_MEMORY = re.compile(r"OutOfMemory|out of memory|oom[ -]?kill", re.IGNORECASE)


class LauncherUnavailable(Exception):
    """What runs the jobs does not answer, or refuses us; nothing is known about any job."""


class JobRefused(Exception):
    """What runs the jobs answers, and does not do what is asked for this one."""


@dataclass(frozen=True, slots=True)
class Job:
    """One launch of a run. id: unique for ever. log: file that the command's output is added to, in the run's folder,
    which the command also works in. env: variables that it gets, none of them secret."""

    id: str
    command: tuple[str, ...]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def entrypoint(self) -> str:
        """The command as one line for a shell; `exec` leaves no shell between the job and the trainer."""
        # In the run's folder no relative name of a config meets a file of somebody else's.
        folder, log = shlex.quote(str(self.log.parent)), shlex.quote(str(self.log))
        return f"cd {folder} && exec {shlex.join(self.command)} >> {log} 2>&1"


@dataclass(frozen=True, slots=True)
class JobStatus:
    """How a job is. unknown: the launcher has never heard of it, or has forgotten it."""

    state: JobState
    message: str = ""

    @property
    def is_alive(self) -> bool:
        return self.state in ("pending", "running")

    @property
    def out_of_memory(self) -> bool:
        return self.state == "failed" and _OUT_OF_MEMORY.search(self.message) is not None


class Launcher(Protocol):
    """Runs jobs. Every verb may be repeated. Raises LauncherUnavailable when nothing can be said, JobRefused."""

    def submit(self, job: Job) -> None:
        """Start a job; one whose id is known already is left as it is."""

    def status(self, job_id: str) -> JobStatus: ...

    def stop(self, job_id: str) -> None:
        """Ask a job to end, then make it; returns at once. A job that has ended or is unknown is left alone."""

    def resources(self) -> tuple[float, float]:
        """Logical CPUs and GPUs of the whole cluster, free or not."""


def trainer_command(folder: Path) -> tuple[str, ...]:
    """What a job executes; it starts a run or goes on with it, whichever its folder says."""
    files = str(folder / "config.toml"), "--out", str(folder), "--continue", "--service", str(folder / "service.json")
    return (sys.executable, "-m", "gxpo_trainer.cli", "train", *files)


class RayLauncher:
    """Ray's job server over its documented REST interface.

    Not through the client of the ray package: that one waits for ever for a head that hangs, while leases run out,
    and lets RAY_ADDRESS replace the address that it is given.

    address: of the jobs endpoint. The token is RAY_AUTH_TOKEN, or the content of the file RAY_AUTH_TOKEN_PATH, as
    for all of Ray; ConfigError when that cannot be read. Jobs take no logical CPU of their own: those of a run are
    its actors'. No secret is in what is submitted, as whoever reaches the job server can read it.
    """

    def __init__(self, address: str, *, transport: httpx.BaseTransport | None = None) -> None:
        self._address = address.rstrip("/")
        self._client = httpx.Client(
            base_url=self._address,
            headers=_authorization(os.environ),
            timeout=_ANSWER_S,
            transport=transport,
            trust_env=not is_loopback(self._address),
        )

    def submit(self, job: Job) -> None:
        # Ray answers 500 to an id that it knows.
        if self.status(job.id).state != "unknown":
            return
        body = {
            "entrypoint": job.entrypoint,
            "submission_id": job.id,
            "entrypoint_num_cpus": 0,
            "runtime_env": {"env_vars": {"PYTHONUNBUFFERED": "1", **job.env}},
        }
        answer = self._ask("POST", "/api/jobs/", json=body)
        if answer.status_code != 200 and self.status(job.id).state == "unknown":
            raise JobRefused(f"Ray at {self._address} did not take job {job.id}: {_reason(answer)}")

    def status(self, job_id: str) -> JobStatus:
        answer = self._ask("GET", f"/api/jobs/{quote(job_id, safe='')}")
        if answer.status_code == 404:
            return JobStatus("unknown")
        found = self._object(answer)
        states: dict[str, JobState] = {
            "PENDING": "pending",
            "RUNNING": "running",
            "SUCCEEDED": "succeeded",
            "FAILED": "failed",
            "STOPPED": "stopped",
        }
        state = states.get(str(found.get("status")))
        if state is None:
            raise JobRefused(f"Ray at {self._address} says that job {job_id} is {found.get('status')!r}")
        return JobStatus(state, str(found.get("message") or "").replace("\0", ""))

    def stop(self, job_id: str) -> None:
        answer = self._ask("POST", f"/api/jobs/{quote(job_id, safe='')}/stop")
        # A job that ended meanwhile makes Ray answer with an error; its state says whether that matters.
        if answer.status_code not in (200, 404) and self.status(job_id).is_alive:
            raise JobRefused(f"Ray at {self._address} did not stop job {job_id}: {_reason(answer)}")

    def resources(self) -> tuple[float, float]:
        answer = self._ask("GET", "/api/v0/nodes", params={"detail": "true", "limit": 10000})
        try:
            nodes = self._object(answer)["data"]["result"]["result"]
            totals: list[Mapping[str, float]] = [node["resources_total"] for node in nodes if node["state"] == "ALIVE"]
            cpus, gpus = (sum(float(total.get(name, 0)) for total in totals) for name in ("CPU", "GPU"))
        except (KeyError, TypeError, ValueError) as error:
            raise LauncherUnavailable(f"Ray at {self._address} gave its nodes in an unknown form: {error!r}") from error
        return cpus, gpus

    def close(self) -> None:
        self._client.close()

    def _ask(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        try:
            answer = self._client.request(method, path, **arguments)
        except httpx.HTTPError as error:
            raise LauncherUnavailable(f"Ray at {self._address} does not answer: {error!r}") from error
        if answer.status_code in (401, 403):
            raise LauncherUnavailable(
                f"Ray at {self._address} refuses our token ({answer.status_code}); RAY_AUTH_TOKEN must be the cluster's"
            )
        return answer

    def _object(self, answer: httpx.Response) -> dict[str, Any]:
        try:
            found = answer.json() if answer.status_code == 200 else None
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise LauncherUnavailable(f"Ray at {self._address} cannot say: {_reason(answer)}")
        return found


def _authorization(environment: Mapping[str, str]) -> dict[str, str]:
    token = environment.get("RAY_AUTH_TOKEN", "")
    file = environment.get("RAY_AUTH_TOKEN_PATH", "")
    if not token and file:
        try:
            token = Path(file).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigError(f"RAY_AUTH_TOKEN_PATH = {file} cannot be read: {error.strerror}") from None
    return {"Authorization": f"Bearer {token}"} if token else {}


def _reason(answer: httpx.Response) -> str:
    """The last line of what is often a traceback."""
    lines = answer.text.strip().splitlines()
    return f"{answer.status_code} {lines[-1][:300] if lines else ''}".strip()
