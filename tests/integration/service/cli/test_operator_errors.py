"""Commands that work on the database itself: what is wrong is one message and exit code 2, never a traceback."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from support.command_line import Gxpo

COMMANDS = [("migrate",), ("migrate", "--check"), ("scheduler",), ("token", "create", "ada", "--database")]


@pytest.fixture
def gxpo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Gxpo:
    monkeypatch.setenv("GXPO_HOME", str(tmp_path / "home"))
    return Gxpo(capsys)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_database_or_its_password_file_that_cannot_be_used(
    command: tuple[str, ...], gxpo: Gxpo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:  # a port that is taken and does not listen
        taken.bind(("127.0.0.1", 0))
        url = f"postgresql+psycopg://gxpo:s3cret@127.0.0.1:{taken.getsockname()[1]}/gxpo"
        monkeypatch.setenv("GXPO_DATABASE_URL", url)
        message = gxpo.error(2, *command)
    assert message.startswith("gxpo: cannot use the database (connection failed: ")
    assert message.endswith("; check GXPO_DATABASE_URL and its server\n")
    assert "s3cret" not in message
    for file, reason in ((tmp_path / "none", "No such file or directory"), (tmp_path, "Is a directory")):
        monkeypatch.setenv("GXPO_DATABASE_PASSWORD_FILE", str(file))
        expected = f"cannot read the database password from {file} ({reason}); check GXPO_DATABASE_PASSWORD_FILE"
        assert gxpo.error(2, *command) == f"gxpo: {expected}\n"
