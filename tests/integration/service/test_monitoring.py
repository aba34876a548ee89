"""What those who run the service see of it: log lines that belong together, and Prometheus series.

deploy/monitoring is under Prometheus' own checker and under a real Prometheus that scrapes the API.
"""

from __future__ import annotations

import io
import json
import logging
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import select
from sqlalchemy.exc import OperationalError
from support import queued_runs as runs
from support.http_server import HttpServer
from support.scheduling import Cluster
from support.service_processes import until

from gxpo_services import logging as logs
from gxpo_services.db.database import Database
from gxpo_services.db.tables import SchedulerRow
from gxpo_services.local.ray_head import free_port
from gxpo_services.run_states import RunState
from gxpo_services.scheduling.scheduler import KEPT_S

API = "/api/v1"
FILES = Path(__file__).parents[3] / "deploy" / "monitoring"
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (package prometheus) is missing")
needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")


@pytest.fixture
def database_url(tmp_path: Path, sqlite_template: Path) -> str:
    file = tmp_path / "gxpo.sqlite"
    file.write_bytes(sqlite_template.read_bytes())
    return f"sqlite:///{file}"


def rules() -> dict[str, str]:
    """Expression by alert."""
    (group,) = yaml.safe_load((FILES / "alerts.yml").read_text())["groups"]
    return {rule["alert"]: rule["expr"] for rule in group["rules"]}


def expressions() -> list[str]:
    panels = json.loads((FILES / "grafana-dashboard.json").read_text())["panels"]
    return [*rules().values()] + [target["expr"] for panel in panels for target in panel["targets"]]


def series(client: TestClient) -> dict[tuple[str, ...], float]:
    """(name, values of its labels in the order of their names) → value, of all that Prometheus would read."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(client.get("/metrics").text)
        for sample in family.samples
    }


def test_requests_are_counted_by_route_and_runs_by_state(client: TestClient) -> None:
    ids = [client.post(f"{API}/runs", json={"preset": "demo"}).json()["id"] for _ in range(3)]
    client.post(f"{API}/runs/{ids[0]}/cancel")
    for run_id in ids[:2]:
        assert client.get(f"{API}/runs/{run_id}").status_code == 200
    assert client.get(f"{API}/runs/no-such-run").status_code in (404, 422)
    values = series(client)
    assert [values["gxpo_runs", state] for state in ("queued", "cancelled", "running")] == [2, 1, 0]
    # By the route and not by the address: a series a run would never end.
    assert values["gxpo_http_requests_total", "GET", f"{API}/runs/{{run_id}}", "200"] == 2
    assert values["gxpo_http_requests_total", "POST", f"{API}/runs", "201"] == 3
    assert values["gxpo_http_request_seconds_count", "POST", f"{API}/runs"] == 3


def test_a_log_line_is_json_with_the_id_of_the_answer(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    logs.configure(as_json=True)
    written = io.StringIO()
    monkeypatch.setattr(logging.getLogger("gxpo_services").handlers[0], "stream", written)
    run_id = client.post(f"{API}/runs", json={"preset": "demo"}).json()["id"]
    mine = client.get(f"{API}/runs/{run_id}", headers={"X-Request-ID": "my-request.1"})
    odd = client.get(f"{API}/runs/{run_id}", headers={"X-Request-ID": "two words"})
    assert mine.headers["X-Request-ID"] == "my-request.1"
    assert odd.headers["X-Request-ID"] not in ("", "two words", "my-request.1")
    lines = [json.loads(line) for line in written.getvalue().splitlines()]
    requests = {line["request_id"]: line for line in lines if line["event"] == "request"}
    for answer in (mine, odd):
        line = requests[answer.headers["X-Request-ID"]]
        assert (line["method"], line["path"], line["status"]) == ("GET", f"{API}/runs/{run_id}", 200)
        assert (line["run"], line["level"]) == (run_id, "info")
    assert len(requests) == 3


def test_every_metric_of_alerts_and_dashboard_is_exported(client: TestClient, database: Database) -> None:
    with database.writing() as session:
        counters = {"launches": 0, "recoveries": 0, "lost_leases": 0, "claims": 0, "queue_wait_s": 0.0}
        session.add(SchedulerRow(owner="a", ticked_at=4e9, **counters))
    runs.add_run(database, queued_at=1000.0)
    held = {"state": RunState.RUNNING, "lease_owner": "a", "lease_expires_at": 4e9, "recoveries": 2}
    runs.add_run(database, **held)
    runs.add_run(database, **held | {"lease_expires_at": 1000.0, "recoveries": 1})
    runs.add_run(database, **held | {"lease_owner": None, "recoveries": 0})
    client.get("/health/live")
    values = series(client)
    used = {name for text in expressions() for name in re.findall(r"gxpo_[a-z_]+", text)}
    assert len(used) >= 5
    assert used <= {name for name, *_ in values}
    assert values["gxpo_runs_without_scheduler",] == 2
    assert values["gxpo_run_recoveries",] == 3
    assert values["gxpo_queue_wait_seconds",] > 1e9


def test_launches_recoveries_waits_and_lost_leases_are_counted(cluster: Cluster, client: TestClient) -> None:
    def schedulers(metrics: dict[tuple[str, ...], float]) -> set[str]:
        return {owner for name, *owners in metrics for owner in owners if name.startswith("gxpo_scheduler_")}

    first = cluster.scheduler("first")
    run_ids = [cluster.add_run(queued_at=cluster.clock.now - wait) for wait in (10.0, 30.0)]
    first.tick()
    cluster.launcher.ends(f"{run_ids[0]}-1", "failed")
    first.tick()
    first.tick()
    cluster.clock.passes(5)
    first.tick()
    metrics = series(client)
    expected = {"claims": 2, "queue_wait_seconds": 40, "launches": 3, "recoveries": 1, "lost_leases": 0}
    assert {name: metrics[f"gxpo_scheduler_{name}_total", "first"] for name in expected} == expected

    cluster.clock.passes(60)  # the leases have run out
    cluster.scheduler("second").tick()
    first.tick()
    metrics = series(client)
    assert metrics["gxpo_scheduler_lost_leases_total", "first"] == 2
    assert schedulers(metrics) == {"first", "second"}
    cluster.clock.passes(KEPT_S + 1)
    first.tick()
    assert schedulers(series(client)) == {"first"}
    ended_at = cluster.clock.now

    def gone(verb: str, job_id: str) -> None:
        raise OperationalError("", {}, Exception("the database is gone"))

    cluster.launcher.before = gone
    cluster.clock.passes(60)
    with pytest.raises(OperationalError):
        first.tick()
    with cluster.database.reading() as session:
        assert session.scalars(select(SchedulerRow.ticked_at)).one() == ended_at, "that round did not end"


def test_every_rule_has_a_case_in_which_it_fires() -> None:
    groups = yaml.safe_load((FILES / "alerts_test.yml").read_text())["tests"]
    fires = {case["alertname"] for group in groups for case in group["alert_rule_test"] if case.get("exp_alerts")}
    assert fires == {*rules()}


@needs_promtool
def test_the_rules_pass_prometheus_own_checker_and_fire_when_they_should() -> None:
    for words in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]):
        ended = subprocess.run(["promtool", *words], cwd=FILES, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.fixture
def prometheus(app: FastAPI, token_for: Callable[[str], str], tmp_path: Path) -> Iterator[str]:
    """A Prometheus with the shipped config that scrapes this test's API every second."""
    folder = tmp_path / "prometheus"
    shutil.copytree(FILES, folder)
    (folder / "gxpo-token").write_text(token_for("metrics"))
    address = f"127.0.0.1:{free_port()}"
    with HttpServer(app) as url:
        config = (folder / "prometheus.yml").read_text().replace("15s", "1s")
        (folder / "prometheus.yml").write_text(config.replace("127.0.0.1:8000", url.removeprefix("http://")))
        words = ["--config.file=prometheus.yml", "--storage.tsdb.path=data", f"--web.listen-address={address}"]
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(["prometheus", *words], cwd=folder, stdout=log, stderr=log)
        try:
            yield f"http://{address}"
        finally:
            process.terminate()
            process.wait(30)


@needs_prometheus
def test_a_real_prometheus_scrapes_the_api_and_evaluates_every_expression(prometheus: str) -> None:
    def answer(path: str, **query: str) -> Any:
        return httpx.get(f"{prometheus}/api/v1/{path}", params=query, trust_env=False, timeout=30).json()

    def scraped() -> bool:
        try:
            return answer("query", query='up{job="gxpo"}')["data"]["result"][0]["value"][1] == "1"
        except (httpx.HTTPError, LookupError, ValueError):
            return False

    until(scraped, "the first scrape")
    assert len(answer("query", query="gxpo_runs")["data"]["result"]) == len(RunState)
    for expression in expressions():
        assert answer("query", query=expression)["status"] == "success", expression
    (group,) = answer("rules")["data"]["groups"]
    assert {rule["health"] for rule in group["rules"]} <= {"ok", "unknown"}
    assert [rule["name"] for rule in group["rules"]] == [*rules()]
