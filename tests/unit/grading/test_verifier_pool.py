"""The pool of killable verifier processes: order, deadlines, kills, memory, hostile answers, its parent's death."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest

from gxpo_trainer.cli import grade_file
from gxpo_trainer.errors import DataError, VerifierFailed
from gxpo_trainer.grading.pool import VerifierPool, WorkerProcess
from gxpo_trainer.types import Verdict

FAULTY_WORKER = """
import os, sys, time
FOLDER = os.path.dirname(__file__)
from gxpo_trainer.grading import engine, pool, verify as grader

plain = grader.verify

def verify(gold, response, options):
    if not response.isdigit():
        exec(response)
        return plain(gold, gold)
    return plain(gold, response)

grader.verify, engine.engine_equal = verify, lambda gold, answer: None
pool.serve(int(sys.argv[3]), int(sys.argv[4]), [])
"""
"""The real worker with a grader that runs an answer that is no number as code."""
HANG = "while True: pass"
HANG_ONCE = f"""
if not os.path.exists(FOLDER + "/asked"):
    open(FOLDER + "/asked", "w").close()
    with open(FOLDER + "/busy", "w") as busy:
        busy.write(str(os.getpid()))
    {HANG}
"""
"""Hangs when it is asked first, after it has told its process id through the named pipe `busy`."""

SHORT_S = 5.0
"""A deadline that some answers are meant to miss; a plain one takes up to a second on a busy machine."""

HOSTILE = {
    "power tower in Python": r"\boxed{9**9**9}",
    "power tower in LaTeX": r"\boxed{10^{10^{10^{10}}}}",
    "nested braces": "{" * 10_000,
    "nested boxes": r"\boxed{" * 10_000 + "6" + "}" * 10_000,
    "one megabyte of digits": "1" * 1_000_000,
    "lone surrogate": "\\boxed{\ud800}",
    "dunder names": r"\boxed{().__class__.__mro__[1].__subclasses__()}",
    "repeated factorials": r"\boxed{100000!!!}",
    "deep fraction": r"\boxed{" + r"\frac{1}{" * 500 + "2" + "}" * 501,
    "dollar signs": "$" * 100_000,
    "many parts": r"\boxed{" + "1," * 1_500 + "1}",
    "huge sum": r"\boxed{\sum_{k=1}^{10^9} k^{-k}}",
    "deep polynomial": r"\boxed{(((((x+1)^{99})^{99})^{99})^{99})^{99}}",
}


@pytest.fixture(scope="module")
def pool() -> Iterator[VerifierPool]:
    with VerifierPool(workers=2, deadline_s=SHORT_S) as shared:
        yield shared


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pools started in this test run the faulty worker; returns its folder."""
    os.mkfifo(tmp_path / "busy")
    (tmp_path / "faulty.py").write_text(FAULTY_WORKER)
    launcher = tmp_path / "python"
    launcher.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path}/faulty.py" "$@"\n')
    launcher.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(launcher))
    return tmp_path


def statuses(verdicts: list[Verdict]) -> list[str]:
    return [verdict.status for verdict in verdicts]


def test_verdicts_come_in_the_order_of_the_answers(pool: VerifierPool) -> None:
    pairs = [(str(i), rf"so \boxed{{{i if i % 3 else i + 1}}}") for i in range(200)]
    verdicts = pool.submit(pairs).result()
    assert statuses(verdicts) == ["correct" if i % 3 else "wrong" for i in range(200)]
    assert [verdict.extracted for verdict in verdicts] == [str(i if i % 3 else i + 1) for i in range(200)]
    assert all(verdict.seconds >= 0 for verdict in verdicts)


@pytest.mark.parametrize("name", list(HOSTILE))
def test_a_hostile_answer_is_not_correct_and_the_next_answer_is_right(pool: VerifierPool, name: str) -> None:
    hostile = pool.submit([(gold, HOSTILE[name]) for gold in ("5", r"\frac{x}{2}")])
    honest = pool.submit([("7", r"\boxed{7}"), (r"\frac{1}{2}", "0.5")])
    assert {*statuses(hostile.result())} <= {"wrong", "unparsed", "timeout", "error"}
    assert statuses(honest.result()) == ["correct", "correct"]
    assert pool.submit([]).result() == []


@pytest.mark.parametrize(
    ("answer", "share", "status", "reward"),
    [("time.sleep(3600)", 0.49, "timeout", None), (HANG, 0.51, "wrong", 0.0)],
)
@pytest.mark.usefixtures("faulty")
def test_a_passed_deadline_is_a_timeout_unless_the_answer_computed_for_half_of_it(
    answer: str, share: float, status: str, reward: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[float] = []
    measure = WorkerProcess.cpu_seconds

    def cpu_seconds(process: WorkerProcess) -> float:
        """A busy machine may give the worker less than half of a core."""
        used.append(measure(process))
        return share * SHORT_S

    monkeypatch.setattr(WorkerProcess, "cpu_seconds", cpu_seconds)
    with VerifierPool(workers=1, deadline_s=SHORT_S) as pool:
        pool.submit([("1", "1")]).result()
        first = pool._processes[0].pid
        verdicts = pool.submit([("1", "1"), ("2", answer), ("3", "3"), ("4", "4")]).result()
        assert statuses(verdicts) == ["correct", status, "correct", "correct"]
        assert verdicts[1].reward == reward
        assert verdicts[1].evades == (status == "wrong")
        assert ("CPU time" if status == "wrong" else "deadline_s") in verdicts[1].detail
        assert not psutil.pid_exists(first)
    assert (used[0] > 0.1 * SHORT_S) == (answer == HANG)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("os.kill(os.getpid(), 9)", "crashed its worker process 2 times"),
        ("bytearray(1 << 40)", "memory_mb"),
        ("raise KeyError", "KeyError"),
    ],
)
@pytest.mark.usefixtures("faulty")
def test_an_answer_that_breaks_its_worker_is_an_error_and_the_rest_is_unharmed(answer: str, reason: str) -> None:
    with VerifierPool(workers=2, deadline_s=60.0, memory_mb=1024) as pool:
        verdicts = pool.submit([(str(i), answer if i == 5 else str(i)) for i in range(40)]).result()
    assert statuses(verdicts) == ["error" if i == 5 else "correct" for i in range(40)]
    assert verdicts[5].reward is None
    assert reason in verdicts[5].detail


def test_a_worker_killed_from_outside_in_mid_answer_is_replaced_and_its_answers_are_asked_again(faulty: Path) -> None:
    with VerifierPool(workers=1, deadline_s=600.0) as pool:
        future = pool.submit([("1", "1"), ("2", HANG_ONCE), *((str(i), str(i)) for i in range(3, 200))])
        pid = int((faulty / "busy").read_text())
        assert [process.pid for process in pool._processes] == [pid]
        os.kill(pid, signal.SIGKILL)
        assert statuses(future.result()) == ["correct"] * 199
        assert pool._processes[0].pid != pid


def test_what_an_answer_starts_reads_no_message_and_ends_with_its_worker(faulty: Path) -> None:
    reads = "import subprocess; subprocess.run('cat', check=True)"
    stays = f"""import subprocess
subprocess.Popen("sleep 60; echo stayed", shell=True, stdout=open(FOLDER + "/busy", "w"))
{HANG}"""
    with VerifierPool(workers=1, deadline_s=SHORT_S) as pool:
        future = pool.submit([("1", stays), ("1", reads)])
        assert (faulty / "busy").read_text() == "", "both ends are closed when the process has been killed"
        assert statuses(future.result())[1] == "correct"


def test_memory_that_an_answer_used_up_costs_the_next_one_no_try(faulty: Path) -> None:
    dies_once = """
if not os.path.exists(FOLDER + "/died"):
    open(FOLDER + "/died", "w").close()
    os.kill(os.getpid(), 9)
"""
    with VerifierPool(workers=1, deadline_s=60.0, memory_mb=1024) as pool:
        verdicts = pool.submit([("1", "bytearray(1 << 40)"), ("2", dies_once)]).result()
    assert statuses(verdicts) == ["error", "correct"]
    assert (faulty / "died").exists()


@pytest.mark.parametrize("failures", [59, 60])
def test_a_machine_without_a_free_process_is_asked_again(failures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    start, errors = subprocess.Popen, [BlockingIOError(11, "Resource temporarily unavailable")] * failures

    def popen(*arguments: Any, **named: Any) -> Any:
        if errors:
            raise errors.pop()
        return start(*arguments, **named)

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr("gxpo_trainer.grading.pool.SCARCE_WAIT_S", 0.0)
    expected = nullcontext() if failures < 60 else pytest.raises(VerifierFailed, match=r"temporarily unavailable")
    with VerifierPool(workers=1, deadline_s=60.0) as pool, expected:
        assert statuses(pool.submit([("1", "1")]).result()) == ["correct"]
    assert errors == []


def test_workers_that_cannot_start_raise_instead_of_hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with VerifierPool(workers=1) as broken, pytest.raises(VerifierFailed, match="memory_mb"):
        broken.submit([("1", "1")]).result()


@pytest.mark.usefixtures("faulty")
def test_closing_fails_open_answers_and_kills_the_workers() -> None:
    closing = VerifierPool(workers=1, deadline_s=60.0)
    closing.submit([("1", "1")]).result()
    pid = closing._processes[0].pid
    future = closing.submit([("1", HANG), ("2", "2")])
    closing.close()
    closing.close()
    assert not psutil.pid_exists(pid)
    with pytest.raises(RuntimeError, match="closed"):
        future.result()
    with pytest.raises(RuntimeError, match="closed"):
        closing.submit([("1", "1")])


def test_workers_die_with_their_parent() -> None:
    code = (
        "from gxpo_trainer.grading.pool import VerifierPool; pool = VerifierPool(workers=2); "
        "pool.submit([('1', '1')]).result(); print(*(process.pid for process in pool._processes), flush=True); input()"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    workers = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    parent.kill()
    parent.communicate()
    gone, alive = psutil.wait_procs(workers, timeout=60)
    assert len(gone) == 2
    assert alive == []


def test_an_unusable_file_is_refused_before_grading(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", io.StringIO()
    fine = {"gold": "5", "prediction": "5"}
    complaints = {
        "": "in.jsonl: is empty",
        "{": ":1: is not valid JSON",
        "[1]": ":1: is a list",
        json.dumps(fine) + '\n{"gold": "5"}': r":2: has no field 'prediction' \(its fields: gold\); write rows with",
        '{"gold": {}, "prediction": "5"}': "field 'gold' is {}; text is expected",
        json.dumps(fine) + '\n{"gold": " ", "prediction": "5"}': ":2: field 'gold' is empty; correct or remove the row",
        json.dumps(fine | {"verify": {"units": 1}}): ":1: 'verify': has the unknown key 'units'",
    }
    with pytest.raises(DataError, match=r"in\.jsonl: cannot be read"):
        grade_file(source, out, workers=1)
    for text, complaint in complaints.items():
        source.write_text(text)
        with pytest.raises(DataError, match=complaint):
            grade_file(source, out, workers=1)
    assert out.getvalue() == ""
    # Each line may have rules of its own.
    row = {"gold": "45", "prediction": r"\boxed{0.75\text{ h}}", "options": {"anything": "of another suite"}}
    source.write_text("".join(json.dumps(each) + "\n" for each in (row, {**row, "verify": {"unit": "min"}}, row)))
    grade_file(source, out, workers=1, deadline_s=60.0)
    assert [json.loads(line)["verdict"] for line in out.getvalue().splitlines()] == ["wrong", "correct", "wrong"]
    # Numbers are answers, as in training data.
    source.write_text(json.dumps({"gold": 4, "prediction": 4.0}))
    assert grade_file(source, out, workers=1, deadline_s=60.0)["correct"] == 1
