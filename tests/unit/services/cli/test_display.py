"""What the command line prints of runs: lines, bars, tables, checks; nothing in them steers a terminal."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.recording_server import RecordingServer, Request

from gxpo_client.client import Client, connect, is_http, is_loopback, is_up
from gxpo_client.errors import NotFound
from gxpo_services.cli.common import connect as command_line_client, one_line, plain
from gxpo_services.cli.submit import _check
from gxpo_services.cli.watch import Bars, describe
from gxpo_services.local.demo import free_folder
from gxpo_services.scheduling.launcher import JobStatus, RayLauncher
from gxpo_services.settings import read_settings
from gxpo_trainer.errors import ConfigError


def run(**changes: Any) -> Any:
    progress: dict[str, Any] = {
        "fraction": 0.4,
        "steps": 12,
        "step_budget": 30,
        "seconds_left": 192.0,
        "queue_position": None,
    }
    progress |= {"backward_passes": 36.0, "backward_passes_budget": None}
    base: dict[str, Any] = {
        "id": "r1",
        "name": "demo",
        "state": "running",
        "phase": "training",
        "reward": 0.3125,
        "score": 0.31,
    }
    base |= {"reason": None, "silent_s": None, "recoveries": 0}
    return base | changes | {"progress": progress | changes.get("progress", {})}


def idle(state: str, phase: str | None = None, reason: str | None = None, queue_position: int | None = None) -> Any:
    """Before its first step."""
    progress = {"steps": 0, "backward_passes": 0, "queue_position": queue_position}
    return run(state=state, phase=phase, reason=reason, reward=None, score=None, progress=progress)


@pytest.mark.parametrize(
    ("view", "line"),
    [
        (run(), "running  step 12/30  reward 0.312  passes 36  accuracy 31.0%  left 3 min 12 s"),
        (
            run(progress={"backward_passes_budget": 90, "seconds_left": None}, recoveries=1),
            "running  step 12/30  reward 0.312  passes 36/90  accuracy 31.0%  recovered 1 times",
        ),
        (
            run(silent_s=34.2, reward=None, score=None, progress={"seconds_left": None}),
            "running (no heartbeat for 34 s)  step 12/30  passes 36",
        ),
        (run(reward="NaN", score=None), "running  step 12/30  reward NaN  passes 36  left 3 min 12 s"),
        (idle("running", phase="waiting for 3 GPUs"), "running (waiting for 3 GPUs)  step 0/30  left 3 min 12 s"),
        (idle("queued", queue_position=2), "queued #2"),
        (idle("failed", reason="disk_full"), "failed (disk_full)"),
    ],
)
def test_a_run_is_one_line_of_what_is_known(view: Any, line: str) -> None:
    assert describe(view) == line


def test_a_pipe_gets_a_line_a_change(capsys: pytest.CaptureFixture[str]) -> None:
    with Bars() as bars:
        bars.update(run())
        bars.update(run(reward=0.9))
        bars.message("service away")
        bars.update(run(progress={"steps": 13}))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("demo: running  step 12/30")
    assert lines[1] == "service away"
    assert lines[2].startswith("demo: running  step 13/30")


def test_a_terminal_gets_one_bar_a_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with Bars() as bars:
        bars.update(run())
        bars.update(run(id="r2", name="other"))
        bars.update(run(state="succeeded", progress={"fraction": 0.99}))
    written = capsys.readouterr().err
    assert "other" in written
    assert "succeeded" in written.rpartition("\x1b[2K")[2]


def test_text_of_runs_loses_what_steers_terminals() -> None:
    assert plain("a\x1b[31mb\x07c\r\nd\te") == "ab�c\nd\te"
    assert plain("\x9b2J") == "�2J"
    assert one_line(" a\n b  c ", 4) == "a b…"


def test_a_demo_takes_a_folder_that_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = tmp_path / "demo"
    assert free_folder(wanted) == wanted
    wanted.mkdir()
    assert free_folder(wanted) == wanted
    (wanted / "gxpo.sqlite").touch()
    (tmp_path / "demo-2").touch()
    assert free_folder(wanted) == tmp_path / "demo-3"
    monkeypatch.chdir(wanted)
    assert free_folder(Path()) == tmp_path / "demo-3"
    assert free_folder(Path("/")) == Path("/-2")


def test_a_check_prints_the_cost_and_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    cost = {"steps": 4, "backward_passes": 12, "per_step_words": "GXPO"}
    plan = {"device": "l4-24", "advice": "set learner.zero_stage = 3"}
    client: Any = SimpleNamespace(post=lambda *_, **__: {"valid": True, "cost": cost, "equal_runs": [], "plan": plan})
    assert _check(Namespace(json=False), client, {}) == 0
    lines = ["valid; 4 steps, at most 12 backward passes (GXPO)", "does not fit on l4-24: set learner.zero_stage = 3"]
    assert capsys.readouterr().out.splitlines() == lines


# Which addresses are this machine's own, which can be asked, and that proxies are left out of it.


@pytest.mark.parametrize(
    ("url", "loopback"),
    [
        *((f"http://{host}", True) for host in ("127.0.0.1:8000", "127.8.9.1", "localhost:1", "[::1]:8")),
        *((f"https://{host}", False) for host in ("192.0.2.1", "127.0.0.1.example", "localhost.example")),
    ],
)
def test_loopback(url: str, loopback: bool) -> None:
    assert is_http(url)
    assert is_loopback(url) is loopback


@pytest.mark.parametrize(
    "url", ["", "auto", "127.0.0.1:8265", "ray://h:1", "http://", "http://h:x", "http://h:70000", "file:///a"]
)
def test_what_cannot_be_asked(url: str) -> None:
    assert not is_http(url)
    if url:
        with pytest.raises(ConfigError, match="must look like http"):
            command_line_client(url)
    for name, value in {"ray_address": url, "public_url": url, "webhooks": (url,)}.items():
        with pytest.raises(ConfigError, match=rf"GXPO_{name.upper()}: .*must look like http://host:port"):
            read_settings(**{name: value})


def test_loopback_is_asked_itself_and_other_machines_through_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    def respond(request: Request) -> int:
        return 200 if request.path.endswith("/health/ready") else 404

    with RecordingServer(respond) as service, RecordingServer(respond) as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        for url in (service.url, "http://gxpo.invalid:8000"):
            # The scheduler of Ray and of the API, and the command line of the service.
            assert RayLauncher(url).status("j1") == JobStatus("unknown")
            assert is_up(f"{url}/health/ready", 2.0)
            with Client(connect(url), None) as client, pytest.raises(NotFound):
                client.run("r1")
    paths = ["/api/jobs/j1", "/health/ready", "/api/v1/runs/r1"]
    assert [request.path for request in service.requests] == paths
    assert [request.path for request in proxy.requests] == [f"http://gxpo.invalid:8000{path}" for path in paths]


def test_a_token_file_that_is_named_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GXPO_TOKEN", "other")
    with pytest.raises(ConfigError, match="check --token-file"):
        command_line_client("http://127.0.0.1:8000", tmp_path / "nothing")
