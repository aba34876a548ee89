"""Sampling ahead of the learner on real Ray, vLLM and DeepSpeed: a whole run, weights that change in flight, deaths,
and runs that end early and resume: by --resume, by a service over HTTP."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
from support.ingest_server import KINDS, IngestServer
from support.rollouts import assert_equal_to_the_bit, history, trained_rows

from docs_build.metrics import undescribed
from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.io import to_toml
from gxpo_trainer.errors import CheckpointError, ConfigError
from gxpo_trainer.learner.group import LearnerGroup
from gxpo_trainer.reporting.reading import read_evaluations, read_events, read_metrics, read_samples
from gxpo_trainer.rollout.sources import AsyncRollouts, Rollouts
from gxpo_trainer.training.run import train_run

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("ray_on_loopback")]
GXPO = {"name": "gxpo", "k": 3, "gate": {"mode": "never"}}
STEPS = 4


def ahead(small_run: Any, **parts: Any) -> RunConfig:
    """Deterministic steps of GXPO, one step ahead, with checkpoints and evaluations every two."""
    # Fewer sequences at a time than a step has, so that the next batch is still sampled when one is complete.
    # The limit of the gap is below rounding.
    rollout = {"async_depth": 1, "deterministic": True, "max_num_seqs": 16, "logprob_gap_max_limit": 1e-12}
    rollout |= parts.pop("rollout", {})
    body: dict[str, Any] = {
        "rollout": rollout,
        "learner": {"rule": GXPO, "optimizer": {"learning_rate": 1e-5}},
        "evaluation": {"every_steps": 2},
        "budget": {"steps": STEPS},
        "placement": {"learner_threads": 1, "sampler_threads": 1},
    }
    return small_run(**{**body, **parts})


def steps_once(out: Path) -> None:
    rows = trained_rows(out)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1)), "no hole, no double"
    assert rows[-1]["metrics"]["update/backward_passes_total"] == 3 * STEPS


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, small_run: Any) -> Path:
    """A run that nothing interrupted; for looking only."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert train_run(ahead(small_run), out) == "steps"
    return out


def test_versions_are_one_step_behind_but_after_checkpoints(whole: Path) -> None:
    """Version 0 samples steps 1 and 2, up to the checkpoint; sampling restarts from each checkpointed version."""
    steps_once(whole)
    rows = [row["metrics"] for row in read_metrics(whole)]
    assert [row["rollout/weights_version"] for row in rows] == [0, 0, 2, 2]
    assert [row["rollout/staleness_max"] for row in rows] == [0, 1, 0, 1]
    assert [row["rollout/staleness_mean"] for row in rows] == [0, 1, 0, 1]
    assert {row["rollout/dropped_fraction"] for row in rows} == {0}
    # Fresh samples weigh 1 up to rounding; stale ones do not.
    assert [abs(row["importance/max"] - 1) < 1e-3 for row in rows] == [True, False] * 2
    assert all(0.9 < row["importance/effective_sample_fraction"] < 1 + 1e-6 for row in rows)
    assert all(row["rollout/logprob_gap_mean"] <= 1e-6 for row in rows[::2])
    assert any(row.get("time/overlap_fraction", 0) > 0 for row in rows), "no batch was sampled during an update"
    assert any(0 < row["rollout/engine_idle_fraction"] < 1 for row in rows)
    assert [row["weights_version"] for row in read_evaluations(whole)] == [2, 4]
    assert not undescribed({name for row in rows for name in row})
    assert {"prompt", "response", "extracted", "gold", "verdict"} <= set(read_samples(whole)[0])
    # The gap of stale samples is expected.
    assert [row.get("rollout/logprob_gap_max_exceeded") for row in rows] == [1, None] * 2
    assert [event["step"] for event in read_events(whole) if event["kind"] == "logprob_gap_outlier"] == [1, 3]


@pytest.mark.long("deaths, once more ahead of the learner")
def test_a_learner_that_dies_with_batches_in_flight_repeats_no_sample(
    tmp_path: Path, small_run: Any, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 in step 3, while step 4 is sampled: steps 3 and 4 are those of the uninterrupted run."""
    killed: list[None] = []
    inner = AsyncRollouts.serve

    def serve(self: AsyncRollouts, calls: Any, phase: Any) -> Any:
        if {*self._planned} == {4} and not killed:
            killed.append(os.kill(learners[-1].processes[0].pid, signal.SIGKILL))
        return inner(self, calls, phase)

    learners: list[LearnerGroup] = []
    start = LearnerGroup.start
    monkeypatch.setattr(AsyncRollouts, "serve", serve)
    monkeypatch.setattr(LearnerGroup, "start", lambda self: learners.append(self) or start(self))
    out = tmp_path / "run"
    assert train_run(ahead(small_run), out) == "steps"
    assert killed
    assert [row["attempt"] for row in read_metrics(out)] == [1, 1, 2, 2]
    steps_once(out)
    assert_equal_to_the_bit(out, whole)


@pytest.mark.long("a whole run with in-flight updates")
def test_weights_change_between_the_tokens_of_a_sample_which_names_the_versions(
    tmp_path: Path, small_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines hold one prompt at a time, so that syncs meet its samples in the middle. One engine dies on the way.

    That each token has the probability of its version: test_conversations.py.
    """
    batches: list[Rollouts] = []
    inner = AsyncRollouts.batch

    def batch(self: AsyncRollouts, step: int) -> Rollouts:
        batches.append(inner(self, step))
        if step == 3:
            os.kill(self._pool.engines.all[0].process.pid, signal.SIGKILL)
        return batches[-1]

    monkeypatch.setattr(AsyncRollouts, "batch", batch)
    config = ahead(
        small_run,
        rollout={"deterministic": False, "update_in_flight": True, "max_num_seqs": 4, "ignore_eos": True},
        learner={"rule": GXPO, "optimizer": {"learning_rate": 3e-5}},
        evaluation={"every_steps": 0},
    )
    out = tmp_path / "run"
    assert train_run(config, out) == "steps"
    steps_once(out)
    assert any(event["kind"] == "sampler_restarted" for event in read_events(out))
    rows = [row["metrics"] for row in read_metrics(out)]
    assert max(row["rollout/staleness_max"] for row in rows) == 1
    assert any(0 < row["rollout/staleness_mean"] < 1 for row in rows)

    groups = [scored.group for batch in batches for scored in batch.groups]
    assert len({group.prompt.id for group in groups}) == len(groups), "no prompt twice"
    crossing = [(group, sample) for group in groups for sample in group.samples if len(sample.versions) > 1]
    assert crossing, "no sync met a sample in the middle: the test is too weak"
    for group, sample in crossing:
        assert sum(count for _, count in sample.versions) == len(sample.token_ids)
        assert group.weights_version <= sample.versions[0][0] < sample.versions[1][0]


def test_a_resumed_run_is_the_uninterrupted_run_to_the_bit(tmp_path, small_run, whole):
    """The run died after its last step, before the checkpoint of that step: steps 3 and 4 are done again."""
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    shutil.rmtree(out / "checkpoints" / "step-00000004")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match="--resume"):
        train_run(ahead(small_run), out)
    with pytest.raises(CheckpointError, match="was written with seed = "):
        train_run(ahead(small_run, seed=12), out, resume=True)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before, "refused, nothing written"
    train_run(ahead(small_run), out, resume=True)
    assert_equal_to_the_bit(out, whole)
    rows = read_metrics(out)
    assert [row["attempt"] for row in rows] == [1, 1, 2, 2]
    elapsed = [row["metrics"]["time/elapsed_s"] for row in rows]
    assert elapsed == sorted(elapsed), "the clock of a run continues where it was"
    total = "update/backward_passes_total"
    twice = rows[3]["metrics"][total] - rows[1]["metrics"][total]
    assert rows[3]["metrics"]["update/repeated_passes_total"] == twice > 0


@pytest.mark.long("once more, without sampling ahead")
def test_a_resumed_run_with_synchronous_rollouts_is_the_uninterrupted_run(tmp_path, small_run):
    config, whole, out = ahead(small_run, rollout={"async_depth": 0}), tmp_path / "whole", tmp_path / "run"
    train_run(config, whole)
    shutil.copytree(whole, out)
    shutil.rmtree(out / "checkpoints" / "step-00000004")
    train_run(config, out, resume=True)
    assert_equal_to_the_bit(out, whole)
    assert [row["attempt"] for row in read_metrics(out)] == [1, 1, 2, 2]


@pytest.mark.long("a whole run; that states are resharded: test_learner_stages.py")
def test_a_run_goes_on_at_another_zero_stage_on_another_number_of_ranks(tmp_path, small_run, whole):
    """The third step starts from the same weights, so it samples the same answers; its gradient differs by rounding."""
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    shutil.rmtree(out / "checkpoints" / "step-00000004")
    placement = {"learner_ranks": 2, "learner_cpus": 0.5, "sampler_cpus": 0.5, "verifier_cpus": 0.25}
    config = ahead(small_run, budget={"steps": 3}).updated(learner={"zero_stage": 3}, placement=placement)
    train_run(config, out, resume=True)
    (event,) = [event for event in read_events(out) if event["kind"] == "resharded"]
    assert event["message"].endswith("of 1 rank at ZeRO stage 0 loaded on 2 ranks at ZeRO stage 3")
    result, expected = (history(folder)[2] for folder in (out, whole))
    for name in ("reward/mean", "rollout/length_mean", "update/backward_passes_total"):
        assert result[name] == expected[name], name
    for name in ("policy/loss", "grad/norm_g0"):
        assert result[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-6), name


class Job:
    """`gxpo train` as a service starts it: a process of its own on a Ray that is there already."""

    def __init__(self, out: Path, server: IngestServer) -> None:
        self.out, self.server = out, server
        self.attempt = 0

    def run(self) -> int:
        """Launch once more, with a new token; returns the exit code."""
        self.attempt += 1
        self.server.token = f"token {self.attempt}"
        address = {"url": self.server.url, "run": "r1", "attempt": self.attempt, "token": self.server.token}
        (self.out / "service.json").write_text(json.dumps(address))
        command = [sys.executable, "-m", "gxpo_trainer.cli", "train", self.out / "config.toml", "--out", self.out]
        environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address, "RAY_AUTH_MODE": "token"}
        with (self.out / "train.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*map(str, command), "--continue", "--service", str(self.out / "service.json")],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        code = self.process.wait()
        print((self.out / "train.log").read_text(encoding="utf-8"))  # pytest shows it when the test fails
        return code


@pytest.mark.long("stand-ins in the short tier: service/scheduling")
def test_a_service_ends_and_continues_a_run(tmp_path, small_run, server):
    """Launch 1 is ended by SIGTERM while batches are under way, for sampling is a step ahead; launch 2 reaches the
    budget."""
    last = 8
    config = small_run(
        budget={"steps": last}, learner={"rule": GXPO}, checkpoint={"every_steps": 0}, rollout={"async_depth": 1}
    )
    (tmp_path / "config.toml").write_text(to_toml(config), encoding="utf-8")
    job = Job(tmp_path, server)

    def terminate(it: IngestServer) -> None:
        if it.rows["metrics"]:
            it.watch = lambda it: None
            job.process.send_signal(signal.SIGTERM)

    server.watch = terminate
    assert job.run() == 143
    assert server.outcome is None
    assert not (tmp_path / "outcome.json").exists()
    stopped_at = read_metrics(tmp_path)[-1]["step"]
    assert 1 <= stopped_at < last
    assert (tmp_path / "checkpoints" / f"step-{stopped_at:08d}" / "manifest.json").exists()

    assert job.run() == 0
    assert [server.outcome[name] for name in ("outcome", "ended_by", "attempt")] == ["succeeded", "steps", 2]
    lines = {kind: (tmp_path / f"{kind}.jsonl").read_text().splitlines() for kind in KINDS}
    assert server.rows == {kind: [json.loads(line) for line in lines[kind]] for kind in KINDS}
    steps = [row["step"] for row in server.rows["metrics"] if "reward/mean" in row["metrics"]]
    assert steps == list(range(1, last + 1)), "no hole, no double"
    rows = read_metrics(tmp_path)
    assert rows[-1]["metrics"]["update/backward_passes_total"] == 3 * last
    assert "update/repeated_passes_total" not in rows[-1]["metrics"]
    assert {row["attempt"] for row in rows} == {1, 2}
    assert server.identity["config"] == config.model_dump(mode="json")
    assert [attempt["attempt"] for attempt in server.identity["attempts"]] == [1, 2]
    expected = ["interrupted", "finished"]
    assert [event["kind"] for event in read_events(tmp_path) if event["kind"] in expected] == expected
