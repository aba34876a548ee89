"""Where a home's Ray lies and who may read its token; ports."""

from __future__ import annotations

import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from gxpo_services.local import ray_head
from gxpo_services.local.ray_head import RayHead, free_port
from gxpo_trainer.errors import ConfigError


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a long path, whose Ray therefore lies below the temporary folder."""
    monkeypatch.setattr(ray_head.tempfile, "gettempdir", lambda: str(tmp_path))
    made = tmp_path / ("long" * 20)
    made.mkdir()
    return made


def test_the_token_is_made_once_for_its_owner_and_the_head_is_on_loopback_without_it(home: Path) -> None:
    first, second = RayHead(home), RayHead(home)
    file = home / "ray-token"
    token = file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(token) == 64
    assert second.env == first.env == {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(file)}
    child = first.child()
    assert token not in " ".join([*child.command, *child.env.values()])
    assert {"--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1"} <= {*child.command}


def test_a_long_home_gets_a_short_folder_that_is_its_owner_s_alone(home: Path, tmp_path: Path) -> None:
    folder = RayHead(home).folder
    assert folder.parent.parent == tmp_path
    assert folder.parent.name.startswith("gxpo-ray-")
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    assert RayHead(home).folder == folder


def test_a_folder_that_others_made_or_may_write_is_refused(home: Path, tmp_path: Path) -> None:
    outer = RayHead(home).folder.parent
    outer.chmod(0o777)
    with pytest.raises(ConfigError, match="not a private folder"):
        RayHead(home)
    (outer / "r").rmdir()
    outer.rmdir()
    outer.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="not a private folder"):
        RayHead(home)


def test_what_earlier_heads_left_is_removed_and_links_are_not_followed(home: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    (precious / "inner").mkdir(parents=True)
    head = RayHead(home)
    (head.folder / "session_1").mkdir()
    (head.folder / "session_latest").symlink_to(precious)
    head.child()
    assert list(head.folder.iterdir()) == []
    assert (precious / "inner").exists()


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield int(listener.getsockname()[1])


def test_a_port_that_is_taken_is_passed_over(taken: int) -> None:
    assert free_port(taken) != taken
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", free_port()))


def test_no_free_port_is_an_error(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gxpo_services.local.ray_head._TRIES", 1)
    with pytest.raises(ConfigError, match=f"no free port from {taken} on"):
        free_port(taken)
