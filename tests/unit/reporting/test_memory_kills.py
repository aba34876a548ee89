"""A report of Ray's memory monitor becomes two sentences, and says whether the killed process was the cause.

The reports were recorded with Ray 2.56 on a node with another run's sampler and a process of 1.68 GiB.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayTaskError

from gxpo_trainer.errors import LearnerDied, TrainingError
from gxpo_trainer.reporting.outcome import failure_message, is_recoverable, parse_memory_kill, reason_of

RECORDED = Path(__file__).parent / "recorded"
SMALL = (RECORDED / "small_worker_killed.txt").read_text(encoding="utf-8")
LARGE = (RECORDED / "large_worker_killed.txt").read_text(encoding="utf-8")
LARGEST = LARGE.replace("30586\t2.08", "30586\t1.08")
"""The same with a smaller sampler, so that the killed worker used most."""

SMALL_TEXT = (
    "Ray killed Sampler (process 31776, 0.24 GiB): node 192.0.2.2 had 6.58 GiB of memory in use, and its limit is "
    "6.40 of 23.54 GiB. ray::SamplerActor (process 30586, 1.87 GiB) used most."
)


def test_the_message_names_process_memory_and_limit_in_two_sentences() -> None:
    assert failure_message(OutOfMemoryError(SMALL)) == SMALL_TEXT
    assert failure_message(OutOfMemoryError(LARGEST)) == (
        "Ray killed Sampler (process 31777, 1.6 GiB): node 192.0.2.2 had 6.45 GiB of memory in use, and its limit is "
        "6.40 of 23.54 GiB."
    )


@pytest.mark.parametrize(("report", "recovered"), [(SMALL, True), (LARGE, True), (LARGEST, False)])
def test_only_a_run_killed_for_the_memory_of_another_process_is_recovered(report: str, recovered: bool) -> None:
    direct = OutOfMemoryError(report)
    chained = TrainingError("the sampler died 6 times in a row; see events.jsonl")
    chained.__cause__ = LearnerDied("1 worker(s) were killed")
    chained.__cause__.__cause__ = ActorDiedError(RayTaskError("__init__", report, direct))
    for error in (direct, chained):
        assert reason_of(error) == "out_of_memory"
        assert is_recoverable(error) == recovered
    assert failure_message(chained).startswith(
        "the sampler died 6 times in a row; see events.jsonl. Ray killed Sampler"
    )
    assert len(failure_message(chained)) < 300


def test_an_unknown_report_keeps_one_line_and_is_not_recovered() -> None:
    kill = parse_memory_kill("Task was killed due to the node running low on memory.\n" + "details\n" * 500)
    assert (kill.text, kill.is_victim) == ("Task was killed due to the node running low on memory.", False)
    assert parse_memory_kill("CUDA out of memory. Tried to allocate 2 GiB") is None
