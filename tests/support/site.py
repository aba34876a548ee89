"""The service, the dashboard and the runs that a browser visits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import httpx

from support.dashboard_process import DashboardProcess
from support.service_processes import ServiceProcesses, until

RECORDINGS = Path(__file__).resolve().parents[1] / "browser" / "recordings"
"""Two trainings of `gxpo demo`: run folders, their samples cut down to those of three steps; and the first steps of
`tools-demo`, with two groups of samples and an odd one that was added by hand."""
NOT_LOOPBACK = "gxpo.test"
"""A name of this machine other than those of loopback: its clients may be on other machines."""
FORMULA = r"Half of it: \( \frac{1}{2} \) <img src=x onerror=alert(1)>"
"""A response of the run `fired`."""
LONG = 100_000
"""Steps that no test waits for."""


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
