"""A database that an older version made and filled: the newest version brings it up to date and reads what is in it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from fastapi.testclient import TestClient
from sqlalchemy import JSON, Boolean, Float, LargeBinary, MetaData, Table, insert, inspect, select, text
from sqlalchemy.types import Integer, TypeEngine
from support.postgres import PostgresServer

from gxpo_services.api.principals import hash_token
from gxpo_services.app import create_app
from gxpo_services.db.database import make_engine
from gxpo_services.db.migrate import alembic_config, newest_revision, revision_at, upgrade
from gxpo_services.settings import ServiceSettings
from gxpo_trainer.compare.rows import rule_label
from gxpo_trainer.config import RunConfig

FIRST = "0001"
RUN, GROUP, SECRET = "r00000000000000000001", "g00000000000000000001", "gxpo_secret"
KNOWN: dict[tuple[str, str], Any] = {
    # What the code reads as more than a word or a number.
    ("groups", "id"): GROUP,
    ("runs", "id"): RUN,
    ("runs", "state"): "succeeded",
    ("runs", "reason"): "steps_done",
    ("runs", "rule"): "gxpo",
    ("runs", "parent_kind"): "clone",
    ("runs", "ended_by"): "steps",
    ("runs", "config"): RunConfig().model_dump(mode="json"),
    ("runs", "offsets"): {"metrics": 1, "samples": 1, "evaluations": 1, "events": 1},
    ("runs", "archived"): False,
    ("evaluations", "record"): {"attempt": 1, "step": 1, "benchmark": "b", "scores": {"pass@1": "NaN"}},
    ("tokens", "role"): "viewer",
    ("tokens", "sha256"): hash_token(SECRET),
    ("tokens", "expires_at"): None,
    ("tokens", "revoked_at"): None,
}

MOVED = {("runs", "config"): "run_documents", ("runs", "identity"): "run_documents"}
"""Columns that lie in another table by now."""
MANY = 1_203
"""Runs, more than a migration takes at a time."""


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'old.sqlite'}"
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    name = f"u{uuid.uuid4().hex}"
    yield server.create(name)
    server.drop(name)


def some_value(type_: TypeEngine[Any]) -> Any:
    kinds: list[tuple[type[TypeEngine[Any]], Any]] = [
        (Boolean, True),
        (Integer, 1),
        (Float, 1.5),
        (LargeBinary, b"\x01"),
        (JSON, {"NaN": ["Infinity", 1]}),
    ]
    return next((value for kind, value in kinds if isinstance(type_, kind)), "π")


def tables_of(url: str) -> dict[str, Table]:
    engine = make_engine(url)
    metadata = MetaData()
    metadata.reflect(engine)
    engine.dispose()
    return {table.name: table for table in metadata.sorted_tables if table.name != "alembic_version"}


def rows_of(url: str, tables: dict[str, Table]) -> dict[str, list[dict[str, Any]]]:
    engine = make_engine(url)
    with engine.connect() as connection:
        found = {
            name: [dict(row._mapping) for row in connection.execute(select(t).order_by(*t.primary_key.columns))]
            for name, t in tables.items()
        }
    engine.dispose()
    return found


def fill(url: str) -> None:
    """One row in each table, which belong together."""
    tables = tables_of(url)
    engine = make_engine(url)
    with engine.begin() as connection:
        for name, table in tables.items():
            values = {column.name: KNOWN.get((name, column.name), some_value(column.type)) for column in table.columns}
            connection.execute(insert(table).values(**values))
    engine.dispose()


def test_the_migrations_make_what_the_code_expects(database_url: str) -> None:
    command.check(alembic_config(database_url))


def test_what_the_first_version_wrote_is_kept_and_read(empty_url: str, tmp_path: Path) -> None:
    upgrade(empty_url, FIRST)
    fill(empty_url)
    before = rows_of(empty_url, tables_of(empty_url))
    assert all(len(rows) == 1 for rows in before.values())
    upgrade(empty_url)
    upgrade(empty_url)
    assert revision_at(empty_url) == newest_revision()
    engine = make_engine(empty_url)
    names = set(inspect(engine).get_table_names())
    engine.dispose()
    assert set(before) <= names
    after = rows_of(empty_url, tables_of(empty_url))
    for name, (row,) in before.items():
        kept = {column: after[MOVED.get((name, column), name)][0][column] for column in row}
        assert kept == row, name
        assert len(after[name]) == 1

    app = create_app(ServiceSettings(home=tmp_path / "home", database_url=empty_url))
    with TestClient(app, headers={"Authorization": f"Bearer {SECRET}"}) as client:
        answers = {path: client.get(f"/api/v1{path}") for path in PATHS}
    assert {path: answer.status_code for path, answer in answers.items()} == dict.fromkeys(PATHS, 200)
    (listed,) = answers["/runs"].json()["items"]
    assert (listed["id"], listed["state"], listed["tags"], listed["group"]) == (RUN, "succeeded", ["π"], GROUP)
    assert answers["/runs?text=%CE%A0"].json()["items"] == [listed]  # Π: a search knows no upper case
    shown = answers[f"/runs/{RUN}"].json()
    assert (shown["config"], shown["identity"]) == (KNOWN["runs", "config"], {"NaN": ["Infinity", 1]})
    assert shown["rule_label"] == "GXPO K=5"
    assert answers[f"/runs/{RUN}/metrics/names"].json() == ["π"]
    assert answers[f"/runs/{RUN}/events"].json()["items"][0]["message"] == "π"
    (sample,) = answers[f"/runs/{RUN}/samples"].json()["items"]
    assert (sample["response"], sample["turns"], sample["end"]) == ("π", None, None)
    assert answers[f"/runs/{RUN}/evaluations"].json()["items"][0]["scores"] == {"pass@1": "NaN"}


def test_each_run_keeps_its_own_config_up_and_down_again(empty_url: str) -> None:
    upgrade(empty_url, FIRST)
    tables = tables_of(empty_url)
    fill(empty_url)
    (template,) = rows_of(empty_url, tables)["runs"]
    runs = [old_run(template, number) for number in range(2, MANY + 2)]
    engine = make_engine(empty_url)
    with engine.begin() as connection:
        connection.execute(insert(tables["runs"]), runs)
        connection.execute(insert(tables["run_tags"]), [{"run_number": r["number"], "tag": r["name"]} for r in runs])
    engine.dispose()
    before = rows_of(empty_url, tables)

    upgrade(empty_url)
    after = rows_of(empty_url, tables_of(empty_url))
    documents = {row["run_number"]: row for row in after["run_documents"]}
    shown = {row["number"]: row for row in after["runs"]}
    assert len(after["run_tags"]) == MANY + 1
    assert shown.keys() == documents.keys() == {row["number"] for row in before["runs"]}
    for row in before["runs"]:
        number, config = row["number"], row["config"]
        assert (documents[number]["config"], documents[number]["identity"]) == (config, row["identity"])
        assert shown[number]["rule_label"] == rule_label(config)
        budget = config["budget"]
        assert [shown[number][f"{name}_budget"] for name in ("step", "backward_passes", "tokens")] == [
            budget["steps"],
            budget["backward_passes"],
            None if budget["tokens"] is None else 2**63 - 1,
        ]
        assert shown[number]["hours_budget"] == (None if budget["hours"] is None else float(budget["hours"]))

    command.downgrade(alembic_config(empty_url), FIRST)
    assert rows_of(empty_url, tables_of(empty_url)) == before
    upgrade(empty_url)
    assert rows_of(empty_url, tables_of(empty_url)) == after


def old_run(template: dict[str, Any], number: int) -> dict[str, Any]:
    rules: list[dict[str, Any]] = [{"name": "grpo"}, {"name": "sfpo", "k": 3}, {"name": "gxpo", "k": 10, "probes": 1}]
    rules[2]["predictor"] = "replay"
    bounds = [{"steps": number}, {"hours": "Infinity", "tokens": 10**30}, {"backward_passes": 7, "hours": 0.5}]
    budget = dict.fromkeys(("steps", "hours", "tokens", "backward_passes")) | bounds[number // 3 % 3]
    config = {"name": f"n{number}", "seed": number, "learner": {"rule": rules[number % 3]}, "budget": budget}
    identity = None if number % 5 == 0 else {"policy_sha256": str(number)}
    own = {"number": number, "id": f"r{number}", "name": f"n{number}", "config": config, "identity": identity}
    return template | own


PATHS = (
    "/runs",
    "/runs?text=%CE%A0",
    "/groups",
    f"/groups/{GROUP}",
    *(f"/runs/{RUN}{part}" for part in ("", "/metrics/names", "/events", "/samples", "/evaluations")),
)


@pytest.mark.parametrize(("before", "after"), [("0006", "0007"), ("0007", "0008"), ("0008", "0009")])
def test_replicas_of_the_version_before_can_still_write_after_a_migration(
    empty_url: str, before: str, after: str
) -> None:
    """While a cluster is upgraded, they continue: a migration takes no column away and demands no new one."""
    assert newest_revision() <= "0009", "add the newest migration above"
    upgrade(empty_url, before)
    old = _columns(empty_url)
    upgrade(empty_url, after)
    new = _columns(empty_url)
    for table, columns in old.items():
        assert set(columns) <= set(new[table]), table
        for name in set(new[table]) - set(columns):
            assert new[table][name], f"{table}.{name} has no value in rows of the version before"


def _columns(url: str) -> dict[str, dict[str, bool]]:
    """Table → column → whether a row may leave it out."""
    engine = make_engine(url)
    try:
        found = inspect(engine)
        return {
            table: {c["name"]: c["nullable"] or c["default"] is not None for c in found.get_columns(table)}
            for table in found.get_table_names()
        }
    finally:
        engine.dispose()


@pytest.mark.parametrize(("revision", "status"), [("9999", 200), ("0001", 503)])
def test_a_later_schema_can_be_used_and_an_earlier_one_not(
    database_url: str, tmp_path: Path, revision: str, status: int
) -> None:
    engine = make_engine(database_url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = :revision"), {"revision": revision})
    engine.dispose()
    app = create_app(ServiceSettings(home=tmp_path, database_url=database_url))
    assert TestClient(app).get("/health/ready").status_code == status
