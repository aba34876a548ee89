"""A whole run on real engines, and runs that end early and resume: by --resume, by a service over HTTP."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from support.ingest_server import KINDS, IngestServer, serving
from support.rollouts import assert_equal_to_the_bit, history

from gxpo_trainer.config.io import to_toml
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.reporting.reading import read_evaluations, read_events, read_metrics, read_samples
from gxpo_trainer.training.run import train_run

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("ray_on_loopback")]
GXPO = {"name": "gxpo", "k": 3, "gate": {"mode": "never"}}


@pytest.fixture
def server():
    yield from serving()


def deterministic(small_run, steps: int):
    return small_run(
        budget={"steps": steps},
        rollout={"deterministic": True, "logprob_gap_max_limit": 1e-12},
        evaluation={"every_steps": 2},
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory, small_run) -> Path:
    """A run of four steps of GXPO that nothing interrupted; for looking only."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert train_run(deterministic(small_run, 4), out) == "steps"
    return out


def test_a_run_trains_and_reports_every_step(whole):
    rows = [row["metrics"] for row in read_metrics(whole)]
    assert [row["step"] for row in read_metrics(whole)] == [1, 2, 3, 4]
    # Three passes a step until the gate ends the look-ahead, then one.
    fired = [event["step"] for event in read_events(whole) if event["kind"] == "gate_fired"]
    last = fired[0] if fired else 4
    assert [row["update/backward_passes"] for row in rows] == [3] * last + [1] * (4 - last)
    assert rows[-1]["update/backward_passes_total"] == 3 * last + 4 - last
    assert all(row["update/weights_changed_fraction"] > 0.5 for row in rows[1:])
    assert [row["step"] for row in read_evaluations(whole)] == [2, 4]
    assert {"prompt", "response", "extracted", "gold", "verdict"} <= set(read_samples(whole)[0])
    # The limit of the gap is below rounding: each step exceeds it.
    assert [row["rollout/logprob_gap_max_exceeded"] for row in rows] == [1] * 4
    events = [event for event in read_events(whole) if event["kind"] == "logprob_gap_outlier"]
    assert [event["step"] for event in events] == [1, 2, 3, 4]


def test_a_resumed_run_is_the_uninterrupted_run_to_the_bit(tmp_path, small_run, whole):
    """The run died after its last step, before the checkpoint of that step: steps 3 and 4 are done again."""
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    shutil.rmtree(out / "checkpoints" / "step-00000004")
    with pytest.raises(ConfigError, match="--resume"):
        train_run(deterministic(small_run, 4), out)
    train_run(deterministic(small_run, 4), out, resume=True)
    assert_equal_to_the_bit(out, whole)
    rows = read_metrics(out)
    assert [row["attempt"] for row in rows] == [1, 1, 2, 2]
    elapsed = [row["metrics"]["time/elapsed_s"] for row in rows]
    assert elapsed == sorted(elapsed), "the clock of a run continues where it was"
    total = "update/backward_passes_total"
    twice = rows[3]["metrics"][total] - rows[1]["metrics"][total]
    assert rows[3]["metrics"]["update/repeated_passes_total"] == twice > 0


@pytest.mark.long("a whole run; that states are resharded: test_learner_stages.py")
def test_a_run_goes_on_at_another_zero_stage_on_another_number_of_ranks(tmp_path, small_run, whole):
    """The third step starts from the same weights, so it samples the same answers; its gradient differs by rounding."""
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    shutil.rmtree(out / "checkpoints" / "step-00000004")
    placement = {"learner_ranks": 2, "learner_cpus": 0.5, "sampler_cpus": 0.5, "verifier_cpus": 0.25}
    config = deterministic(small_run, 3).updated(learner={"zero_stage": 3}, placement=placement)
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
