"""The list of runs: filters, every order, pages that neither lose nor repeat a run, and positions in the queue."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import select
from sqlalchemy.orm import Session
from support import paging, queued_runs as runs

from gxpo_services.api.dependencies import find
from gxpo_services.api.principals import Principal, Role
from gxpo_services.db.database import Database
from gxpo_services.db.tables import MetricLast, MetricName, Run
from gxpo_services.run_states import RunState
from gxpo_services.runs import listing, service
from gxpo_services.runs.listing import list_rows
from gxpo_trainer.config.io import load_preset

pytestmark = pytest.mark.each_database

API = "/api/v1"
METRIC = "eval/average/pass@1"
PRINCIPAL = Principal("t0", "tester", Role.SUBMITTER)
NUM_RUNS = 300


def add_runs(database: Database, amount: int, change: Callable[[Run, int], None]) -> list[str]:
    """Runs made in one transaction, each changed by its index."""
    configs = [load_preset("demo"), load_preset("demo-grpo"), load_preset("demo-sfpo")]
    with database.writing() as session:
        runs = [service.new_run(configs[index % 3], PRINCIPAL) for index in range(amount)]
        for index, run in enumerate(runs):
            change(run, index)
        session.add_all(runs)
        session.flush()
        return [run.id for run in runs]


def varied(run: Run, index: int) -> None:
    """Few different values, so that most are ties, and many without one."""
    chance = random.Random(index)
    run.name = chance.choice(["alpha", "Beta", "beta", "über", "zz 100%", "a_b"])
    run.state = chance.choice(list(RunState))
    run.reason = chance.choice([None, "diverged", "steps_done"])
    run.priority = chance.choice([-1, 0, 0, 5])
    run.created_at = 1000.0 + chance.choice([0.0, 0.5, 1 / 3])
    run.started_at = chance.choice([None, 2000.25, 2001.0])
    run.ended_at = chance.choice([None, None, 3000.0])
    run.score = chance.choice([None, 0.1, 0.1 + 0.2, 0.3])
    run.score_best = None if run.score is None else run.score + 0.1
    run.score_step = chance.choice([None, 10, 20])
    run.step = chance.choice([0, 10, 40])
    run.seed = chance.choice([0, 1, 2**62])
    run.backward_passes = chance.choice([0.0, 120.0])
    run.model = chance.choice(["starter", "org/model"])
    run.archived = index % 10 == 0
    service.set_tags(run, chance.sample(["demo", "night", "x y"], chance.randrange(3)))


@pytest.fixture
def many(database: Database) -> list[str]:
    return add_runs(database, NUM_RUNS, varied)


def walk(client: TestClient, limit: int = 37, **query: Any) -> list[dict[str, Any]]:
    return paging.walk(client, "/runs", limit=limit, **query)


def reference(database: Database, column: str, descending: bool) -> list[str]:
    """Ids by a plain sort in memory: with a value first, ties by number."""
    sign = -1 if descending else 1

    def key(run: Run) -> tuple[Any, ...]:
        value = getattr(run, column)
        return value is None, sign * (value or 0), sign * run.number

    with database.reading() as session:
        return [run.id for run in sorted(session.scalars(select(Run)), key=key)]


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_numeric_columns_in_pages_sort(order: str, client: TestClient, database: Database, many: list[str]) -> None:
    for column in ("created_at", "started_at", "priority", "score", "seed"):
        listed = [run["id"] for run in walk(client, sort=column, order=order, archived="any", limit=90)]
        assert listed == reference(database, column, order == "desc"), column


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_text_columns_in_pages_sort(order: str, client: TestClient, database: Database, many: list[str]) -> None:
    """As the database sorts them in one query: by its collation."""
    for column in ("name", "model", "state", "reason"):
        value = getattr(Run, column)
        keys = [key.desc() if order == "desc" else key.asc() for key in (value, Run.number)]
        with database.reading() as session:
            expected = list(session.scalars(select(Run.id).order_by(value.is_(None), *keys)))
        listed = [run["id"] for run in walk(client, sort=column, order=order, archived="any")]
        assert listed == expected, column


def test_runs_that_are_made_meanwhile_move_nothing(client: TestClient, database: Database, many: list[str]) -> None:
    query = {"sort": "score", "order": "desc", "archived": "any", "limit": 100}
    before = [run["id"] for run in walk(client, **query)]
    pages = [client.get(f"{API}/runs", params=query).json()]
    add_runs(database, 50, varied)
    while cursor := pages[-1]["next_cursor"]:
        pages.append(client.get(f"{API}/runs", params={**query, "cursor": cursor}).json())
    seen = [run["id"] for page in pages for run in page["items"]]
    assert len(seen) == len(set(seen))
    assert [run_id for run_id in seen if run_id in set(before)] == before


def test_filters_alone_and_together(client: TestClient, database: Database, many: list[str]) -> None:
    with database.reading() as session:
        runs = list(session.scalars(select(Run)))
    tags = {run.id: {tag.tag for tag in run.tags} for run in runs}
    cases: list[tuple[dict[str, Any], Callable[[Run], bool]]] = [
        ({"archived": "false"}, lambda run: not run.archived),
        ({"archived": "true"}, lambda run: run.archived),
        ({"state": ["failed", "queued"]}, lambda run: run.state in ("failed", "queued")),
        ({"rule": "sfpo"}, lambda run: run.rule == "sfpo"),
        ({"model": "org/model"}, lambda run: run.model == "org/model"),
        ({"tag": ["demo", "night"]}, lambda run: {"demo", "night"} <= tags[run.id]),
        # An id is looked through too, and three letters of it can be those.
        ({"text": "ETA"}, lambda run: run.name in ("Beta", "beta") or "eta" in run.id),
        ({"created_after": 1000.0}, lambda run: run.created_at > 1000.0),
        ({"created_before": 1000.5}, lambda run: run.created_at < 1000.5),
        ({"owner": "nobody"}, lambda run: False),
        ({"text": "a_b", "rule": "gxpo"}, lambda run: (run.name, run.rule) == ("a_b", "gxpo")),
    ]
    for query, wanted in cases:
        query = {"archived": "any", **query}
        expected = {run.id for run in runs if wanted(run)}
        listed = walk(client, limit=200, **query)
        assert {run["id"] for run in listed} == expected, query
        first = client.get(f"{API}/runs", params={**query, "limit": 1}).json()
        assert first["total"] == len(expected), query
        among = [run for run in runs if run.id in expected]
        assert first["states"] == Counter(run.state for run in among), query
        scored = sorted((run.score, run.number, run.id) for run in among if run.score is not None)
        parts = {part["topic"]: part["runs"] for part in first["headline"]["parts"]}
        assert parts == ({"state": []} if among else {}) | ({"evaluation": [scored[-1][2]]} if scored else {}), query


def test_the_headline_names_the_most_accurate_run_and_its_task(client: TestClient, database: Database) -> None:
    def change(run: Run, index: int) -> None:
        run.name, run.state = f"run {index}", ["running", "succeeded", "succeeded"][index]
        run.score, run.backward_passes = [None, 0.9104, 0.4][index], 1200.0
        run.step = run.score_step = 400

    ids = add_runs(database, 3, change)
    body = client.get(f"{API}/runs", params={"limit": 1}).json()
    words = "Most accurate on word_problems: run 1, 91.0% after 1,200 backward passes."
    assert body["headline"]["text"] == f"1 running, 2 succeeded. {words}"
    with database.writing() as session:
        find(session, Run, ids[1]).step = 401  # since its evaluation
    text = client.get(f"{API}/runs").json()["headline"]["text"]
    assert text.endswith("Most accurate on word_problems: run 1, 91.0% at step 400.")
    later = client.get(f"{API}/runs", params={"limit": 1, "cursor": body["next_cursor"]}).json()
    assert (later["total"], later["states"], later["headline"]) == (None, None, None)
    with database.writing() as session:
        for run in ids[1:]:
            find(session, Run, run).score = 0.0
    assert client.get(f"{API}/runs").json()["headline"]["text"] == "1 running, 2 succeeded."


def test_a_search_is_for_parts_of_what_a_run_is_called_now(client: TestClient, database: Database) -> None:
    ids = add_runs(database, 3, plain_run)

    def matches(text: str, **query: Any) -> tuple[list[str], int | None]:
        body = client.get(f"{API}/runs", params={"text": text, "order": "asc", **query}).json()
        return [run["id"] for run in body["items"]], body["total"]

    change = {"name": "ÜBER 100%_a", "tags": ["Nacht"], "notes": "erste Zeile\nzweite"}
    assert client.patch(f"{API}/runs/{ids[0]}", json=change).status_code == 200
    for text in ("über 100%_A", "nacht", "ZWEITE", "e\nz", ids[0].upper()):
        assert matches(text) == ([ids[0]], 1), text
    for text in ("100__a", "100%b", "zeilezweite", "\\", "e\\"):
        assert matches(text) == ([], 0), text
    assert client.patch(f"{API}/runs/{ids[1]}", json={"notes": "C:\\a_b"}).status_code == 200
    assert matches("c:\\a_") == ([ids[1]], 1)
    assert client.patch(f"{API}/runs/{ids[0]}", json={"tags": [], "archived": True}).status_code == 200
    assert matches("nacht", archived="any") == ([], 0)
    assert matches("zweite") == ([], 0)
    assert matches("zweite", archived="true") == ([ids[0]], 1)
    assert matches("starter", limit=1) == ([ids[1]], 2)


def add_last(database: Database, values: dict[str, tuple[float | None, float | None, float | None]]) -> None:
    """run id → last, lowest, highest of METRIC."""
    with database.writing() as session:
        name = MetricName(name=METRIC)
        session.add(name)
        session.flush()
        for run_id, (last, lowest, highest) in values.items():
            run = find(session, Run, run_id)
            keys = {"run_number": run.number, "name_number": name.number, "last_step": 1}
            session.add(MetricLast(**keys, last=last, lowest=lowest, highest=highest))


def plain_run(run: Run, index: int) -> None:
    run.created_at = float(index)
    service.set_tags(run, [])


@pytest.mark.parametrize("at", ["last", "best", "highest", "lowest"])
@pytest.mark.parametrize("order", ["asc", "desc"])
def test_sorting_by_metrics_last_or_extreme_value(at: str, order: str, client: TestClient, database: Database) -> None:
    ids = add_runs(database, 8, plain_run)
    inf = math.inf
    triples = [(0.5, 0.1, 0.9), (0.2, 0.2, 0.2), (None, 0.0, 1.0), (inf, 0.3, inf), (-inf, -inf, 0.4), (0.5, 0.5, 0.5)]
    add_last(database, dict(zip(ids, triples, strict=False)))  # two runs never reported it, one has NaN as its last
    position = {"last": 0, "lowest": 1, "highest": 2, "best": 2}[at]
    values = dict(zip(ids, [triple[position] for triple in triples], strict=False))
    sign = -1 if order == "desc" else 1

    def key(run_id: str) -> tuple[Any, ...]:
        value, number = values.get(run_id), sign * ids.index(run_id)
        return (value is None, 0.0 if value is None else sign * value, number)

    listed = walk(client, limit=3, sort=f"metric:{METRIC}", metric_at=at, order=order)
    assert [run["id"] for run in listed] == sorted(ids, key=key)
    words = {inf: "Infinity", -inf: "-Infinity"}
    expected = [values.get(run["id"]) for run in listed]
    assert [run["metrics"][METRIC] for run in listed] == [words.get(value, value) for value in expected]


def test_settings_come_along_when_they_are_asked_for(client: TestClient) -> None:
    made = client.post(f"{API}/runs", json={"preset": "demo", "overrides": ["learner.rule.k=7"]})
    assert made.status_code == 201
    asked = ["learner.rule.k", "learner.rule", "learner.no.such"]
    settings = client.get(f"{API}/runs", params={"with_setting": asked}).json()["items"][0]["settings"]
    assert settings["learner.rule.k"] == settings["learner.rule"]["k"] == 7
    assert settings["learner.no.such"] is None
    assert client.get(f"{API}/runs").json()["items"][0]["settings"] == {}


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({"sort": "config"}, "sort"),
        ({"sort": "metric:"}, "sort"),
        ({"text": "a\x00"}, "text"),
        ({"tag": "\x00"}, "tag.0"),
        ({"state": "lost"}, "state.0"),
        ({"created_after": "nan"}, "created_after"),
    ],
)
def test_a_bad_parameter_is_named(query: dict[str, Any], field: str, client: TestClient) -> None:
    answer = client.get(f"{API}/runs", params=query)
    assert answer.status_code == 422
    assert [error["field"] for error in answer.json()["errors"]] == [field]


def test_a_cursor_is_for_its_own_order(client: TestClient, database: Database) -> None:
    add_runs(database, 3, plain_run)
    cursor = client.get(f"{API}/runs", params={"limit": 1, "sort": "score"}).json()["next_cursor"]
    for query in ({"sort": "name"}, {"sort": "score", "order": "asc"}, {"sort": "metric:score"}, {}):
        answer = client.get(f"{API}/runs", params={**query, "cursor": cursor})
        assert (answer.status_code, "another order" in answer.json()["detail"]) == (422, True)
    answer = client.get(f"{API}/runs?cursor=x")
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "cursor")


def test_positions_are_the_ranks_by_priority_age_and_number(database: Database) -> None:
    def change(run: Run, index: int) -> None:
        """Many equal priorities and times."""
        chance = random.Random(index)
        run.priority, run.queued_at = chance.randrange(3), float(chance.randrange(10))
        run.state = RunState.QUEUED if index % 7 else RunState.PAUSED

    add_runs(database, 60, change)
    with database.reading() as session:
        every = list(session.scalars(select(Run)))
        positions = {row["number"]: row["queue_position"] for row in list_rows(session, [run.number for run in every])}
    ranked = sorted(every, key=lambda run: (-run.priority, run.queued_at, run.number))
    queued = [run.number for run in ranked if run.state == RunState.QUEUED]
    assert positions == {run.number: None for run in every} | {number: n for n, number in enumerate(queued, start=1)}


# Runs that are deleted between the queries of one request.


@pytest.mark.parametrize("path", ["/runs?sort=created_at&order=asc", "/runs?sort=metric:reward/mean&order=asc"])
def test_a_list_leaves_it_out(
    path: str, client: TestClient, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = (runs.add_run(database, state=RunState.FAILED) for _ in range(3))
    deleted_next = [second]

    def list_rows_after_a_deletion(session: Session, numbers: Sequence[int]) -> list[dict[str, Any]]:
        while deleted_next:
            with database.writing() as other:
                other.delete(find(other, Run, deleted_next.pop()))
        return list_rows(session, numbers)

    monkeypatch.setattr(listing, "list_rows", list_rows_after_a_deletion)
    answer = client.get(f"{API}{path}")
    assert answer.status_code == 200, answer.text
    # Queries see one snapshot on SQLite, the latest state on PostgreSQL.
    expected = [first, second, third] if database.is_sqlite else [first, third]
    assert sorted(run["id"] for run in answer.json()["items"]) == sorted(expected)
    assert sorted(run["id"] for run in client.get(f"{API}{path}").json()["items"]) == sorted([first, third])
