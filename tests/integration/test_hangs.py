"""SIGSTOP of each kind of process in a step of a real run: it stalls, is ended and replaced, and nothing is lost.

A stopped process sends nothing and closes nothing, like one that hangs in a driver or a collective.
"""

from __future__ import annotations

import os
import signal

import psutil
import pytest
import ray

from gxpo_trainer.config import TimeoutsConfig
from gxpo_trainer.learner.group import LearnerGroup
from gxpo_trainer.reporting.reading import read_events, read_metrics
from gxpo_trainer.rollout.engines import Engines
from gxpo_trainer.rollout.pool import RolloutPool
from gxpo_trainer.rollout.verification import VerifierHandle
from gxpo_trainer.training.run import train_run

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("ray_on_loopback"), pytest.mark.long("chaos at length")]


class Stopper:
    """Stops processes and shortens the time-out of their open requests until they are replaced: no limit of this test
    is ever near what a loaded machine needs."""

    def __init__(self) -> None:
        self.watch = None
        self.processes: dict[str, list[psutil.Process]] = {}

    def stop(self, what: str, pids: list[int], **limit: float) -> None:
        self.processes[what] = [psutil.Process(pid) for pid in pids]
        self.watch.timeouts = TimeoutsConfig(**limit)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)

    def replaced(self) -> None:
        self.watch.timeouts = TimeoutsConfig()


def test_a_sampler_a_verifier_and_a_learner_rank_hang_in_mid_step(tmp_path, small_run, monkeypatch, capfd):
    """One run of two learner ranks, three hangs. Checkpoints at steps 2 and 4; the rank hangs in step 4, so step 3 is
    repeated."""
    stopper = Stopper()
    collections = []
    inner = {
        "collect": RolloutPool.collect,
        "submit": VerifierHandle.submit,
        "train_step": LearnerGroup.train_step,
        "get": LearnerGroup._get,
        "start": LearnerGroup.start,
        "engine": Engines.restart,
        "verifier": VerifierHandle._restart,
    }

    def collect(self, *arguments, **options):
        collections.append(self)
        stopper.watch = self.engines.placement.group.watch
        return inner["collect"](self, *arguments, **options)

    def submit(self, finished, rewards):
        """Called for the first groups of a collection, while the sampler works on the others."""
        if len(collections) == 1 and "sampler" not in stopper.processes:
            stopper.stop("sampler", [collections[0].engines.all[0].process.pid], sampling_s=2)
        if len(collections) == 2 and "verifier" not in stopper.processes:
            verifier = psutil.Process(ray.get(self._traced).pid)
            stopper.stop("verifier", [verifier.pid, *(worker.pid for worker in verifier.children())], verifying_s=2)
        return inner["submit"](self, finished, rewards)

    trained = {"steps": 0}

    def train_step(self, batches, learning_rate, *, diagnose):
        trained["steps"] += 1
        self.hangs = trained["steps"] == 4
        return inner["train_step"](self, batches, learning_rate, diagnose=diagnose)

    def get(self, calls, phase):
        if getattr(self, "hangs", False):
            self.hangs = False
            stopper.stop("learner rank", [process.pid for process in self.processes[1:]], updating_s=2)
        return inner["get"](self, calls, phase)

    def started(self):
        stopper.watch = self.placement.group.watch
        stopper.replaced()
        inner["start"](self)

    def restart_engine(self, engine, error):
        stopper.replaced()
        inner["engine"](self, engine, error)

    def restart_verifier(self, restarts, error):
        stopper.replaced()
        inner["verifier"](self, restarts, error)

    monkeypatch.setattr(RolloutPool, "collect", collect)
    monkeypatch.setattr(VerifierHandle, "submit", submit)
    monkeypatch.setattr(VerifierHandle, "_restart", restart_verifier)
    monkeypatch.setattr(LearnerGroup, "train_step", train_step)
    monkeypatch.setattr(LearnerGroup, "_get", get)
    monkeypatch.setattr(LearnerGroup, "start", started)
    monkeypatch.setattr(Engines, "restart", restart_engine)
    config = small_run(
        budget={"steps": 5},
        learner={"rule": {"name": "gxpo", "k": 3, "gate": {"mode": "never"}}, "optimizer": {"learning_rate": 1e-5}},
        placement={"learner_ranks": 2, "learner_cpus": 0.4, "learner_threads": 1},
    )
    assert train_run(config, tmp_path / "run") == "steps"
    assert set(stopper.processes) == {"sampler", "verifier", "learner rank"}
    rows = [row for row in read_metrics(tmp_path / "run") if "update/backward_passes" in row["metrics"]]
    assert [row["step"] for row in rows] == list(range(1, 6)), "no hole, no double"
    assert rows[-1]["metrics"]["update/backward_passes_total"] == 3 * 5
    assert rows[-1]["metrics"]["update/repeated_passes_total"] == 3
    events = read_events(tmp_path / "run")
    restarts = [(event["kind"], event["message"]) for event in events if event["kind"].endswith(("restarted", "died"))]
    assert [kind for kind, _ in restarts] == ["sampler_restarted", "verifier_restarted", "learner_died"], "each once"
    for (_, message), doing in zip(restarts, ("sampling", "verifying", "updating"), strict=True):
        assert f"while {doing} (timeouts.{doing}_s = 2)" in message
    log = capfd.readouterr().err
    for name in ("sampler", "verifier", "learner rank 1"):
        assert f"the stacks of the {name} follow\nit takes no signals" in log
    waiting = log.partition("the stacks of the learner rank 0 follow\n")[2].partition("the stacks of")[0]
    assert "learner/rank.py" in waiting, "its peer waits for it in a collective"
    assert "in train_step" in waiting
    _, alive = psutil.wait_procs([one for found in stopper.processes.values() for one in found], timeout=60)
    assert not alive, f"stopped processes are left: {alive}"
