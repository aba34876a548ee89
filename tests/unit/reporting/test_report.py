"""The files of a run: whole lines, torn lines, attempts, NaN, samples, identity."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from ray.exceptions import ActorDiedError, ActorUnschedulableError, OutOfMemoryError, RayTaskError

from gxpo_trainer import errors
from gxpo_trainer.config import RunConfig
from gxpo_trainer.errors import DataError
from gxpo_trainer.jsonl import JsonLines, decode_number, write_json
from gxpo_trainer.reporting.identity import hash_path, run_identity
from gxpo_trainer.reporting.outcome import failure_message, is_recoverable, memory_kill, reason_of
from gxpo_trainer.reporting.reading import read_evaluations, read_events, read_identity, read_metrics, read_samples
from gxpo_trainer.reporting.reporter import RunReporter
from gxpo_trainer.types import Episode, Group, Prompt, Sample, ScoredGroup, Utterance, Verdict


def reporter(path: Path, **options: object) -> RunReporter:
    return RunReporter(path, clock=lambda: 1000.0, **options)  # type: ignore[arg-type]


def steps_and_attempts(path: Path) -> list[tuple[int, int]]:
    return [(row["step"], row["attempt"]) for row in read_metrics(path)]


def test_rows_have_the_documented_fields_and_nan_and_infinities_round_trip(tmp_path: Path) -> None:
    with reporter(tmp_path) as made:
        made.log_metrics(1, {"reward/mean": 0.5, "update/backward_passes": np.int64(3)})
        made.log_metrics(2, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": np.float32(0.5), "e": 1e-308})
    first, second = (tmp_path / "metrics.jsonl").read_text().splitlines()
    metrics = '"metrics": {"reward/mean": 0.5, "update/backward_passes": 3}'
    assert first == f'{{"attempt": 1, "step": 1, "time": 1000.0, {metrics}}}'
    raw = json.loads(second, parse_constant=pytest.fail)
    assert [raw["metrics"][name] for name in "abc"] == ["NaN", "Infinity", "-Infinity"]
    values = read_metrics(tmp_path)[1]["metrics"]
    assert math.isnan(values["a"])
    assert (values["b"], values["c"], values["d"], values["e"]) == (math.inf, -math.inf, 0.5, 1e-308)


@pytest.mark.parametrize("value", ["nan", "inf", "", True, None, [1]])
def test_decode_number_rejects_everything_else(value: object) -> None:
    with pytest.raises(ValueError, match="not a number"):
        decode_number(value)


def test_a_torn_last_line_is_truncated_with_an_event(tmp_path: Path) -> None:
    with reporter(tmp_path) as made:
        made.log_metrics(1, {"a": 1.0})
        made.log_metrics(2, {"a": 2.0})
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    assert steps_and_attempts(tmp_path) == [(1, 1)]
    with reporter(tmp_path) as made:
        made.start_attempt(2, 1)
        made.log_metrics(2, {"a": 3.0})
    assert steps_and_attempts(tmp_path) == [(1, 1), (2, 2)]
    assert [event["kind"] for event in read_events(tmp_path)] == ["torn_line", "attempt"]


@given(cut=st.integers(0, 400))
@settings(max_examples=60, deadline=None)
def test_a_truncated_file_yields_a_prefix_of_its_rows(cut: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "rows.jsonl"
        file = JsonLines(path)
        rows = [{"number": number, "text": "ä\n\u2028" * number} for number in range(8)]
        for row in rows:
            file.append(row)
        file.close()
        path.write_bytes(path.read_bytes()[:cut])
        JsonLines(path).close()
        left = [json.loads(line) for line in path.read_bytes().splitlines()]
        assert left == rows[: len(left)]
        size = path.stat().st_size
        assert size <= cut
        # Zeros, as after a power loss, are removed as well.
        path.write_bytes(path.read_bytes() + b"\0" * 200_000 + b"\n")
        file = JsonLines(path)
        file.close()
        assert (path.stat().st_size, file.bytes_cut) == (size, 200_001)


def test_steps_of_an_abandoned_history_are_excluded(tmp_path: Path) -> None:
    with reporter(tmp_path) as made:
        for step in range(1, 10):
            made.log_metrics(step, {"a": 1.0})
            made.log_evaluation(step, {"benchmark": "b", "scores": {"pass@1": 0.1}})
        made.start_attempt(2, 3)
        assert steps_and_attempts(tmp_path)[-1] == (9, 1)
        made.log_metrics(4, {"a": 2.0})
    assert steps_and_attempts(tmp_path) == [(1, 1), (2, 1), (3, 1), (4, 2)]
    assert [row["step"] for row in read_evaluations(tmp_path)] == [1, 2, 3]


def test_an_evaluation_postponed_beyond_a_checkpoint_belongs_to_the_attempt_that_wrote_it(tmp_path: Path) -> None:
    with reporter(tmp_path) as made:
        made.start_attempt(3, 0)
        made.log_metrics(1, {"a": 1.0})
        made.start_attempt(4, 1, continued=3)
        made.log_metrics(1, {"eval/x/pass@1": 0.5})
        made.log_evaluation(1, {"benchmark": "x", "scores": {"pass@1": 0.5}})
        made.log_metrics(2, {"a": 2.0})
    assert steps_and_attempts(tmp_path) == [(1, 3), (2, 4)]
    assert read_metrics(tmp_path)[0]["metrics"] == {"a": 1.0, "eval/x/pass@1": 0.5}
    assert [row["attempt"] for row in read_evaluations(tmp_path)] == [3]


def test_evaluations_are_unique_per_step_and_benchmark(tmp_path: Path) -> None:
    with reporter(tmp_path) as made:
        for score in (0.1, math.nan):
            record = {"benchmark": "math500", "scores": {"pass@1": score}, "training_s": 5.0, "attempt": 99}
            made.log_evaluation(10, record)
        made.log_evaluation(10, {"benchmark": "amc23", "scores": {"pass@1": 0.3}})
    first, second = read_evaluations(tmp_path)
    assert (first["benchmark"], first["attempt"], first["time"]) == ("amc23", 1, 1000.0)
    assert (second["benchmark"], second["attempt"], second["time"]) == ("math500", 1, 1000.0)
    assert math.isnan(second["scores"]["pass@1"])


def test_samples_hold_the_first_groups_and_their_text(tmp_path: Path) -> None:
    ids, logprobs = np.arange(3, dtype=np.int32), np.zeros(3, dtype=np.float32)
    samples = tuple(Sample(text, ids, logprobs, "stop") for text in ("NaN", 'an "answer"\n\u2028'))
    verdicts = Verdict("correct", "42", 0.1), Verdict("timeout", None, 5.0, "killed")
    prompts = [Prompt(f"p{number}", f"text of p{number}", "42") for number in range(3)]
    groups = [ScoredGroup(Group(prompt, ids, samples, 7), verdicts) for prompt in prompts]
    with reporter(tmp_path, samples_per_step=2, show=str) as made:
        made.log_samples(1, groups)
    rows = read_samples(tmp_path)
    assert rows[0]["rendered_prompt"] == str(groups[0].group.prompt_token_ids)
    assert [(row["prompt_id"], row["sample"]) for row in rows] == [("p0", 0), ("p0", 1), ("p1", 0), ("p1", 1)]
    fields = ("response", "reward", "verdict", "extracted", "gold")
    assert [rows[0][name] for name in fields] == ["NaN", 1.0, "correct", "42", "42"]
    assert (rows[1]["reward"], rows[1]["response"], rows[1]["length"]) == (None, 'an "answer"\n\u2028', 3)


def test_samples_of_conversations_hold_their_turns(tmp_path: Path) -> None:
    turns = (Utterance("policy", "<calc>6*7</calc>"), Utterance("environment", "42", 0.5), Utterance("policy", "42"))
    mask = np.array([True, True, False, True])
    ids, logprobs = np.arange(4, dtype=np.int32), np.zeros(4, dtype=np.float32)
    episode = Episode(turns, "timeout", "Mine.step did not return")
    spoken = Sample("<calc>6*7</calc>\n42", ids, logprobs, "stop", sampled=mask, episode=episode)
    single = Sample("42", ids, logprobs, "stop")
    group = Group(Prompt("p", "6*7?", "42"), ids, (spoken, single), 0)
    with reporter(tmp_path) as made:
        made.log_samples(1, [ScoredGroup(group, (Verdict("timeout", None, 5.0), Verdict("correct", "42", 0.1)))])
    row, plain = read_samples(tmp_path)
    assert [tuple(turn.values()) for turn in row["turns"]] == [(t.speaker, t.text, t.reward) for t in turns]
    assert row["turns"][1] == {"speaker": "environment", "text": "42", "reward": 0.5}
    assert (row["end"], row["end_detail"]) == ("timeout", "Mine.step did not return")
    assert (row["length"], row["sampled_length"]) == (4, 3)
    assert not {"turns", "end", "end_detail", "sampled_length"} & plain.keys()


def test_a_damaged_line_in_the_middle_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"attempt": 1, "step": 1, "time": 0, "metrics": {}}\n{"att\n{}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2: is not JSON"):
        read_metrics(tmp_path)
    with pytest.raises(DataError, match="cannot be read"):
        read_identity(tmp_path)


def test_a_full_disk_is_reported_and_leaves_whole_lines(tmp_path: Path) -> None:
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from gxpo_trainer.errors import TrainingError; from gxpo_trainer.jsonl import JsonLines\n"
        "file = JsonLines(Path(sys.argv[1]))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try:\n"
        "    for number in range(100): file.append({'number': number, 'text': 'x' * 50})\n"
        "except TrainingError as error: print(error.reason, number)\n"
    )
    path = tmp_path / "rows.jsonl"
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    reason, number = done.stdout.split()
    assert reason == "disk_full"
    assert [json.loads(line)["number"] for line in path.read_text().splitlines()] == list(range(int(number)))


def test_identity_holds_everything_that_decides_comparability(tmp_path: Path) -> None:
    policy = tmp_path / "policy.bin"
    policy.write_text("{}\n")
    config = RunConfig(seed=3)
    identity = run_identity(config, data_sha256={"train": "hash"}, policy_sha256=hash_path(policy))
    assert identity["config"] == config.model_dump(mode="json")
    assert identity["config_sha256"] == config.sha256()
    # sha256 of the three bytes "{}\n".
    assert identity["policy_sha256"] == "ca3d163bab055381827226140568f3bef7eaac187cebd76878e0b63e9e442356"
    assert identity["data_sha256"] == {"train": "hash"}
    assert identity["seeds"] == {"run": 3}
    assert identity["packages"]["numpy"] == np.__version__
    assert identity["hardware"]["cpu"]
    assert identity["hardware"]["memory_bytes"] > 1e8
    with pytest.raises(DataError, match="cannot be hashed"):
        hash_path(tmp_path / "absent")
    # That of a folder depends on names and content alone.
    for folder, name, text in (("a", "x", "1"), ("b", "x", "1"), ("c", "y", "1"), ("d", "x", "2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(text)
    first, same, *others = (hash_path(tmp_path / folder) for folder in "abcd")
    assert first == same
    assert len({first, *others}) == 3


def test_a_resumed_run_keeps_its_identity_and_records_changes(tmp_path: Path) -> None:
    first = {"config": {"threshold": math.inf}, "python": "3.11.1"}
    with reporter(tmp_path) as made:
        made.write_identity(first)
        made.write_identity({**first, "python": "3.11.2"}, attempt=2, resumed=True)
        # Replaced as a whole, with any text.
        cyclic: dict[str, object] = {"a": "a\0b\ud800c"}
        made.write_identity(cyclic, attempt=3, resumed=True)
        cyclic["self"] = cyclic
        with pytest.raises(RecursionError):
            write_json(tmp_path / "run.json", cyclic)
    identity = read_identity(tmp_path)
    assert identity["attempts"].pop()["changed"]["a"]["now"] == "a\0b\ud800c"
    assert identity["python"] == "3.11.1"
    assert [attempt["attempt"] for attempt in identity["attempts"]] == [1, 2]
    assert identity["attempts"][1]["changed"] == {"python": {"first": "3.11.1", "now": "3.11.2"}}


def test_a_run_that_restarts_without_a_checkpoint_has_an_identity_of_its_own(tmp_path: Path) -> None:
    """It ended before its first checkpoint, and its learning rate was changed."""
    with reporter(tmp_path) as made:
        made.write_identity({"config": {"rate": 0.01}, "device": "cpu"})
        made.write_identity({"config": {"rate": 0.0001}}, attempt=2)
    identity = read_identity(tmp_path)
    assert [attempt["attempt"] for attempt in identity.pop("attempts")] == [1, 2]
    assert identity == {"config": {"rate": 0.0001}}


# Reasons of failures; a report of Ray's memory monitor becomes two sentences and says whether a run is launched
# again.


RECORDED = Path(__file__).parent / "recorded"
SMALL = (RECORDED / "small_worker_killed.txt").read_text(encoding="utf-8")
LARGE = (RECORDED / "large_worker_killed.txt").read_text(encoding="utf-8")
LARGEST = LARGE.replace("30586\t2.08", "30586\t1.08")
"""The same with a smaller sampler, so that the killed worker used most."""

LIMIT = "GiB of memory in use, and its limit is 6.40 of 23.54 GiB."
TEXTS = {
    SMALL: f"Ray killed Sampler (process 31776, 0.24 GiB): node 192.0.2.2 had 6.58 {LIMIT} ray::SamplerActor "
    "(process 30586, 1.87 GiB) used most.",
    LARGEST: f"Ray killed Sampler (process 31777, 1.6 GiB): node 192.0.2.2 had 6.45 {LIMIT}",
}


@pytest.mark.parametrize(("report", "recovered"), [(SMALL, True), (LARGE, True), (LARGEST, False)])
def test_only_a_run_killed_for_the_memory_of_another_process_is_recovered(report: str, recovered: bool) -> None:
    direct = OutOfMemoryError(report)
    chained = errors.TrainingError("the sampler died 6 times in a row; see events.jsonl")
    chained.__cause__ = errors.LearnerDied("1 worker(s) were killed")
    chained.__cause__.__cause__ = ActorDiedError(RayTaskError("__init__", report, direct))
    for error in (direct, chained):
        assert reason_of(error) == "out_of_memory"
        assert is_recoverable(error) == recovered
    assert failure_message(chained) == f"the sampler died 6 times in a row; see events.jsonl. {failure_message(direct)}"
    assert failure_message(direct) == TEXTS.get(report, failure_message(direct))


def test_an_unknown_report_keeps_one_line_and_is_not_recovered() -> None:
    kill = memory_kill(Exception("Task was killed due to the node running low on memory.\n" + "details\n" * 500))
    assert (kill.text, kill.is_victim) == ("Task was killed due to the node running low on memory.", False)
    assert memory_kill(Exception("CUDA out of memory. Tried to allocate 2 GiB")) is None


def raised_from(error: Exception, cause: BaseException) -> Exception:
    with contextlib.suppress(Exception):
        raise error from cause
    return error


def test_errors_of_ray_and_torch_name_the_exhausted_resource() -> None:
    def task(cause: Exception) -> Any:
        return RayTaskError("train_step", f"{type(cause).__name__}: {cause}", cause)

    full = torch.OutOfMemoryError("CUDA out of memory")
    died = raised_from(RuntimeError("a learner died"), OutOfMemoryError("node is low on memory"))
    for error, reason in (
        (OutOfMemoryError("node is low on memory"), "out_of_memory"),
        (ActorUnschedulableError("no node has 8 GPUs"), "no_resources"),
        (task(full).as_instanceof_cause(), "out_of_memory"),
        (task(errors.WeightSyncMismatch("gap")).as_instanceof_cause(), "weight_sync_mismatch"),
        (task(errors.TrainingError("full", reason="disk_full")).as_instanceof_cause(), "disk_full"),
        (ActorDiedError(task(full)), "out_of_memory"),
        (ActorDiedError(task(ValueError("x"))), "training_error"),
        (raised_from(errors.TrainingError("the learner died 3 times"), died), "out_of_memory"),
    ):
        assert reason_of(error) == reason, repr(error)


@pytest.mark.parametrize(
    ("error", "reason", "recoverable"),
    [
        (errors.ConfigError("x"), "invalid_config", False),
        (errors.CheckpointError("x"), "invalid_config", False),
        (MemoryError(), "out_of_memory", False),
        (OSError(errno.ENOSPC, "full"), "disk_full", True),
        (OSError(errno.EDQUOT, "quota"), "disk_full", True),
        (OSError(errno.EIO, "bad block"), "training_error", False),
        (errors.TrainingError("x", reason="no_resources"), "no_resources", False),
        (errors.Diverged("x"), "diverged", False),
        (errors.VerifierFailed("x"), "verifier_failed", False),
        (errors.TrainingError("x"), "training_error", False),
        (errors.Stalled("x"), "stalled", True),
        (raised_from(errors.TrainingError("the sampler stalled 6 times"), errors.Stalled("y")), "stalled", True),
        (ZeroDivisionError(), "training_error", False),
        (raised_from(errors.TrainingError("x"), OSError(errno.ENOSPC, "full")), "disk_full", True),
    ],
)
def test_every_error_has_a_reason_and_is_recoverable_or_not(error: Exception, reason: str, recoverable: bool) -> None:
    assert reason_of(error) == reason
    assert reason in errors.REASONS
    general = reason == errors.GxpoError.reason
    assert reason_of(error, setting_up=True) == ("setup_failed" if general else reason)
    assert is_recoverable(error) == recoverable
