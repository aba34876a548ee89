"""Settings of the service: bounds, and what follows from them."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

from gxpo_services.settings import ServiceSettings, make_home, read_settings
from gxpo_trainer.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "accepted", "refused"),
    [
        ("port", (1, 65535), (0, 65536)),
        ("quota_cpus", (0.5,), (0,)),
        ("quota_gpus", (0,), (-1,)),
        ("max_recoveries", (0,), (-1,)),
    ],
)
def test_bounds_are_named_by_their_variable(name: str, accepted: tuple[float, ...], refused: tuple[float, ...]) -> None:
    for value in accepted:
        assert getattr(read_settings(**{name: value}), name) == value
    for value in refused:
        with pytest.raises(ConfigError, match=f"GXPO_{name.upper()}: "):
            read_settings(**{name: value})


def test_what_is_not_given_is_left_to_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GXPO_PORT", "9001")
    assert read_settings(port=None).port == 9001
    assert read_settings(port=9002).port == 9002


@pytest.mark.parametrize(
    ("given", "loopback", "url"),
    [
        ({}, True, "http://127.0.0.1:8000"),
        ({"host": "::1", "port": 81}, True, "http://[::1]:81"),
        ({"host": "localhost"}, True, "http://localhost:8000"),
        ({"host": "0.0.0.0"}, False, "http://0.0.0.0:8000"),
        ({"host": "0.0.0.0", "public_url": "https://gxpo.example"}, False, "https://gxpo.example"),
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
    with pytest.raises(ConfigError, match=r"GXPO_DASHBOARD_URL: .*'gxpo\.example'"):
        read_settings(dashboard_url="gxpo.example")


def test_an_empty_variable_means_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PORT", "WEBHOOKS", "QUOTA_GPUS", "GPU", "ALLOW_REMOTE_CODE"):
        monkeypatch.setenv(f"GXPO_{name}", "")
    settings = read_settings()
    assert (settings.port, settings.webhooks, settings.quota_gpus, settings.gpu) == (8000, (), None, None)
    assert settings.allow_remote_code is False


def test_the_database_is_sqlite_in_the_home_unless_a_url_is_given(tmp_path: Path) -> None:
    assert ServiceSettings(home=tmp_path).url == f"sqlite:///{tmp_path.resolve()}/gxpo.sqlite"
    file = tmp_path / "password"
    file.write_text("s3cret/word\n")
    url = "postgresql+psycopg://gxpo@db/gxpo"
    assert ServiceSettings(database_url=url).url == url
    with_password = ServiceSettings(database_url=url, database_password_file=file).url
    assert with_password == "postgresql+psycopg://gxpo:s3cret%2Fword@db/gxpo"


def test_run_folders_are_in_the_home_unless_told_otherwise(tmp_path: Path) -> None:
    assert ServiceSettings(home=tmp_path / "h").artifacts == (tmp_path / "h" / "artifacts").resolve()
    assert ServiceSettings(home=tmp_path / "h", artifact_root=tmp_path / "a").artifacts == (tmp_path / "a").resolve()


def test_the_home_is_private_and_may_exist(tmp_path: Path) -> None:
    settings = ServiceSettings(home=tmp_path / "new" / "home")
    make_home(settings)
    make_home(settings)
    assert stat.S_IMODE(settings.home.stat().st_mode) == 0o700
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot create the home"):
        make_home(ServiceSettings(home=tmp_path / "file" / "home"))
