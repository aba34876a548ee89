"""A database that the version before wrote: this version opens it, keeps every row and reads what is in it."""

from __future__ import annotations

import sqlite3
import stat
import threading
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from fastapi.testclient import TestClient
from sqlalchemy import create_engine, insert, inspect, text
from support import queued_runs as runs
from support.postgres import PostgresServer

from gxpo_services.app import create_app
from gxpo_services.auth.tokens import prepare_local
from gxpo_services.db.database import Database, make_engine
from gxpo_services.db.migrate import alembic_config, back_up, newest_revision, restore, revision_at, upgrade
from gxpo_services.db.tables import Group, metadata
from gxpo_services.settings import ServiceSettings
from gxpo_trainer import cli
from gxpo_trainer.errors import ConfigError, DataError

DUMP = (Path(__file__).parent / "data" / "revision_0009.sql").read_text(encoding="utf-8")
"""`sqlite3 .dump` of a database at revision 0009 with rows in every table, made by the last version with ten
migrations: two runs, one of them reported in two attempts and ended."""
RUN, GROUP, SECRET = "r01m85w2e4t8wtbz4w2nz", "g01m85w2e3x2992g6gevm", "gxpo_secret"


@pytest.fixture
def old_sqlite(tmp_path: Path) -> str:
    file = tmp_path / "home" / "gxpo.sqlite"
    file.parent.mkdir()
    with closing(sqlite3.connect(file)) as database:
        database.executescript(DUMP)
    return f"sqlite:///{file}"


@pytest.fixture(params=["sqlite", "postgresql"])
def old_url(request: pytest.FixtureRequest, old_sqlite: str) -> Iterator[str]:
    """On PostgreSQL the same rows, and the schema with what came after revision 0009 undone."""
    if request.param == "sqlite":
        yield old_sqlite
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    name = f"u{uuid.uuid4().hex}"
    url = server.create(name)
    upgrade(url)
    engine = make_engine(url)
    rows = rows_of(old_sqlite)
    with engine.begin() as connection:
        for table in metadata.sorted_tables:
            connection.execute(insert(table), rows[table.name])
        connection.execute(text("ALTER TABLE runs ALTER rule TYPE varchar(20)"))
        connection.execute(text("DROP INDEX ix_metric_blocks_name_number"))
        connection.execute(text("UPDATE alembic_version SET version_num = '0009'"))
    engine.dispose()
    yield url
    server.drop(name)


def rows_of(url: str) -> dict[str, list[dict[str, Any]]]:
    engine = create_engine(url)
    try:
        return runs.all_rows(engine)
    finally:
        engine.dispose()


def test_migrate_keeps_rows_which_the_api_reads(old_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, columns = rows_of(old_url), optional_columns(old_url)
    assert all(before.values()), "rows in every table"
    monkeypatch.setenv("GXPO_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("GXPO_DATABASE_URL", old_url)
    assert cli.main(["migrate"]) == 0
    assert revision_at(old_url) == newest_revision()
    command.check(alembic_config(old_url))  # tables and columns as the code has them
    after = rows_of(old_url)
    for name, rows in before.items():
        kept = [{column: row[column] for column in old} for old, row in zip(rows, after[name], strict=False)]
        assert kept == rows, name
    # While a cluster is upgraded, replicas of the version before go on writing: no column goes, and none is demanded.
    present = optional_columns(old_url)
    for table, old in columns.items():
        assert set(old) <= set(present[table]), table
        assert all(present[table][name] for name in set(present[table]) - set(old)), table

    app = create_app(ServiceSettings(home=tmp_path / "home", database_url=old_url))
    with TestClient(app, headers={"Authorization": f"Bearer {SECRET}"}) as client:

        def get(path: str) -> Any:
            return client.get(f"/api/v1{path}").raise_for_status().json()

        listed = get("/runs?sort=created_at&order=asc")["items"]
        assert [(run["name"], run["rule_label"]) for run in listed] == [("Größe π", "GXPO K=5"), ("grpo", "GRPO")]
        assert (listed[0]["id"], listed[0]["tags"], listed[0]["group"]) == (RUN, ["demo", "π"], GROUP)
        assert listed[0]["reward"] == 0.75, "of the second attempt"
        assert get("/runs?text=GR%C3%96SSE")["items"] == get(f"/groups/{GROUP}")["runs"] == [listed[0]]
        detail = get(f"/runs/{RUN}")
        assert detail["config"]["budget"]["steps"] == 40
        assert detail["identity"] == {"policy_sha256": "p", "versions": {"NaN": ["Infinity", 1]}}
        reward = get(f"/runs/{RUN}/metrics?names=reward/mean")["series"]["reward/mean"]
        assert (reward["steps"], reward["y"]) == ([1, 2, 3], [0.25, "NaN", 0.75])
        kinds = [event["kind"] for event in get(f"/runs/{RUN}/events")["items"]]
        assert kinds == ["submitted", "state", "checkpoint", "state"]
        newest, oldest = get(f"/runs/{RUN}/samples")["items"]
        assert (newest["end"], len(newest["turns"]), oldest["turns"]) == ("done", 3, None)
        assert get(f"/runs/{RUN}/evaluations")["items"][0]["scores"] == {"pass@1": "NaN"}
        repeated = client.post(
            "/api/v1/runs",
            json={"preset": "demo", "name": "Größe π", "notes": "first", "tags": ["demo", "π"], "group": GROUP},
            headers={"Idempotency-Key": "key-1"},
        )
        assert (repeated.status_code, repeated.json()["id"]) == (200, RUN)


@pytest.mark.parametrize("before", [False, True])
def test_the_number_of_a_deleted_run_or_group_is_not_used_again(old_sqlite: str, tmp_path: Path, before: bool) -> None:
    """Streams, exports and the scheduler know runs by it for longer than a transaction. before: the version before
    made the database."""
    url = old_sqlite if before else f"sqlite:///{tmp_path / 'new.sqlite'}"
    upgrade(url)
    numbers = []
    with closing(Database(url)) as database:
        for name in ("g1", "g2"):
            group = Group(id=name, name=name, created_at=1.0, created_by="tests")
            run = runs.get(database, runs.add_run(database, group=group))
            numbers.append((run.number, run.group_number))
            with database.writing() as session:
                session.delete(run)
                session.delete(session.get_one(Group, run.group_number))
    assert numbers == ([(3, 2), (4, 3)] if before else [(1, 1), (2, 2)])


def optional_columns(url: str) -> dict[str, dict[str, bool]]:
    """Table → column → whether a row may leave it out."""
    engine = make_engine(url)
    inspector = inspect(engine)
    columns = {
        table: {c["name"]: c["nullable"] or c["default"] is not None for c in inspector.get_columns(table)}
        for table in inspector.get_table_names()
    }
    engine.dispose()
    return columns


def set_revision(url: str, revision: str) -> None:
    engine = make_engine(url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = :revision"), {"revision": revision})
    engine.dispose()


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_later_schema_can_be_used_and_an_earlier_one_not(anonymous: TestClient, database_url: str) -> None:
    """On PostgreSQL: an application migrates SQLite when it starts."""
    for revision, status in (("9999", 200), ("0001", 503)):
        set_revision(database_url, revision)
        assert anonymous.get("/health/ready").status_code == status


@pytest.mark.parametrize(
    ("revision", "fix"), [("0005", "migrate it with a version that has both"), ("9999", "the version .* that wrote it")]
)
def test_an_unknown_revision_is_refused_with_the_way_out(old_sqlite: str, revision: str, fix: str) -> None:
    set_revision(old_sqlite, revision)
    with pytest.raises(ConfigError, match=rf"from revision {revision} to {newest_revision()}: .*; .*{fix}"):
        upgrade(old_sqlite)


# Back-up of a SQLite database in use, and its restore.


@pytest.fixture
def service_home(tmp_path: Path) -> ServiceSettings:
    """A service on one machine, with its token."""
    settings = ServiceSettings(home=tmp_path / "home")
    prepare_local(settings)
    return settings


def test_a_back_up_made_under_writes_is_consistent_and_restores_in_another_home(
    service_home: ServiceSettings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    database = Database(service_home.url)
    first = runs.add_run(database)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            runs.add_run(database)

    writer = threading.Thread(target=write)
    writer.start()
    file = tmp_path / "copy.sqlite"
    try:
        assert cli.main(["backup", str(file), "--home", str(service_home.home)]) == 0
    finally:
        stop.set()
        writer.join()
    runs.add_run(database)
    assert str(file) in capsys.readouterr().out
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy.sqlite", "home"], "one file"
    with closing(Database(f"sqlite:///{file}")) as copy:
        held = runs.count(copy)
    assert 1 <= held <= runs.count(database)
    with pytest.raises(ConfigError, match="is in use"):
        restore(service_home.url, file)
    database.close()
    secret = service_home.local_token_file.read_text().strip()
    for settings in (service_home, ServiceSettings(home=tmp_path / "other")):
        assert cli.main(["restore", str(file), "--home", str(settings.home), "--yes"]) == 0
        with TestClient(create_app(settings), headers={"Authorization": f"Bearer {secret}"}) as client:
            listed = client.get("/api/v1/runs", params={"sort": "created_at", "order": "asc", "limit": 1}).json()
            assert (listed["total"], listed["items"][0]["id"]) == (held, first), "what was written since is gone"
            assert client.post("/api/v1/runs", json={"preset": "demo"}).status_code == 201


def test_a_database_is_neither_backed_up_nor_restored_onto_itself(
    service_home: ServiceSettings, tmp_path: Path
) -> None:
    file, link = service_home.home / "gxpo.sqlite", tmp_path / "link.sqlite"
    link.symlink_to(file)
    before, inode = rows_of(service_home.url), file.stat().st_ino
    for other in (file, link):
        with pytest.raises(ConfigError, match=f"{other} is the service's database itself; name another file"):
            back_up(service_home.url, other)
        with pytest.raises(ConfigError, match=f"{other} is the service's database itself; name another file"):
            restore(service_home.url, other)
    assert (rows_of(service_home.url), file.stat().st_ino, link.is_symlink()) == (before, inode, True)
    kept = file.with_name("gxpo.sqlite.damaged")
    back_up(service_home.url, kept)
    with pytest.raises(ConfigError, match=f"{kept} has the name that a damaged database gets; rename it first"):
        restore(service_home.url, kept)


def test_a_restore_reports_a_reader_of_a_database_without_write_ahead_log(
    service_home: ServiceSettings, tmp_path: Path
) -> None:
    file = tmp_path / "copy.sqlite"
    back_up(service_home.url, file)
    restore(service_home.url, file)
    with closing(sqlite3.connect(service_home.home / "gxpo.sqlite", isolation_level=None)) as reader:
        reader.execute("PRAGMA journal_mode=DELETE")
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM runs").fetchall()
        with pytest.raises(ConfigError, match="is in use"):
            restore(service_home.url, file)


@pytest.mark.parametrize("damage", [(0, b"garbage "), (100, b"\xff" * 40), (0, b"\0" * 4096)])
def test_a_damaged_database_is_moved_aside_by_a_restore(
    damage: tuple[int, bytes],
    service_home: ServiceSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the header, in the table of tables, and zeros as after a power cut; while a process has it open."""
    monkeypatch.setenv("GXPO_HOME", str(service_home.home))
    file = service_home.home / "gxpo.sqlite"
    backup = tmp_path / "copy.sqlite"
    kept = rows_of(service_home.url)
    back_up(service_home.url, backup)
    begin, content = damage
    with closing(sqlite3.connect(file)) as used, file.open("r+b") as damaged:
        used.execute("SELECT * FROM runs")
        damaged.seek(begin)
        damaged.write(content)
        damaged.flush()
        assert cli.main(["migrate"]) == 2
        assert cli.main(["restore", str(backup), "--yes"]) == 0
        assert file.with_name("gxpo.sqlite.damaged-wal").exists(), "it would be applied to the new file"
    said = capsys.readouterr()
    assert said.err.startswith("gxpo: the database is damaged (")
    assert said.err.endswith("; `gxpo restore` replaces it by a back-up\n")
    assert said.out == f"restored {backup}; the damaged database is now {file}.damaged\n"
    assert rows_of(service_home.url) == kept
    assert file.with_name("gxpo.sqlite.damaged").read_bytes()[begin:].startswith(content)
    assert cli.main(["restore", str(backup), "--yes"]) == 0
    assert capsys.readouterr().out == f"restored {backup}\n"


def test_a_full_disk_is_named_by_a_restore(
    service_home: ServiceSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup, connect = tmp_path / "copy.sqlite", sqlite3.connect
    back_up(service_home.url, backup)

    def limited(file: Any, **options: Any) -> sqlite3.Connection:
        connection = connect(file, **options)
        connection.execute("PRAGMA max_page_count=2")
        return connection

    monkeypatch.setattr("gxpo_services.db.migrate.sqlite3.connect", limited)
    with pytest.raises(ConfigError, match=r"cannot write .*other.sqlite: database or disk is full"):
        restore(f"sqlite:///{tmp_path / 'other.sqlite'}", backup)


def test_a_full_disk_is_named_by_a_back_up(
    service_home: ServiceSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup, connect = tmp_path / "copy.sqlite", sqlite3.connect

    def limited(file: Any, **options: Any) -> sqlite3.Connection:
        connection = connect(file, **options)
        if str(file).endswith(".part"):
            connection.execute("PRAGMA max_page_count=2")
        return connection

    monkeypatch.setattr("gxpo_services.db.migrate.sqlite3.connect", limited)
    with pytest.raises(ConfigError, match=r"cannot write the back-up .*copy\.sqlite: database or disk is full"):
        back_up(service_home.url, backup)


def test_a_database_of_another_program_is_not_migrated(tmp_path: Path) -> None:
    file = tmp_path / "other.sqlite"
    with closing(sqlite3.connect(file)) as database:
        database.execute("CREATE TABLE users (name TEXT)")
    with pytest.raises(
        ConfigError, match=r"other\.sqlite has tables of another program; name another database by GXPO_"
    ):
        upgrade(f"sqlite:///{file}")
    with closing(sqlite3.connect(file)) as database:
        assert database.execute("SELECT name FROM sqlite_master").fetchall() == [("users",)]


def test_what_is_no_back_up_is_refused_and_changes_nothing(service_home: ServiceSettings, tmp_path: Path) -> None:
    good, newer, bad = (tmp_path / f"{name}.sqlite" for name in ("good", "newer", "bad"))
    before = rows_of(service_home.url)
    for file in (good, newer):
        back_up(service_home.url, file)
    set_revision(f"sqlite:///{newer}", "9999")
    with pytest.raises(DataError, match=r"was made by a newer version of gxpo: its schema is 9999"):
        restore(service_home.url, newer)
    for old in ("0008", "0010"):  # before the baseline, and one that became part of a later revision
        set_revision(f"sqlite:///{newer}", old)
        with pytest.raises(DataError, match=rf"has schema {old}, which this version cannot migrate to "):
            restore(service_home.url, newer)
    for content in (b"", b"no database" * 1000):
        bad.write_bytes(content)
        with pytest.raises(DataError, match=r"bad\.sqlite"):
            restore(service_home.url, bad)
    with pytest.raises(DataError):
        restore(service_home.url, tmp_path / "absent.sqlite")
    with pytest.raises(ConfigError, match="no database"):
        back_up(f"sqlite:///{tmp_path / 'none.sqlite'}", bad)
    with pytest.raises(ConfigError, match="pg_dump"):
        back_up("postgresql+psycopg://gxpo@localhost/gxpo", bad)
    for target in (Path("/"), Path(), tmp_path, good / "x"):
        with pytest.raises(ConfigError, match=f"cannot write the back-up {target}: "):
            back_up(service_home.url, target)
    with pytest.raises(ConfigError, match=r"cannot write .*good\.sqlite/x/gxpo\.sqlite: Not a directory"):
        restore(f"sqlite:///{good / 'x' / 'gxpo.sqlite'}", good)
    assert rows_of(service_home.url) == before
