"""Connections that the server has closed are replaced; what is for questions changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import anyio
import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sqlalchemy import func, select, text
from sqlalchemy.exc import OperationalError
from support.postgres import NOT_INSTALLED, PostgresServer, find_programs
from support.scheduling import Cluster
from support.service_processes import until

from gxpo_services.app import create_app
from gxpo_services.auth import tokens
from gxpo_services.auth.tokens import TokenRequest
from gxpo_services.db.database import UNAVAILABLE, Database, note_change
from gxpo_services.db.migrate import upgrade
from gxpo_services.db.tables import Group
from gxpo_services.settings import ServiceSettings
from gxpo_trainer import cli

pytestmark = pytest.mark.each_database
on_postgres = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)


def backend(database: Database) -> int:
    with database.reading() as session:
        return int(session.execute(text("SELECT pg_backend_pid()")).scalar_one())


@on_postgres
def test_a_connection_closed_while_idle_is_replaced(database: Database, database_url: str) -> None:
    """As by a restart of the server."""
    first = backend(database)
    assert backend(database) == first, "one that works is used again"
    with closing(Database(database_url)) as other, other.writing() as session:
        session.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": first})
    assert backend(database) != first


@on_postgres
def test_questions_see_what_was_written_and_leave_no_transaction(database: Database) -> None:
    with database.writing() as session:
        session.execute(text("CREATE TABLE seen (n int)"))
    with database.autocommit_connection() as connection:
        assert connection.execute(text("SELECT count(*) FROM seen")).scalar_one() == 0
        with database.writing() as session:
            session.execute(text("INSERT INTO seen VALUES (1)"))
        assert connection.execute(text("SELECT count(*) FROM seen")).scalar_one() == 1


@on_postgres
def test_a_commit_succeeds_without_a_free_connection_to_notify(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All connections for queries are in use."""
    options = {"pool_size": 1, "max_overflow": 0, "pool_timeout": 0.1}
    monkeypatch.setattr("gxpo_services.db.database._READING_POOL", options)
    with closing(Database(database_url)) as database:
        with database.autocommit_connection(), database.writing() as session:
            session.add(Group(id="g", name="g", created_at=1.0, created_by="tests"))
            note_change(session)
        with database.reading() as session:
            assert session.scalar(select(Group.id)) == "g"


def test_a_frozen_server_is_unavailable_until_it_goes_on(tmp_path: Path) -> None:
    programs = find_programs()
    if programs is None:
        pytest.skip(NOT_INSTALLED)
    with closing(PostgresServer(programs)) as frozen:
        url = frozen.url("postgres")
        upgrade(url)
        settings = ServiceSettings(home=tmp_path, database_url=url, database_timeout_s=5.0)
        app = create_app(settings)
        with TestClient(app, raise_server_exceptions=False) as client:
            with app.state.database.writing() as session:
                secret = tokens.create(session, TokenRequest(name="me", role="admin"), actor="tests").token
            client.headers["Authorization"] = f"Bearer {secret}"
            paths = ("/api/v1/runs", "/health/ready", "/metrics", "/api/v1/tokens/me")
            assert [client.get(path).status_code for path in paths] == [200] * 4
            with frozen.stopped():
                for path in paths:
                    answer = client.get(path)
                    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2"), path
                    assert "the database server did not answer within" in answer.json()["detail"], path
                assert client.post("/api/v1/runs", json={"preset": "demo"}).status_code == 503
                assert client.get("/health/live").status_code == 200
            until(lambda: client.get("/health/ready").status_code == 200, "the server answers again")
            assert [client.get(path).status_code for path in paths] == [200] * 4
            assert client.post("/api/v1/runs", json={"preset": "demo"}).status_code == 201
            with pytest.raises(OperationalError, match="statement timeout"), app.state.database.reading() as session:
                session.execute(text("SELECT pg_sleep(60)"))
            assert client.get("/api/v1/runs").status_code == 200


@on_postgres
def test_a_server_that_only_reads_is_unavailable_to_who_writes(
    client: TestClient,
    app: FastAPI,
    settings: ServiceSettings,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As after a failover to a replica."""
    url = f"{database_url}?options=-c%20default_transaction_read_only%3Don"
    app.state.database = Database(url)
    answer = client.post("/api/v1/groups", json={"name": "g"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    assert answer.json()["detail"] == "the database is unavailable: ReadOnlySqlTransaction"
    assert client.get("/api/v1/runs").status_code == 200
    with pytest.raises(UNAVAILABLE):
        Cluster(app.state.database, settings).scheduler().tick()
    app.state.database.close()
    monkeypatch.setenv("GXPO_DATABASE_URL", url)
    assert cli.main(["token", "create", "ada", "--database"]) == 2
    assert "cannot use the database (cannot execute INSERT in a read-only transaction)" in capsys.readouterr().err


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_database_that_cannot_grow_or_be_written_says_so(client: TestClient, app: FastAPI) -> None:
    def answer(pragma: str) -> str:
        with app.state.database.engine.connect() as connection:
            connection.exec_driver_sql(f"PRAGMA {pragma}")
        answer = client.post("/api/v1/groups", json={"name": "g" * 200})
        while answer.status_code == 201:  # until the last page is full
            answer = client.post("/api/v1/groups", json={"name": "g" * 200})
        assert answer.status_code == 503
        return str(answer.json()["detail"])

    assert answer("max_page_count=1") == "the database is unavailable: its disk is full; free space"
    assert answer("query_only=ON") == "the database is unavailable: it is read-only; check the owner of its file"


def test_a_reading_session_refuses_changes(database: Database) -> None:
    with database.reading() as session:
        session.add(Group(id="g1", name="one", created_at=1.0, created_by="test"))
        with pytest.raises(RuntimeError, match="changes in a reading session"):
            session.flush()
    with database.reading() as session:
        assert session.scalar(select(func.count()).select_from(Group)) == 0


# Probes need no token: whatever the database does, they must not take threads from authenticated requests.


PROBES = 60
"""More than the 40 threads of the pool."""
LONGEST_S = 20.0
"""Less than the 30 s after which SQLite gives up waiting for a lock."""


@contextmanager
def locked(database: Database) -> Iterator[None]:
    """SQLite's write lock, or the lock of a migration on PostgreSQL's table of revisions."""
    with database.engine.begin() as connection:
        if not database.is_sqlite:
            connection.execute(text("LOCK TABLE alembic_version IN ACCESS EXCLUSIVE MODE"))
        yield


def test_probes_on_a_locked_database_delay_nobody(
    app: FastAPI, database: Database, token_for: Callable[[str], str]
) -> None:
    viewer = {"Authorization": f"Bearer {token_for('viewer')}"}
    others: list[tuple[str, int]] = []
    probes: list[tuple[str, int]] = []

    async def get(http: httpx.AsyncClient, path: str, answers: list[tuple[str, int]]) -> None:
        answers.append((path, (await http.get(path, headers=viewer)).status_code))

    async def ask() -> None:
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://test") as http,
            anyio.create_task_group() as tasks,
        ):
            with locked(database):
                for _ in range(PROBES):
                    tasks.start_soon(get, http, "/health/ready", probes)
                await anyio.sleep(0.5)
                with anyio.move_on_after(LONGEST_S):
                    for path in ("/health/live", "/api/v1/tokens/me", "/api/v1/runs"):
                        await get(http, path, others)
                    while database.is_sqlite and len(probes) < PROBES:
                        await anyio.sleep(0.01)
                answered_while_locked = len(probes)
        assert answered_while_locked == (PROBES if database.is_sqlite else 0)

    anyio.run(ask)
    assert others == [("/health/live", 200), ("/api/v1/tokens/me", 200), ("/api/v1/runs", 200)]
    assert probes == [("/health/ready", 200)] * PROBES


def test_liveness_needs_no_thread(app: FastAPI) -> None:
    async def ask() -> int:
        limiter = anyio.to_thread.current_default_thread_limiter()
        for number in range(int(limiter.total_tokens)):
            limiter.acquire_on_behalf_of_nowait(number)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            with anyio.fail_after(LONGEST_S):
                return (await http.get("/health/live")).status_code

    assert anyio.run(ask) == 200
