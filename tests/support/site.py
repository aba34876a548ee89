"""The service, the dashboard and the runs that a browser visits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from gxpo_services.auth.tokens import prepare_local
from gxpo_services.settings import ServiceSettings
from support.dashboard_process import DashboardProcess
from support.replay import ReplayedService
from support.service_processes import QUICK, SCHEDULER, ServiceProcesses, kill_trainer, trainers, until

RECORDINGS = Path(__file__).resolve().parents[1] / "browser" / "recordings"
"""Two trainings of `gxpo demo`: run folders, their samples cut down to those of three steps; and the first steps of
`tools-demo`, with two groups of samples and an odd one that was added by hand."""
NOT_LOOPBACK = "gxpo.test"
"""A name of this machine other than those of loopback: its clients may be on other machines."""
FORMULA = r"Half of it: \( \frac{1}{2} \) <img src=x onerror=alert(1)>"
"""A response of the run `fired`."""
LONG = 100_000
"""Steps that no test waits for."""
MACHINE = (
    "system/gpu0/utilization_percent", "system/gpu0/memory_bytes", "system/network_sent_bytes_per_s",
    "system/disk_written_bytes_per_s", "system/disk_free_bytes",
)  # fmt: skip
"""Metrics of a machine with a GPU, which the recordings were not made on."""
ENVIRONMENT = {**QUICK, "GXPO_MAX_CONCURRENT_RUNS": "3", "GXPO_CANCEL_GRACE_S": "10", "GXPO_PAUSE_GRACE_S": "20"}


@dataclass(frozen=True)
class Site:
    """home: of the service. recorded: name of a recorded demo → its run. groups: the same → the run's group. tools: the
    recorded run of `tools-demo`. fired: the recorded `demo` as if its gate had fired, with a budget of passes. http:
    signed in as an admin."""

    home: Path
    service: ServiceProcesses
    dashboard: DashboardProcess
    http: httpx.Client
    recorded: dict[str, str]
    groups: dict[str, str]
    tools: str
    fired: str
    viewer_token: str

    def submit_live(self, name: str) -> str:
        """A run that a stand-in trains for as long as it is let; its id, once it reports."""
        body = {"preset": "demo", "name": name, "overrides": [f"budget.steps={LONG}"]}
        run = str(self.http.post("/runs", json=body).raise_for_status().json()["id"])
        until(lambda: self.step(run) > 5, f"the first steps of {name}")
        return run

    def submit_short(self, name: str) -> str:
        """A run of three steps, once it has ended."""
        body = {"preset": "demo", "name": name, "overrides": ["budget.steps=3"]}
        run = str(self.http.post("/runs", json=body).raise_for_status().json()["id"])
        until(lambda: self.state(run) == "succeeded", f"the end of {name}")
        return run

    def step(self, run: str) -> int:
        return int(self.http.get(f"/runs/{run}").raise_for_status().json()["progress"]["steps"] or 0)

    def state(self, run: str) -> str:
        return str(self.http.get(f"/runs/{run}").raise_for_status().json()["state"])


@contextmanager
def serving(home: Path) -> Iterator[Site]:
    """A real service with recorded runs and live ones, and the real dashboard. Three recorded trainings are replayed
    through the ingest call; live runs come from stand-in trainers that the real scheduler starts. Everything listens on
    loopback."""
    settings = ServiceSettings(home=home)
    prepare_local(settings)
    recorded, groups, tools, fired, viewer_token = _record(home)
    (home / "logs").mkdir()
    service = ServiceProcesses({**ENVIRONMENT, "GXPO_HOME": str(home)}, SCHEDULER, home / "logs")
    token_file = settings.local_token_file
    environment = {"GXPO_URL": service.url, "GXPO_TOKEN_FILE": str(token_file)}
    headers = {"Authorization": f"Bearer {token_file.read_text(encoding='utf-8').strip()}"}
    try:
        with (
            service.running(),
            DashboardProcess(home / "logs" / "dashboard.log", environment).running() as dashboard,
            httpx.Client(base_url=f"{service.url}/api/v1", headers=headers, timeout=60, trust_env=False) as http,
        ):
            yield Site(home, service, dashboard, http, recorded, groups, tools, fired, viewer_token)
    finally:
        for pid in trainers(settings.artifacts):
            kill_trainer(pid)


def _record(home: Path) -> tuple[dict[str, str], dict[str, str], str, str, str]:
    """Replay the recordings, those of the demo each into a group of its own, before any scheduler looks at them."""
    with closing(ReplayedService(home)) as replayed:
        recorded, groups = {}, {}
        for name in ("demo-grpo", "demo"):
            made = replayed.http.post("/groups", json={"name": f"recorded {name}"}).raise_for_status()
            groups[name] = str(made.json()["id"])
            recorded[name] = replayed.replay(RECORDINGS / name, name=name, group=groups[name])
        tools = replayed.replay(RECORDINGS / "tools", name="tools")
        fired = replayed.replay(_fired(home.parent / "fired"), name="fired")
        return recorded, groups, tools, fired, replayed.token("viewer")


def _fired(folder: Path) -> Path:
    """The recorded `demo`, changed: its gate fires at step 20, it has a budget of passes and a GPU, and a response a
    formula."""
    shutil.copytree(RECORDINGS / "demo", folder)
    identity = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    identity["config"]["budget"]["backward_passes"] = 90
    (folder / "run.json").write_text(json.dumps(identity), encoding="utf-8")
    with changed(folder / "metrics.jsonl") as rows:
        for row in rows:
            row["metrics"] |= dict.fromkeys(MACHINE, 50.0)
            if row["step"] >= 20:
                row["metrics"] |= {"gate/active": 0.0, "gate/shutoff_step": 20.0}
    with changed(folder / "samples.jsonl") as rows:
        next(row for row in rows if row["step"] == 30)["response"] = FORMULA
    return folder


@contextmanager
def changed(file: Path) -> Iterator[list[dict[str, Any]]]:
    """The rows of a file, which is written again at the end."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    yield rows
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
