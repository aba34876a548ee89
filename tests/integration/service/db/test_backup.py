"""Back-up of a SQLite database in use, and its restore."""

from __future__ import annotations

import sqlite3
import stat
import threading
from contextlib import closing
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from support import queued_runs as runs

from gxpo_services.app import create_app
from gxpo_services.auth.tokens import prepare_local
from gxpo_services.db.database import Database
from gxpo_services.db.migrate import back_up, newest_revision, restore, revision_at
from gxpo_services.settings import ServiceSettings
from gxpo_trainer import cli
from gxpo_trainer.errors import ConfigError, DataError


@pytest.fixture
def home(tmp_path: Path, sqlite_template: Path) -> ServiceSettings:
    """A service on one machine, with its token."""
    settings = ServiceSettings(home=tmp_path / "home")
    settings.home.mkdir(mode=0o700)
    (settings.home / "gxpo.sqlite").write_bytes(sqlite_template.read_bytes())
    prepare_local(settings)
    return settings


def test_a_back_up_made_under_writes_is_consistent_and_restores_in_another_home(
    home: ServiceSettings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    database = Database(home.url)
    first = runs.add_run(database)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            runs.add_run(database)

    writer = threading.Thread(target=write)
    writer.start()
    file = tmp_path / "copy.sqlite"
    try:
        assert cli.main(["backup", str(file), "--home", str(home.home)]) == 0
    finally:
        stop.set()
        writer.join()
    assert str(file) in capsys.readouterr().out
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy.sqlite", "home"], "one file"
    in_copy = Database(f"sqlite:///{file}")
    held = runs.count(in_copy)
    in_copy.close()
    assert 1 <= held <= runs.count(database)
    database.close()

    other = ServiceSettings(home=tmp_path / "other")
    assert cli.main(["restore", str(file), "--home", str(other.home), "--yes"]) == 0
    secret = home.local_token_file.read_text().strip()
    with TestClient(create_app(other), headers={"Authorization": f"Bearer {secret}"}) as client:
        listed = client.get("/api/v1/runs", params={"sort": "created_at", "order": "asc", "limit": 1}).json()
        assert (listed["total"], listed["items"][0]["id"]) == (held, first)
        assert client.post("/api/v1/runs", json={"preset": "demo"}).status_code == 201


def test_a_restore_replaces_what_was_written_since(home: ServiceSettings, tmp_path: Path) -> None:
    file = tmp_path / "copy.sqlite"
    database = Database(home.url)
    kept = runs.add_run(database)
    back_up(home.url, file)
    runs.add_run(database)
    with pytest.raises(ConfigError, match="is in use"):
        restore(home.url, file)
    assert runs.count(database) == 2
    database.close()
    restore(home.url, file)
    database = Database(home.url)
    assert runs.count(database) == 1
    assert runs.get(database, kept).id == kept
    database.close()
    assert revision_at(home.url) == newest_revision()


def test_a_back_up_of_a_newer_version_is_refused_and_changes_nothing(home: ServiceSettings, tmp_path: Path) -> None:
    file = tmp_path / "copy.sqlite"
    back_up(home.url, file)
    with closing(sqlite3.connect(file)) as copy:
        copy.execute("UPDATE alembic_version SET version_num = '9999'")
        copy.commit()
    database = Database(home.url)
    kept = runs.add_run(database)
    database.close()
    with pytest.raises(DataError, match=r"was made by a newer version of gxpo: its schema is 9999"):
        restore(home.url, file)
    database = Database(home.url)
    assert runs.get(database, kept).id == kept
    database.close()


def test_what_is_no_back_up_is_refused_and_changes_nothing(home: ServiceSettings, tmp_path: Path) -> None:
    bad = tmp_path / "bad.sqlite"
    for content in (b"", b"no database" * 1000):
        bad.write_bytes(content)
        with pytest.raises(DataError, match=r"bad\.sqlite"):
            restore(home.url, bad)
    with pytest.raises(DataError):
        restore(home.url, tmp_path / "absent.sqlite")
    with pytest.raises(ConfigError, match="no database"):
        back_up(f"sqlite:///{tmp_path / 'none.sqlite'}", bad)
    with pytest.raises(ConfigError, match="pg_dump"):
        back_up("postgresql+psycopg://gxpo@localhost/gxpo", bad)
    assert Path(home.url.removeprefix("sqlite:///")).stat().st_size > 0
