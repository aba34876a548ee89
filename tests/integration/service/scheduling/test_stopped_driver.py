"""SIGSTOP of the driver of a real run under the service: its heartbeats end, and the run goes on as another launch."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from support.ray_clusters import RayHead
from support.rollouts import trained_rows
from support.service_processes import ServiceProcesses, trainers, until

from gxpo_services.auth.tokens import prepare_local
from gxpo_services.settings import ServiceSettings

pytestmark = [pytest.mark.engine, pytest.mark.long("the scheduler's own tests prove each step of it")]

STEPS = 4


@pytest.fixture
def service(home: Path) -> Iterator[ServiceProcesses]:
    prepare_local(ServiceSettings(home=home))
    head = RayHead()
    limits = {"GXPO_HEARTBEAT_S": "15", "GXPO_STOP_WAIT_S": "2", "GXPO_TICK_S": "0.5", "GXPO_MAX_RECOVERIES": "1"}
    environment = {**head.environment, **limits, "GXPO_HOME": str(home), "GXPO_RAY_ADDRESS": head.address}
    processes = ServiceProcesses(environment, ["-m", "gxpo_trainer.cli", "scheduler"], home / "logs")
    with closing(head):
        head.start()
        with processes.running():
            yield processes


def test_a_stopped_driver_is_noticed_ended_and_its_run_recovered_once(
    service: ServiceProcesses, home: Path, small_run: Any
) -> None:
    grpo = {"rule": {"name": "grpo"}}
    made = small_run(checkpoint={"every_steps": 1}, learner=grpo, budget={"steps": STEPS})
    config = made.model_dump(mode="json", exclude_unset=True)
    token = (home / "token").read_text().strip()
    with httpx.Client(
        base_url=f"{service.url}/api/v1", headers={"Authorization": f"Bearer {token}"}, timeout=60, trust_env=False
    ) as http:
        run_id = http.post("/runs", json={"config": config, "name": "stopped"}).raise_for_status().json()["id"]

        def run() -> Any:
            return http.get(f"/runs/{run_id}").raise_for_status().json()

        until(lambda: (run()["progress"]["steps"] or 0) >= 1, "the first step")
        (driver,) = trainers(home / "artifacts")
        tree = [psutil.Process(driver), *psutil.Process(driver).children(recursive=True)]
        os.kill(driver, signal.SIGSTOP)
        phases: set[str | None] = set()

        def found_ended() -> bool:
            view = run()
            phases.add(view["phase"])
            return view["state"] in ("succeeded", "failed")

        until(found_ended, "the end of the run")
        view = run()
        assert (view["state"], view["recoveries"]) == ("succeeded", 1), view
        events = http.get(f"/runs/{run_id}/events", params={"limit": 200}).json()["items"]
    (stopped,) = [event["message"] for event in events if event["kind"] == "stop"]
    assert "its trainer sent no heartbeat for longer than heartbeat_s = 15 s" in stopped
    assert stopped.rpartition("its last phase was ")[2] in phases, (stopped, phases)
    rows = trained_rows(home / "artifacts" / run_id)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1)), "no hole, no double"
    assert not psutil.wait_procs(tree, timeout=60)[1], "processes of the stopped launch are left"
