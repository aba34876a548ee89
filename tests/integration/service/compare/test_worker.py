"""The process that compares ends with the service, however that ends."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
import psutil
import pytest
from support.reported_runs import config, evaluated_run
from support.service_processes import ServiceProcesses, until

from gxpo_services.auth.tokens import prepare_local
from gxpo_services.db.database import Database
from gxpo_services.settings import ServiceSettings


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_the_service(tmp_path: Path, ending: signal.Signals) -> None:
    home = tmp_path / "home"
    settings = ServiceSettings(home=home)
    prepare_local(settings)
    database = Database(settings.url)
    run = evaluated_run(database, config({"name": "grpo"}), {0: [0.5], 1: [1.0]})
    database.close()
    service = ServiceProcesses({"GXPO_HOME": str(home)}, ["-c", "import time; time.sleep(600)"], tmp_path)
    try:
        service.check()
        until(service.is_ready, "the API to be ready")
        headers = {"Authorization": f"Bearer {(home / 'token').read_text().strip()}"}
        answer = httpx.get(f"{service.url}/api/v1/compare?runs={run}", headers=headers, timeout=60, trust_env=False)
        assert answer.status_code == 200
        (api,) = [one for one in psutil.Process().children() if "uvicorn" in one.cmdline()]
        (worker,) = api.children()
        assert "anyio.to_process" in worker.cmdline()
        api.send_signal(ending)
        api.wait(30)
        until(lambda: not worker.is_running(), "the process that compares to end")
    finally:
        service.close()
