"""kill -9 of each kind of process in the middle of a step of a real run: nothing is lost, nothing counted twice."""

from __future__ import annotations

import os
import signal

import psutil
import pytest
import ray

from gxpo_trainer.learner.group import LearnerGroup
from gxpo_trainer.reporting.reading import read_evaluations, read_events, read_metrics
from gxpo_trainer.rollout.pool import RolloutPool
from gxpo_trainer.rollout.verification import VerifierHandle
from gxpo_trainer.training.run import train_run

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("ray_on_loopback")]


def test_sampler_verifier_worker_verifier_and_learner_are_killed_in_mid_step(tmp_path, small_run, monkeypatch):
    """One run, four kills. Checkpoints at steps 2, 4 and 6; the learner dies in step 6, so step 5 is repeated."""
    killed = []

    def kill(what: str, pid: int) -> None:
        killed.append(what)
        os.kill(pid, signal.SIGKILL)

    inner_collect, inner_submit, inner_await = RolloutPool.collect, VerifierHandle.submit, VerifierHandle.await_verdicts
    collections = []

    def collect(self, *arguments, **options):
        collections.append(self)
        return inner_collect(self, *arguments, **options)

    def submit(self, finished, rewards):
        """Called for the first groups of a collection, while the sampler works on the others."""
        if len(collections) == 1 and "sampler" not in killed:
            kill("sampler", collections[0].engines.all[0].process.pid)
        if len(collections) == 3 and "verifier worker" not in killed:
            for worker in psutil.Process(ray.get(self._traced).pid).children():
                kill("verifier worker", worker.pid)
        return inner_submit(self, finished, rewards)

    def await_verdicts(self, pending, rewards):
        if len(collections) == 4:
            ray.kill(self.actor)
            killed.append("verifier")
        return inner_await(self, pending, rewards)

    trained = {"steps": 0}
    inner_train, inner_get = LearnerGroup.train_step, LearnerGroup._get

    def train_step(self, batches, learning_rate, *, diagnose):
        trained["steps"] += 1
        self.dies = trained["steps"] == 6
        return inner_train(self, batches, learning_rate, diagnose=diagnose)

    def get(self, calls, phase):
        if getattr(self, "dies", False):
            self.dies = False
            kill("learner", self.processes[0].pid)
        return inner_get(self, calls, phase)

    monkeypatch.setattr(RolloutPool, "collect", collect)
    monkeypatch.setattr(VerifierHandle, "submit", submit)
    monkeypatch.setattr(VerifierHandle, "await_verdicts", await_verdicts)
    monkeypatch.setattr(LearnerGroup, "train_step", train_step)
    monkeypatch.setattr(LearnerGroup, "_get", get)
    config = small_run(
        budget={"steps": 8},
        learner={"rule": {"name": "gxpo", "k": 3, "gate": {"mode": "never"}}, "optimizer": {"learning_rate": 1e-5}},
    )
    assert train_run(config, tmp_path / "run") == "steps"
    assert {"sampler", "verifier worker", "verifier", "learner"} == set(killed)
    rows = [row for row in read_metrics(tmp_path / "run") if "update/backward_passes" in row["metrics"]]
    assert [row["step"] for row in rows] == list(range(1, 9)), "no hole, no double"
    assert rows[-1]["metrics"]["update/backward_passes_total"] == 3 * 8
    assert rows[-1]["metrics"]["update/repeated_passes_total"] == 3
    assert rows[3]["attempt"] == 1
    assert rows[4]["attempt"] == 2
    kinds = [event["kind"] for event in read_events(tmp_path / "run")]
    assert {"sampler_restarted", "verifier_restarted", "learner_died"} <= set(kinds)
    assert max(row["metrics"]["rollout/logprob_gap_max"] for row in rows) <= 1e-4
    assert [row["step"] for row in read_evaluations(tmp_path / "run")] == [8], "at the end, also where none is due"
