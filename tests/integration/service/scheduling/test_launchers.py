"""What the scheduler relies on, of Ray (a real head) and of the double that runs plain processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import tenacity
from support.chaos_scheduler import ProcessLauncher
from support.processes import is_alive
from support.ray_clusters import RayHead
from support.service_processes import until

from gxpo_services.scheduling.launcher import (
    Job,
    JobRefused,
    JobStatus,
    Launcher,
    LauncherUnavailable,
    RayLauncher,
)


@pytest.fixture(scope="module")
def ray_head() -> Iterator[RayHead]:
    with closing(RayHead()) as head:
        head.start()
        yield head


class PatientRay(RayLauncher):
    """Retries as the scheduler does: on a busy machine a request to the head may time out."""

    @tenacity.retry(
        retry=tenacity.retry_if_exception_type(LauncherUnavailable),
        stop=tenacity.stop_after_delay(90.0),
        wait=tenacity.wait_fixed(1.0),
        reraise=True,
    )
    def _ask(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        return super()._ask(method, path, **arguments)


@pytest.fixture
def ray_launcher(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> RayLauncher:
    head: RayHead = request.getfixturevalue("ray_head")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", head.environment["RAY_AUTH_TOKEN_PATH"])
    return PatientRay(head.address)


@pytest.fixture(params=["process", pytest.param("ray", marks=pytest.mark.engine)])
def launcher(request: pytest.FixtureRequest, tmp_path: Path) -> Launcher:
    if request.param == "process":
        return ProcessLauncher(tmp_path / "jobs", kill_after_s=1.0)
    launcher: RayLauncher = request.getfixturevalue("ray_launcher")
    return launcher


@pytest.fixture
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Job]:
    """A job of some Python in a folder whose name wants quoting."""
    folder = tmp_path / "it's a $HOME"
    folder.mkdir()

    def make(code: str, number: int = 1) -> Job:
        script = folder / f"job{number}.py"
        script.write_text(code)
        name = f"{tmp_path.name}-{number}"
        command = (sys.executable, str(script), str(folder), "a;b")
        return Job(name, command, folder / "train.log", {"RAY_JOB_STOP_WAIT_TIME_S": "1"})

    return make


def ended(launcher: Launcher, job_id: str) -> JobStatus:
    until(lambda: not launcher.status(job_id).is_alive, f"the end of {job_id}")
    return launcher.status(job_id)


def await_running(launcher: Launcher, job_id: str) -> None:
    until(lambda: launcher.status(job_id).state == "running", f"the start of {job_id}")


def test_a_job_runs_once_however_often_it_is_submitted(launcher: Launcher, job: Callable[..., Job]) -> None:
    made = job("import sys; print(sys.argv[1:], flush=True); sys.stderr.write('done\\n')")
    assert launcher.status(made.id) == JobStatus("unknown")
    launcher.submit(made)
    launcher.submit(made)
    assert ended(launcher, made.id).state == "succeeded"
    launcher.submit(made)
    assert ended(launcher, made.id).state == "succeeded"
    launcher.delete(made.id)
    launcher.delete(made.id)
    assert made.id not in launcher.statuses(made.log.parent.parent)
    assert made.log.read_text() == f"{[str(made.log.parent), 'a;b']}\ndone\n"


def test_a_failed_job_is_reported(launcher: Launcher, job: Callable[..., Job]) -> None:
    made = job("raise SystemExit(3)")
    launcher.submit(made)
    status = ended(launcher, made.id)
    assert (status.state, status.out_of_memory) == ("failed", False)
    assert "exit code 3" in status.message


@pytest.mark.parametrize("ignores", [False, True])
def test_a_stopped_job_ends_even_if_it_ignores_it(launcher: Launcher, job: Callable[..., Job], ignores: bool) -> None:
    made = job(
        "import os, pathlib, signal, sys, time\n"
        f"if {ignores}: signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "(pathlib.Path(sys.argv[1]) / 'pid').write_text(f'{os.getpid()}\\n')\n"
        "time.sleep(600)\n"
    )
    launcher.submit(made)
    pid = made.log.parent / "pid"
    until(lambda: pid.exists() and pid.read_text().endswith("\n"), "the id of its process")
    await_running(launcher, made.id)
    assert launcher.statuses(made.log.parent.parent)[made.id].state == "running"
    until(lambda: not launcher.status(made.id).is_alive, "its end", lambda: launcher.stop(made.id))
    assert not is_alive(int(pid.read_text()))
    launcher.stop(made.id)
    assert not launcher.statuses(made.log.parent.parent)[made.id].is_alive


@pytest.mark.engine
def test_ray_tells_who_runs_what_and_keeps_the_jobs_of_two_services_apart(
    ray_launcher: RayLauncher, job: Callable[..., Job], tmp_path: Path
) -> None:
    assert ray_launcher.resources() == (len(os.sched_getaffinity(0)), 0.0)
    made = replace(job("import time; time.sleep(600)"), owner="ada")
    ray_launcher.submit(made)
    await_running(ray_launcher, made.id)
    assert ray_launcher.statuses(tmp_path) == {made.id: ray_launcher.status(made.id)}
    assert ray_launcher.statuses(tmp_path / "another") == {}
    metadata = ray_launcher._ask("GET", f"/api/jobs/{made.id}").json()["metadata"]
    assert metadata["gxpo_owner"] == "ada"
    assert f"{metadata['gxpo_run']}-{metadata['gxpo_launch']}" == made.id
    ray_launcher.stop(made.id)
    ended(ray_launcher, made.id)


@pytest.mark.engine
def test_ray_without_its_token_is_not_there(ray_head: RayHead, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    with pytest.raises(LauncherUnavailable, match="RAY_AUTH_TOKEN"):
        RayLauncher(ray_head.address).status("any")
    token = Path(ray_head.environment["RAY_AUTH_TOKEN_PATH"]).read_text()
    monkeypatch.setenv("RAY_AUTH_TOKEN", token.strip())
    assert RayLauncher(ray_head.address).status("any") == JobStatus("unknown")


def answering(status: int, **content: Any) -> RayLauncher:
    """Of a head whose every answer is this."""
    return RayLauncher("http://ray", transport=httpx.MockTransport(lambda _: httpx.Response(status, **content)))


def test_neither_silence_nor_the_answer_of_a_starting_head_is_a_status() -> None:
    answers = ((500, "traceback\nGCS is away"), (200, "not json"), (200, "[]"), (503, ""))
    launchers = [RayLauncher("http://127.0.0.1:1"), *(answering(status, text=text) for status, text in answers)]
    for launcher in launchers:
        for ask in (lambda launcher=launcher: launcher.status("a"), launcher.resources):
            with pytest.raises(LauncherUnavailable):
                ask()
    with pytest.raises(LauncherUnavailable, match="does not answer"):
        launchers[0].stop("a")


def test_the_reason_of_a_refusal_is_the_last_line_in_words() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        known = request.method == "GET"
        return httpx.Response(404 if known else 500, text="" if known else "Traceback\nno ASCII path\n.\n\n")

    launcher = RayLauncher("http://ray", transport=httpx.MockTransport(answer))
    with pytest.raises(JobRefused, match=r"rejected job a-1: 500 no ASCII path$"):
        launcher.submit(Job("a-1", ("true",), Path("/x/a/train.log")))


def test_a_job_that_is_deleted_or_unknown_is_gone_and_one_that_runs_stays() -> None:
    asked: list[tuple[str, str]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append((request.method, request.url.path))
        return httpx.Response(statuses.pop(0), text="non-terminal state RUNNING")

    statuses = [200, 404, 500]
    launcher = RayLauncher("http://ray", transport=httpx.MockTransport(answer))
    launcher.delete("a-1")
    launcher.delete("a-1")
    with pytest.raises(JobRefused, match=r"did not delete job a-1: 500 non-terminal state RUNNING"):
        launcher.delete("a-1")
    assert asked == [("DELETE", "/api/jobs/a-1")] * 3


def test_only_the_jobs_of_this_service_are_read() -> None:
    jobs = [
        {"submission_id": "a-1", "status": "RUNNING", "message": "fine", "metadata": {"gxpo_artifacts": "/x"}},
        {"submission_id": "c-1", "status": "FAILED", "message": None, "metadata": {"gxpo_artifacts": "/other"}},
        {"submission_id": None, "status": "RUNNING", "message": None, "metadata": None},
    ]

    assert answering(200, json=jobs).statuses(Path("/x")) == {"a-1": JobStatus("running", "fine")}
    for body in ({"a": 1}, [1], [{"metadata": {"gxpo_artifacts": "/x"}}]):
        with pytest.raises(LauncherUnavailable, match="invalid response"):
            answering(200, json=body).statuses(Path("/x"))
