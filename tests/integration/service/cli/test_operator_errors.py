"""Commands that work on the database itself: what is wrong is one message and exit code 2, never a traceback."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from gxpo_services.db.database import make_engine
from gxpo_trainer import cli

Message = Callable[..., str]


@pytest.fixture
def message_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Message:
    """What a command prints that cannot use a database, by the database's URL and its words."""
    monkeypatch.setenv("GXPO_HOME", str(tmp_path / "home"))

    def printed(url: str, *words: str) -> str:
        monkeypatch.setenv("GXPO_DATABASE_URL", url)
        assert cli.main(words) == 2
        out, err = capsys.readouterr()
        assert out == ""
        return err

    return printed


@pytest.fixture
def stopped() -> Iterator[str]:
    """URL of a PostgreSQL server that does not run: a port that is taken and does not listen."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"postgresql+psycopg://gxpo:s3cret@127.0.0.1:{taken.getsockname()[1]}/gxpo"


COMMANDS = [("migrate",), ("migrate", "--check"), ("scheduler",), ("token", "create", "ada", "--database")]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_database_or_its_password_file_that_cannot_be_used(
    command: tuple[str, ...], stopped: str, message_of: Message, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = message_of(stopped, *command)
    assert message.startswith("gxpo: cannot use the database (connection failed: ")
    assert message.endswith("; check GXPO_DATABASE_URL and its server\n")
    assert "s3cret" not in message
    for file, reason in ((tmp_path / "none", "No such file or directory"), (tmp_path, "Is a directory")):
        monkeypatch.setenv("GXPO_DATABASE_PASSWORD_FILE", str(file))
        expected = f"cannot read the database password from {file} ({reason}); check GXPO_DATABASE_PASSWORD_FILE"
        assert message_of(stopped, *command) == f"gxpo: {expected}\n"


def test_a_database_of_a_later_version(database_url: str, message_of: Message) -> None:
    engine = make_engine(database_url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()
    message = message_of(database_url, "migrate")
    assert message.startswith("gxpo: cannot migrate the database from revision 9999 to ")
    assert message.endswith("; use the version of gxpo that wrote it\n")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("",), "  name: String should have at least 1 character"),
        (("ada", "--days", "99999"), "  days: Input should be less than or equal to 36500"),
    ],
)
def test_a_token_that_cannot_be_made(words: tuple[str, ...], line: str, database_url: str, message_of: Message) -> None:
    message = message_of(database_url, "token", "create", *words, "--database")
    assert message == f"gxpo: invalid values:\n{line}\n"
