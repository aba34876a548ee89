"""Connections that the server has closed are replaced; what is for questions changes nothing."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import func, select, text
from sqlalchemy.exc import OperationalError
from support.postgres import PostgresServer

from gxpo_services.db import database as db
from gxpo_services.db.database import Database
from gxpo_services.db.migrate import upgrade
from gxpo_services.db.tables import Group

pytestmark = pytest.mark.each_database


@pytest.fixture
def database(postgres: PostgresServer) -> Iterator[Database]:
    name = f"d{uuid.uuid4().hex}"
    made = Database(postgres.create(name))
    yield made
    made.close()
    postgres.drop(name)


def backend(database: Database) -> int:
    with database.reading() as session:
        return int(session.execute(text("SELECT pg_backend_pid()")).scalar_one())


def end(database: Database, pid: int) -> None:
    """As a restart of the server does, with a connection in addition to those of `database`."""
    other = Database(database.engine.url.render_as_string(hide_password=False))
    with other.writing() as session:
        session.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": pid})
    other.close()


def test_a_connection_that_was_closed_while_idle_is_replaced(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(db, "_PING_AFTER_S", -1.0)  # idle for long enough, at once
    first = backend(database)
    assert backend(database) == first, "one that works is used again"
    end(database, first)
    assert backend(database) != first


def test_questions_see_what_was_written_and_leave_no_transaction(database: Database) -> None:
    with database.writing() as session:
        session.execute(text("CREATE TABLE seen (n int)"))
    with database.autocommit_connection() as connection:
        assert connection.execute(text("SELECT count(*) FROM seen")).scalar_one() == 0
        with database.writing() as session:
            session.execute(text("INSERT INTO seen VALUES (1)"))
        assert connection.execute(text("SELECT count(*) FROM seen")).scalar_one() == 1
    with database.writing() as session:  # the connection's own way to begin and end is back
        session.execute(text("INSERT INTO seen VALUES (2)"))
        session.rollback()
    with database.autocommit_connection() as connection:
        assert connection.execute(text("SELECT count(*) FROM seen")).scalar_one() == 1


def test_a_server_that_accepts_and_never_responds_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(db._CONNECTING, "connect_timeout", 2)  # the least that libpq knows
    with socket.create_server(("127.0.0.1", 0)) as server:
        silent = Database(f"postgresql+psycopg://gxpo@127.0.0.1:{server.getsockname()[1]}/gxpo")
        for connect in (silent.engine.connect, silent.autocommit_connection().__enter__):
            with pytest.raises(OperationalError, match="timeout"):
                connect()
        silent.close()


def test_connections_end_when_the_server_or_their_client_does_not_respond(database: Database) -> None:
    expected = {"connect_timeout": "10", "tcp_user_timeout": "30000", "keepalives_idle": "10"}
    expected |= {"keepalives_interval": "5", "keepalives_count": "3"}
    with database.engine.connect() as writing, database.autocommit_connection() as reading:
        for connection in (writing, reading):
            parameters = connection.connection.driver_connection.info.get_parameters()  # type: ignore[union-attr]
            assert {name: parameters[name] for name in expected} == expected
            assert connection.execute(text("SHOW idle_in_transaction_session_timeout")).scalar_one() == "1min"


def test_parameters_of_the_url_take_precedence(postgres: PostgresServer) -> None:
    options = "-c%20idle_in_transaction_session_timeout%3D5s"
    database = Database(f"{postgres.url('postgres')}?connect_timeout=7&options={options}")
    with database.engine.connect() as connection:
        parameters = connection.connection.driver_connection.info.get_parameters()  # type: ignore[union-attr]
        assert parameters["connect_timeout"] == "7"
        assert connection.execute(text("SHOW idle_in_transaction_session_timeout")).scalar_one() == "5s"
    database.close()


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_reading_session_refuses_changes(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if kind == "postgresql":
        database = request.getfixturevalue("database")
    else:
        database = Database(f"sqlite:///{tmp_path / 'some.sqlite'}")
    upgrade(database.engine.url.render_as_string(hide_password=False))
    with database.reading() as session:
        session.add(Group(id="g1", name="one", created_at=1.0, created_by="test"))
        with pytest.raises(RuntimeError, match="changes in a reading session"):
            session.flush()
    with database.reading() as session:
        assert session.scalar(select(func.count()).select_from(Group)) == 0
    if kind == "sqlite":
        database.close()
