"""Settings of the service: bounds, and what follows from them."""

from __future__ import annotations

import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from gxpo_services.local import ray_head
from gxpo_services.local.ray_head import RayHead, free_port
from gxpo_services.scheduling.launcher import _authorization
from gxpo_services.settings import ServiceSettings, make_home, read_settings
from gxpo_trainer.config.base import STOP_WAIT_S
from gxpo_trainer.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "loopback", "url"),
    [
        ({}, True, "http://127.0.0.1:8000"),
        ({"host": "::1", "port": 81}, True, "http://[::1]:81"),
        ({"host": "localhost"}, True, "http://localhost:8000"),
        ({"host": "0.0.0.0"}, False, "http://0.0.0.0:8000"),
        ({"host": "0.0.0.0", "public_url": "https://gxpo.example"}, False, "https://gxpo.example"),
        ({"host": "0.0.0.0", "public_url": "https://gxpo.example/api/"}, False, "https://gxpo.example/api"),
    ],
)
def test_the_address_of_the_api(given: dict[str, Any], loopback: bool, url: str) -> None:
    settings = ServiceSettings(**given)
    assert (settings.is_loopback, settings.api_url) == (loopback, url)


def test_a_run_s_link_leads_to_the_dashboard_if_its_address_is_known() -> None:
    assert ServiceSettings(public_url="http://api:8000").link_to("r1") == "http://api:8000/api/v1/runs/r1"
    known = ServiceSettings(public_url="http://api:8000", dashboard_url="https://gxpo.example/")
    assert known.link_to("r1") == "https://gxpo.example/?view=run&run=r1"
    assert known.api_url == "http://api:8000", "trainers go on to use it"
    hook = "https://chat.example/hook/"
    assert ServiceSettings(webhooks=(hook,)).webhooks == (hook,), "another server may tell the two addresses apart"
    with pytest.raises(ConfigError, match=r"GXPO_DASHBOARD_URL: .*'gxpo\.example'"):
        read_settings(dashboard_url="gxpo.example")


def test_an_empty_variable_means_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PORT", "WEBHOOKS", "QUOTA_GPUS", "GPU", "ALLOW_REMOTE_CODE"):
        monkeypatch.setenv(f"GXPO_{name}", "")
    settings = read_settings()
    assert (settings.port, settings.webhooks, settings.quota_gpus, settings.gpu) == (8000, (), None, None)
    assert settings.allow_remote_code is False


@pytest.mark.parametrize("text", ["/models", "/models:/more", '"/models"', "[/models]", "7", "{}"])
def test_a_list_that_is_not_json_is_named_with_the_other_faults(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    for name, value in {"MODEL_ROOTS": text, "WEBHOOKS": "https://chat.example.org", "PORT": "0"}.items():
        monkeypatch.setenv(f"GXPO_{name}", value)
    with pytest.raises(ConfigError) as caught:
        read_settings()
    lines = str(caught.value).splitlines()
    assert sorted(line.split(": ")[0] for line in lines[1:]) == ["  GXPO_MODEL_ROOTS", "  GXPO_PORT", "  GXPO_WEBHOOKS"]
    assert f'  GXPO_MODEL_ROOTS: {text!r} must be a JSON list such as ["a", "b"]' in lines
    assert """  GXPO_WEBHOOKS: 'https://chat.example.org' must be a JSON list such as ["a", "b"]""" in lines


def test_lists_are_read_from_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GXPO_MODEL_ROOTS", f'["{tmp_path}"]')
    monkeypatch.setenv("GXPO_WEBHOOK_ALERTS", '["failed", "diverged"]')
    monkeypatch.setenv("GXPO_WEBHOOKS", "[]")
    settings = read_settings()
    assert (settings.model_roots, settings.webhook_alerts) == ((tmp_path.resolve(),), ("failed", "diverged"))
    assert settings.webhooks == ()


@pytest.mark.parametrize("kind", ["plugins", "rewards", "environments", "reward_urls", "environment_urls"])
def test_an_entry_that_the_trainer_would_divide_at_its_comma_is_refused(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"GXPO_ALLOWED_{kind.upper()}", '["a:B", "http://host:1/x,http://host:2/y"]')
    with pytest.raises(
        ConfigError, match=rf"GXPO_ALLOWED_{kind.upper()}: 'http://host:1/x,http://host:2/y' has a comm"
    ):
        read_settings()


def test_the_database_is_sqlite_in_the_home_unless_a_url_is_given(tmp_path: Path) -> None:
    assert ServiceSettings(home=tmp_path).url == f"sqlite:///{tmp_path.resolve()}/gxpo.sqlite"
    file = tmp_path / "password"
    file.write_text("s3cret/word\n")
    url = "postgresql+psycopg://gxpo@db/gxpo"
    assert ServiceSettings(database_url=url).url == url
    with_password = ServiceSettings(database_url=url, database_password_file=file).url
    assert with_password == "postgresql+psycopg://gxpo:s3cret%2Fword@db/gxpo"


def test_the_home_is_private_and_may_exist(tmp_path: Path) -> None:
    settings = ServiceSettings(home=tmp_path / "new" / "home")
    make_home(settings)
    make_home(settings)
    assert stat.S_IMODE(settings.home.stat().st_mode) == 0o700
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot create the home"):
        make_home(ServiceSettings(home=tmp_path / "file" / "home"))


def test_a_folder_that_others_use_does_not_become_the_home(tmp_path: Path) -> None:
    home, file = tmp_path / "shared", tmp_path / "shared" / "notes.txt"
    home.mkdir(mode=0o755)
    file.write_text("")
    with pytest.raises(ConfigError, match=r"GXPO_HOME = .*shared .* holds other files; .* `chmod 700 .*shared`"):
        make_home(ServiceSettings(home=home))
    assert stat.S_IMODE(home.stat().st_mode) == 0o755
    file.rename(home / "artifacts")
    for _ in range(2):  # only an API was here, and an earlier home
        make_home(ServiceSettings(home=home))
        assert stat.S_IMODE(home.stat().st_mode) == 0o700
        home.chmod(0o755)
        (home / "token").touch()


@pytest.mark.parametrize(
    "url",
    ["mysql://ada:s3cret@db/x", "postgresql+asyncpg://ada:s3cret@db/x", "postgres://ada:s3cret@db/x", "db.sqlite"],
)
def test_a_database_of_another_kind_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GXPO_DATABASE_URL", url)
    with pytest.raises(ConfigError) as caught:
        read_settings()
    told = "must begin with sqlite:/// or postgresql+psycopg://"
    assert str(caught.value).splitlines()[1:] == [f"  GXPO_DATABASE_URL: {told}"]


def test_faults_of_settings_are_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GXPO_PORT", "70000")
    monkeypatch.setenv("GXPO_LEASE_S", "soon")
    with pytest.raises(ConfigError) as caught:
        read_settings()
    told = ["  GXPO_PORT: must be at most 65535", "  GXPO_LEASE_S: must be a number"]
    assert str(caught.value).splitlines()[1:] == told


@pytest.mark.parametrize(
    ("given", "faults"),
    [
        ({"tick_s": 30}, ["  GXPO_LEASE_S: is 30 and must be at least 3 times GXPO_TICK_S = 30"]),
        ({"tick_s": 31, "lease_s": 100}, ["  GXPO_HEARTBEAT_S: is 120 and must be at least 4 times GXPO_TICK_S = 31"]),
        ({"tick_s": 30, "lease_s": 90}, []),
    ],
)
def test_rounds_are_a_small_part_of_the_time_outs(given: dict[str, float], faults: list[str]) -> None:
    """Between rounds that are further apart, time would not count."""
    try:
        read_settings(**given)
        found = []
    except ConfigError as error:
        found = str(error).splitlines()[1:]
    assert found == faults


# Where a home's Ray lies and who may read its token; ports.


@pytest.fixture
def long_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a long path, whose Ray therefore lies below the temporary folder."""
    monkeypatch.setattr(ray_head.tempfile, "gettempdir", lambda: str(tmp_path))
    made = tmp_path / ("long" * 20)
    made.mkdir()
    return made


def test_the_token_is_made_once_for_its_owner_and_the_head_is_on_loopback_without_it(long_home: Path) -> None:
    first, second = RayHead(long_home), RayHead(long_home)
    file = long_home / "ray-token"
    token = file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(token) == 64
    env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "", "RAY_AUTH_TOKEN_PATH": str(file)}
    assert second.env == first.env == env
    of_another_cluster = {"RAY_AUTH_TOKEN": "other"}
    assert _authorization(of_another_cluster | first.env) == {"Authorization": f"Bearer {token}"}
    child = first.child(STOP_WAIT_S)
    assert token not in " ".join([*child.command, *child.env.values()])
    assert {"--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1"} <= {*child.command}


def test_a_long_home_gets_a_short_folder_and_one_that_others_made_or_may_write_is_refused(
    long_home: Path, tmp_path: Path
) -> None:
    outer = RayHead(long_home).folder.parent
    assert outer.parent == tmp_path
    assert outer.name.startswith("gxpo-ray-")
    assert stat.S_IMODE(outer.stat().st_mode) == 0o700
    assert RayHead(long_home).folder.parent == outer
    outer.chmod(0o777)
    with pytest.raises(ConfigError, match="not a private folder"):
        RayHead(long_home)
    (outer / "r").rmdir()
    outer.rmdir()
    outer.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="not a private folder"):
        RayHead(long_home)


def test_a_home_that_ray_cannot_encode_gets_a_folder_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_head, "_LONGEST_FOLDER", 1000)
    monkeypatch.setattr(ray_head.tempfile, "gettempdir", lambda: str(tmp_path))
    for name, outer in (("cafe", tmp_path / "cafe"), ("café", tmp_path)):
        (tmp_path / name).mkdir()
        assert RayHead(tmp_path / name).folder.parent.parent == outer


def test_what_earlier_heads_left_is_removed_and_links_are_not_followed(long_home: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    (precious / "inner").mkdir(parents=True)
    head = RayHead(long_home)
    (head.folder / "session_1").mkdir()
    (head.folder / "session_latest").symlink_to(precious)
    head.child(STOP_WAIT_S)
    assert list(head.folder.iterdir()) == []
    assert (precious / "inner").exists()


def test_no_free_port_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gxpo_services.local.ray_head._TRIES", 1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"no free port from {taken} on"):
            free_port(taken)
