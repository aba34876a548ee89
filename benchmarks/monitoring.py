"""A real Prometheus with the shipped config that watches a service, and the panels of the Grafana dashboard, drawn from
its answers: Grafana itself is not needed to see what they show."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.dates import AutoDateLocator, DateFormatter
from matplotlib.figure import Figure

from gxpo_client.client import Client
from gxpo_services.local.ray_head import free_port

FILES = Path(__file__).resolve().parents[1] / "deploy" / "monitoring"
SCRAPE_S = 5
POINTS = 300
_COLUMNS, _ROW_HEIGHT = 24, 8
"""Of Grafana's grid."""
_OF_THE_SCRAPE = ("__name__", "instance", "job")
_LEFT, _RIGHT, _ABOVE, _BELOW = 1.0, 0.3, 0.9, 0.8
"""Room around a panel's axes for its title and the labels of the ticks, in cells of that grid."""


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

    def series(self, expression: str) -> list[dict[str, Any]]:
        """Each series of an expression since the start: labels, and (seconds since 1970, value) pairs."""
        now = time.time()
        step = max(SCRAPE_S, (now - self._begun) / POINTS)
        query: dict[str, str | float] = {"query": expression, "start": self._begun, "end": now, "step": step}
        answer = self._http.get("/query_range", params=query).raise_for_status().json()
        return list(answer["data"]["result"])

    def fired(self) -> set[str]:
        """Names of the alerts that have fired since the start."""
        alerts = self.series('ALERTS{alertstate="firing"}')
        return {series["metric"]["alertname"] for series in alerts}

    def draw(self, file: Path) -> None:
        """The panels of the dashboard at their places."""
        panels = json.loads((FILES / "grafana-dashboard.json").read_text(encoding="utf-8"))["panels"]
        rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
        figure = Figure(figsize=(13, 3.4 * rows / _ROW_HEIGHT))
        for panel in panels:
            x, y, width, height = (panel["gridPos"][side] for side in "xywh")
            left, bottom = (x + _LEFT) / _COLUMNS, 1 - (y + height - _BELOW) / rows
            size = (width - _LEFT - _RIGHT) / _COLUMNS, (height - _BELOW - _ABOVE) / rows
            self._panel(figure.add_axes((left, bottom, *size)), panel)
        file.parent.mkdir(parents=True, exist_ok=True)
        FigureCanvasAgg(figure).print_figure(file, dpi=160)

    def _panel(self, axes: Axes, panel: dict[str, Any]) -> None:
        drawn = 0
        for target in panel["targets"]:
            all_series = self.series(target["expr"])
            for series in all_series:
                times: Any = [datetime.fromtimestamp(at, tz=UTC) for at, _ in series["values"]]
                values = [float(value) for _, value in series["values"]]
                if len(all_series) == 1 or any(value > 0 for value in values):
                    label = ", ".join(value for name, value in series["metric"].items() if name not in _OF_THE_SCRAPE)
                    axes.plot(times, values, linewidth=1.3, label=label or target["legendFormat"])
                    drawn += 1
        unit = panel["fieldConfig"]["defaults"].get("unit", "")
        axes.set_title(panel["title"] + (" (s)" if unit == "s" else ""), fontsize=10, loc="left")
        axes.tick_params(labelsize=7)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(AutoDateLocator(maxticks=6))  # type: ignore[no-untyped-call]
        axes.xaxis.set_major_formatter(DateFormatter("%H:%M"))  # type: ignore[no-untyped-call]
        if 1 < drawn <= 12:
            axes.legend(fontsize=6, loc="upper left")

    def close(self) -> None:
        self._http.close()
        self._process.terminate()
        self._process.wait(timeout=60)
