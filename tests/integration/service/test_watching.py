"""What those who run the service see of it: Prometheus series, and log lines that belong together."""

from __future__ import annotations

import io
import json
import logging

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from gxpo_services import logging as logs

API = "/api/v1"


def series(client: TestClient) -> dict[tuple[str, tuple[str, ...]], float]:
    """(name, values of its labels in the order of their names) → value, of all that Prometheus would read."""
    text = client.get("/metrics").text
    return {
        (sample.name, tuple(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_prometheus_counts_requests_by_route_and_runs_by_state(client: TestClient) -> None:
    ids = [client.post(f"{API}/runs", json={"preset": "demo"}).json()["id"] for _ in range(3)]
    client.post(f"{API}/runs/{ids[0]}/cancel")
    for run_id in ids[:2]:
        assert client.get(f"{API}/runs/{run_id}").status_code == 200
    assert client.get(f"{API}/runs/no-such-run").status_code in (404, 422)
    values = series(client)
    assert values["gxpo_runs", ("queued",)] == 2
    assert values["gxpo_runs", ("cancelled",)] == 1
    assert values["gxpo_runs", ("running",)] == 0
    # By the route and not by the address: a series a run would never end.
    assert values["gxpo_http_requests_total", ("GET", f"{API}/runs/{{run_id}}", "200")] == 2
    assert values["gxpo_http_requests_total", ("POST", f"{API}/runs", "201")] == 3
    assert values["gxpo_http_request_seconds_count", ("POST", f"{API}/runs")] == 3


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
