"""A real service with recorded runs and live ones, the real dashboard, and Chromium.

All of it is started once, and ended with the last test of this folder: it would take a tenth of two cores from those of
other folders. Three recorded trainings are replayed through the ingest call; live runs come from stand-in trainers that
the real scheduler starts. Everything listens on loopback.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from selenium import webdriver
from support.browsing import Page, find_programs, open_browser, set_mode
from support.dashboard_process import DashboardProcess
from support.replay import ReplayedService
from support.service_processes import QUICK, SCHEDULER, ServiceProcesses, kill_trainer, trainers
from support.site import FORMULA, RECORDINGS, Site

from gxpo_services.auth.tokens import prepare_local
from gxpo_services.settings import ServiceSettings

MACHINE = (
    "system/gpu0/utilization_percent", "system/gpu0/memory_bytes", "system/network_sent_bytes_per_s",
    "system/disk_written_bytes_per_s", "system/disk_free_bytes",
)  # fmt: skip
"""Metrics of a machine with a GPU, which the recordings were not made on."""
ENVIRONMENT = {**QUICK, "GXPO_MAX_CONCURRENT_RUNS": "3", "GXPO_CANCEL_GRACE_S": "10", "GXPO_PAUSE_GRACE_S": "20"}


@pytest.fixture(scope="package")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    if find_programs() is None:
        pytest.skip("chromium and chromedriver are not installed (packages chromium and chromium-driver)")
    home = tmp_path_factory.mktemp("browser") / "home"
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


@pytest.fixture(scope="module")
def live_run(site: Site) -> Iterator[str]:
    """A run that lasts as long as the tests of a file: a page takes longer with each hundred steps."""
    yield (run := site.submit_live("live run"))
    site.http.post(f"/runs/{run}/cancel").raise_for_status()


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


@pytest.fixture(scope="package")
def browser(site: Site) -> Iterator[webdriver.Chrome]:
    with open_browser() as driver:
        yield driver


@pytest.fixture
def page(site: Site, browser: webdriver.Chrome) -> Iterator[Page]:
    """The dashboard, signed in with this machine's token; each load is a session of its own."""
    yield Page(browser, site.dashboard.url, site.dashboard.cookie)
    set_mode(browser, "light")
    browser.get("about:blank")  # a live page would go on refreshing
