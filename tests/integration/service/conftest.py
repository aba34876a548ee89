"""The service as an application of its own, on SQLite and on PostgreSQL."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from support.http_server import HttpServer
from support.postgres import NOT_INSTALLED, PostgresServer, find_programs
from support.scheduling import Cluster

from gxpo_services import logging
from gxpo_services.auth import tokens
from gxpo_services.auth.tokens import RoleWord, TokenRequest
from gxpo_services.db.database import Database
from gxpo_services.db.migrate import upgrade
from gxpo_services.settings import ServiceSettings

TEMPLATE = "gxpo_template"


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    programs = find_programs()
    if programs is None:
        pytest.skip(NOT_INSTALLED)
    with closing(PostgresServer(programs)) as server:
        upgrade(server.create(TEMPLATE))
        yield server


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("template") / "gxpo.sqlite"
    upgrade(f"sqlite:///{file}")
    return file


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A migrated, empty database of this test's own."""
    if request.param == "sqlite":
        file = tmp_path / "gxpo.sqlite"
        file.write_bytes(request.getfixturevalue("sqlite_template").read_bytes())
        yield f"sqlite:///{file}"
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    name = f"t{uuid.uuid4().hex}"
    yield server.create(name, TEMPLATE)
    server.drop(name)


@pytest.fixture
def settings(database_url: str, tmp_path: Path) -> ServiceSettings:
    return ServiceSettings(home=tmp_path / "home", database_url=database_url)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with a folder for logs."""
    folder = tmp_path / "home"
    folder.mkdir(mode=0o700)
    (folder / "logs").mkdir()
    return folder


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    with closing(Database(database_url)) as database:
        yield database


@pytest.fixture
def cluster(database: Database, settings: ServiceSettings) -> Cluster:
    """Schedulers on a clock that the test moves, with a scripted launcher."""
    return Cluster(database, settings.model_copy(update={"max_concurrent_runs": 100}))


@pytest.fixture
def token_for(database: Database) -> Callable[[RoleWord], str]:
    """Makes a token of a role; its secret."""

    def make(role: RoleWord) -> str:
        with database.writing() as session:
            return tokens.create(session, TokenRequest(name=role, role=role), actor="tests").token

    return make


@pytest.fixture(params=["nobody", "viewer", "submitter", "admin"])
def role(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def caller(role: str, app: FastAPI, token_for: Callable[[str], str]) -> Iterator[TestClient]:
    """A client with a token of `role`; that of nobody has none."""
    headers = {} if role == "nobody" else {"Authorization": f"Bearer {token_for(role)}"}
    with TestClient(app, headers=headers, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture(scope="session")
def routes(tmp_path_factory: pytest.TempPathFactory) -> FastAPI:
    """An application without a test's settings: making its routes takes longer than most tests."""
    from gxpo_services.app import create_app

    return create_app(ServiceSettings(home=tmp_path_factory.mktemp("routes")))


@pytest.fixture
def app(routes: FastAPI, settings: ServiceSettings) -> FastAPI:
    logging.configure(as_json=settings.log_json)
    routes.state.settings, routes.state.database = settings, Database(settings.url)
    for counter in (routes.state.http_metrics.requests, routes.state.http_metrics.seconds):
        counter.clear()
    return routes


@pytest.fixture
def url(app: FastAPI) -> Iterator[str]:
    """The address of the application behind a socket."""
    with HttpServer(app) as address:
        yield address


@pytest.fixture
def anonymous(app: FastAPI) -> Iterator[TestClient]:
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def client(app: FastAPI, token_for: Callable[[RoleWord], str]) -> Iterator[TestClient]:
    """A client with an admin's token."""
    headers = {"Authorization": f"Bearer {token_for('admin')}"}
    with TestClient(app, headers=headers, raise_server_exceptions=False) as client:
        yield client
