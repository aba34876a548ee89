"""A real Prometheus with the shipped config that watches a service."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import httpx

from gxpo_client.client import Client
from gxpo_services.local.ray_head import free_port

FILES = Path(__file__).resolve().parents[1] / "deploy" / "monitoring"
SCRAPE_S = 5


class Prometheus:
    """Scrapes the service of a client every SCRAPE_S seconds and evaluates the alert rules."""

    def __init__(self, folder: Path, client: Client) -> None:
        shutil.copytree(FILES, folder)
        token = client.post("/tokens", body={"name": "prometheus", "role": "metrics"})["token"]
        (folder / "gxpo-token").write_text(token, encoding="utf-8")
        config = (folder / "prometheus.yml").read_text(encoding="utf-8").replace("15s", f"{SCRAPE_S}s")
        target = client.url.removeprefix("http://")
        (folder / "prometheus.yml").write_text(config.replace("127.0.0.1:8000", target), encoding="utf-8")
        address = f"127.0.0.1:{free_port()}"
        words = ["--config.file=prometheus.yml", "--storage.tsdb.path=data", f"--web.listen-address={address}"]
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(["prometheus", *words], cwd=folder, stdout=log, stderr=log)
        self._http = httpx.Client(base_url=f"http://{address}/api/v1", trust_env=False, timeout=60)
        self._begun = time.time()

    def fired(self) -> set[str]:
        """Names of the alerts that have fired since the start."""
        query: dict[str, str | float] = {"query": 'ALERTS{alertstate="firing"}', "step": SCRAPE_S}
        query |= {"start": self._begun, "end": time.time()}
        answer = self._http.get("/query_range", params=query).raise_for_status().json()
        return {series["metric"]["alertname"] for series in answer["data"]["result"]}

    def close(self) -> None:
        self._http.close()
        self._process.terminate()
        self._process.wait(timeout=60)
