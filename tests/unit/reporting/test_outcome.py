"""Reasons of failures; a report of Ray's memory monitor becomes two sentences and says whether a run is launched again.

The reports were recorded with Ray 2.56 on a node with another run's sampler and a process of 1.68 GiB.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.exceptions import ActorDiedError, ActorUnschedulableError, OutOfMemoryError, RayTaskError

from gxpo_trainer import errors
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
    chained = errors.TrainingError("the sampler died 6 times in a row; see events.jsonl")
    chained.__cause__ = errors.LearnerDied("1 worker(s) were killed")
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


def raised_from(error: Exception, cause: BaseException) -> Exception:
    with contextlib.suppress(Exception):
        raise error from cause
    return error


def ray_errors() -> Iterator[tuple[Exception, str]]:
    def task(cause: Exception) -> Any:
        return RayTaskError("train_step", f"{type(cause).__name__}: {cause}", cause)

    yield OutOfMemoryError("node is low on memory"), "out_of_memory"
    yield ActorUnschedulableError("no node has 8 GPUs"), "no_resources"
    yield task(torch.OutOfMemoryError("CUDA out of memory")).as_instanceof_cause(), "out_of_memory"
    yield task(errors.WeightSyncMismatch("gap")).as_instanceof_cause(), "weight_sync_mismatch"
    yield task(errors.TrainingError("full", reason="disk_full")).as_instanceof_cause(), "disk_full"
    yield ActorDiedError(task(torch.OutOfMemoryError("CUDA out of memory"))), "out_of_memory"
    yield ActorDiedError(task(ValueError("x"))), "training_error"
    died = raised_from(RuntimeError("a learner died"), OutOfMemoryError("node is low on memory"))
    yield raised_from(errors.TrainingError("the learner died 3 times"), died), "out_of_memory"


def test_errors_of_ray_and_torch_name_the_exhausted_resource() -> None:
    for error, reason in ray_errors():
        assert reason_of(error) == reason, repr(error)


@pytest.mark.parametrize(
    ("error", "reason", "recoverable"),
    [
        (errors.ConfigError("x"), "invalid_config", False),
        (errors.DataError("x"), "invalid_config", False),
        (errors.CheckpointError("x"), "invalid_config", False),
        (MemoryError(), "out_of_memory", False),
        (OSError(errno.ENOSPC, "full"), "disk_full", True),
        (OSError(errno.EDQUOT, "quota"), "disk_full", True),
        (OSError(errno.EIO, "bad block"), "training_error", False),
        (errors.TrainingError("x", reason="no_resources"), "no_resources", False),
        (errors.Diverged("x"), "diverged", False),
        (errors.VerifierFailed("x"), "verifier_failed", False),
        (errors.WeightSyncMismatch("x"), "weight_sync_mismatch", False),
        (errors.TrainingError("x"), "training_error", False),
        (errors.Stalled("x"), "stalled", True),
        (raised_from(errors.TrainingError("the sampler stalled 6 times"), errors.Stalled("y")), "stalled", True),
        (ZeroDivisionError(), "training_error", False),
        (raised_from(errors.TrainingError("x"), OSError(errno.ENOSPC, "full")), "disk_full", True),
        (raised_from(errors.TrainingError("x"), errors.Diverged("y")), "diverged", False),
    ],
)
def test_every_error_has_a_reason_and_is_recoverable_or_not(error: Exception, reason: str, recoverable: bool) -> None:
    assert reason_of(error) == reason
    assert reason in errors.REASONS
    general = reason == errors.GxpoError.reason
    assert reason_of(error, setting_up=True) == ("setup_failed" if general else reason)
    assert is_recoverable(error) == recoverable
