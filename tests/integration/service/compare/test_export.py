"""`/export`: reported data round-trips in every format, including values that JSON and CSV cannot represent."""

from __future__ import annotations

import csv
import io
import json
import math
import zipfile
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from support import queued_runs, reporting
from support.reported_runs import add_run, config, report

from gxpo_services.compare.export import export as export_parts
from gxpo_services.compare.loading import select_runs
from gxpo_services.db.database import Database
from gxpo_trainer.jsonl import decode_number

NAME = 'π, "quoted"\nline; =1+1 \'\\ 🦆'
METRIC = 'eval/ä, "b"/pass@1'
VALUES = {1: 0.1, 2: math.nan, 3: math.inf, 4: -math.inf, 5: 1e-300, 6: 0.1 + 0.2, 200: -0.0}
FORMATS = ("csv", "jsonl")


@pytest.fixture
def run(database: Database) -> str:
    """Two attempts: the second continues after step 4, and replaces step 9 of the first."""
    run_id = add_run(database, config({"name": "grpo"}, seed=2**40, name=NAME))
    rows = [reporting.metric_row(step, **{METRIC: v, "loss": step / 3}) for step, v in VALUES.items() if step < 5]
    rows += [reporting.metric_row(9, **{METRIC: 9.0, "loss": 9.0, "gone": 1.0})]
    rows += [reporting.metric_row(step, 2, **{METRIC: value}) for step, value in VALUES.items() if step >= 5]
    evaluations = [
        reporting.evaluation_row(0, scores={"pass@1": 0.5, "maj@4": math.nan}, num_problems=2, note="n"),
        reporting.evaluation_row(9, scores={"pass@1": 0.9}),
        reporting.evaluation_row(6, 2, scores={"pass@1": math.inf}, num_problems="two"),
    ]
    report(database, run_id, metrics=rows, evaluations=evaluations)
    return run_id


def export(client: TestClient, run: str, form: str, *parts: str) -> httpx.Response:
    return client.get("/api/v1/export", params={"runs": run, "format": form, "parts": parts}).raise_for_status()


def read(form: str, data: bytes) -> list[dict[str, Any]]:
    """Rows of a file, by a reader that is not ours."""
    if form == "jsonl":
        return [json.loads(line) for line in data.decode().removesuffix("\n").split("\n") if line]
    return list(csv.DictReader(io.StringIO(data.decode(), newline="")))


def number(value: Any) -> float:
    """Of a cell of any format."""
    return decode_number(value) if value in ("NaN", "Infinity", "-Infinity") else float(value)


@pytest.mark.parametrize("form", FORMATS)
def test_metrics_round_trip(client: TestClient, run: str, form: str) -> None:
    answer = export(client, run, form, "metrics")
    assert answer.headers["content-disposition"] == f'attachment; filename="gxpo-metrics.{form}"'
    rows = read(form, answer.content)
    assert list(rows[0]) == ["run", "name", "attempt", "step", "metric", "value"]
    assert {(row["run"], row["name"]) for row in rows} == {(run, NAME)}
    cells = {int(row["step"]): row for row in rows if row["metric"] == METRIC}
    assert list(cells) == list(VALUES)
    assert [number(cells[step]["value"]).hex() for step in VALUES] == [value.hex() for value in VALUES.values()]
    assert [int(row["attempt"]) for row in cells.values()] == [1, 1, 1, 1, 2, 2, 2]
    assert {(r["metric"], int(r["step"])) for r in rows if r["metric"] != METRIC} == {("loss", s) for s in (1, 2, 3, 4)}


def test_evaluations_have_a_row_a_score_and_are_the_trainers_records_as_jsonl(client: TestClient, run: str) -> None:
    rows = read("csv", export(client, run, "csv", "evaluations").content)
    cells = {(int(row["step"]), row["metric"]): row for row in rows}
    assert set(cells) == {(0, "pass@1"), (0, "maj@4"), (6, "pass@1")}
    assert number(cells[0, "pass@1"]["value"]) == 0.5
    assert math.isnan(number(cells[0, "maj@4"]["value"]))
    assert number(cells[6, "pass@1"]["value"]) == math.inf
    assert cells[0, "pass@1"]["num_problems"] == "2"
    assert cells[6, "pass@1"]["training_s"] == ""
    rows = read("jsonl", export(client, run, "jsonl", "evaluations").content)
    assert [row["step"] for row in rows] == [0, 6]
    assert rows[0]["scores"] == {"pass@1": 0.5, "maj@4": "NaN"}
    assert (rows[0]["per_problem"], rows[0]["note"], rows[0]["run"]) == ([0.0, 1.0], "n", run)


def test_runs_come_with_their_config(client: TestClient, run: str) -> None:
    for form in FORMATS:
        (row,) = read(form, export(client, run, form, "runs").content)
        assert (row["run"], row["name"], int(row["seed"]), row["state"]) == (run, NAME, 2**40, "running")
        stored = row["config"] if form == "jsonl" else json.loads(row["config"])
        assert stored["learner"]["rule"] == {"name": "grpo"}
        assert row["ended_at"] in ("", None)


def test_samples_come_with_their_turns_when_asked_for(client: TestClient, database: Database, run: str) -> None:
    rows = [
        reporting.sample_row(1, response=NAME, **reporting.EPISODE),
        reporting.sample_row(2, sample=1, reward=math.inf),
        reporting.sample_row(2, 2, sample=2, extracted=None, reward=None, truncated=True),
    ]
    run_id = add_run(database, config({"name": "grpo"}))
    metrics = [reporting.metric_row(1), reporting.metric_row(2), reporting.metric_row(2, 2)]
    report(database, run_id, metrics=metrics, samples=rows)
    for form in FORMATS:
        first, second = read(form, export(client, run_id, form, "samples").content)
        assert (first["run"], int(first["step"]), first["response"]) == (run_id, 1, NAME)
        assert (first["end"], int(first["sampled_length"]), number(first["reward"])) == ("done", 11, 1.0)
        # The second attempt repeated step 2.
        assert (int(second["attempt"]), int(second["sample"])) == (2, 2)
        empty = "" if form == "csv" else None
        assert [second[name] for name in ("extracted", "reward", "turns", "end", "sampled_length")] == [empty] * 5
        nested = (lambda value: value) if form == "jsonl" else json.loads
        assert nested(first["turns"]) == reporting.EPISODE["turns"]
        assert (nested(first["truncated"]), nested(second["truncated"])) == (False, True)
        assert read(form, export(client, run, form, "samples").content) == []


def test_no_connection_is_held_while_the_client_reads(database: Database, run: str) -> None:
    launched = reporting.launch(database, run, 2)
    offsets = queued_runs.get(database, run).offsets
    more_than_a_page = [reporting.sample_row(9, 2, sample=sample) for sample in range(501)]
    reporting.send(database, launched, reporting.body(1, 2, offsets=offsets, samples=more_than_a_page))
    with database.reading() as session:
        runs = select_runs(session, [run], [])
    for part in ("metrics", "evaluations", "runs", "samples"):
        _name, _media_type, pieces = export_parts(database, runs, "jsonl", [part])
        assert next(pieces, None), part
        assert database._reading_engine.pool.checkedout() == 0, part  # type: ignore[attr-defined]


def test_several_tables_are_a_whole_zip(client: TestClient, run: str) -> None:
    for form in FORMATS:
        answer = client.get("/api/v1/export", params={"runs": run, "format": form})
        assert answer.headers["content-type"] == "application/zip"
        assert answer.headers["content-disposition"] == 'attachment; filename="gxpo-export.zip"'
        with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
            assert archive.testzip() is None
            assert archive.namelist() == [f"metrics.{form}", f"evaluations.{form}", f"runs.{form}"]
            for name in archive.namelist():
                alone = read(form, export(client, run, form, name.partition(".")[0]).content)
                assert str(read(form, archive.read(name))) == str(alone)


def test_what_cannot_be_exported_is_refused(client: TestClient) -> None:
    for query in ("", "runs=r404", "runs=a%20b", "runs=r1&format=xlsx", "runs=r1&parts=logs"):
        answer = client.get(f"/api/v1/export?{query}")
        status = 404 if query == "runs=r404" else 422
        assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json"), query
