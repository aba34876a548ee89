"""kill -9 and SIGSTOP of each kind of process in the middle of a step of a real run: nothing is lost, nothing counted
twice.

A stopped process sends nothing and closes nothing, like one that hangs in a driver or a collective.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import ray
from safetensors.torch import load_file
from support.rollouts import trained_rows
from test_training_loop import assert_merged, train_listening

from gxpo_trainer.config import TimeoutsConfig
from gxpo_trainer.learner.group import LearnerGroup
from gxpo_trainer.learner.models import STARTER_FOLDER
from gxpo_trainer.reporting.reading import read_evaluations, read_events, read_metrics
from gxpo_trainer.rollout.engines import Engines
from gxpo_trainer.rollout.pool import RolloutPool
from gxpo_trainer.rollout.verification import VerifierHandle
from gxpo_trainer.training.run import train_run

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("ray_on_loopback")]
GXPO = {"rule": {"name": "gxpo", "k": 3, "gate": {"mode": "never"}}, "optimizer": {"learning_rate": 1e-5}}


class Faults:
    """Strikes once at each of these moments, by number.

    at_groups: of a collection, when its first groups are complete and the sampler works on the others. at_verdicts: of
    a collection, while they are awaited. in_step: of the learner, while its ranks update.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at_groups: dict[int, Callable[[VerifierHandle], None]] = {}
        self.at_verdicts: dict[int, Callable[[VerifierHandle], None]] = {}
        self.in_step: dict[int, Callable[[LearnerGroup], None]] = {}
        self._collections = self._steps = 0
        self._patch = monkeypatch
        self.before(RolloutPool, "collect", self._collect)
        self.before(VerifierHandle, "submit", lambda handle: self._strike(self.at_groups, self._collections, handle))
        self.before(VerifierHandle, "await_verdicts", lambda h: self._strike(self.at_verdicts, self._collections, h))
        self.before(LearnerGroup, "train_step", self._train_step)
        self.before(LearnerGroup, "_get", lambda learners: self._strike(self.in_step, self._steps, learners))

    def before(self, owner: type, method: str, action: Callable[[Any], object]) -> None:
        """Call `action` with the object before each call of its method."""
        inner = getattr(owner, method)

        def call(subject: Any, *arguments: Any, **options: Any) -> Any:
            action(subject)
            return inner(subject, *arguments, **options)

        self._patch.setattr(owner, method, call)

    @property
    def sampler(self) -> int:
        """Process id of the first engine."""
        return int(self._pool.engines.all[0].process.pid)

    def _collect(self, pool: Any) -> None:
        self._pool = pool
        self._collections += 1

    def _train_step(self, learners: LearnerGroup) -> None:
        self._steps += 1

    def _strike(self, moments: dict[int, Callable[[Any], None]], number: int, subject: Any) -> None:
        if action := moments.pop(number, None):
            action(subject)

    @property
    def done(self) -> bool:
        return not (self.at_groups or self.at_verdicts or self.in_step)


def verifier_of(handle: VerifierHandle) -> psutil.Process:
    return psutil.Process(ray.get(handle._traced).pid)


def steps_once(rows: list[dict[str, Any]], steps: int) -> None:
    """All steps, of three passes each; one of them was repeated."""
    assert [row["step"] for row in rows] == list(range(1, steps + 1)), "no hole, no double"
    assert rows[-1]["metrics"]["update/backward_passes_total"] == 3 * steps
    assert rows[-1]["metrics"]["update/repeated_passes_total"] == 3


def test_sampler_verifier_worker_verifier_and_learner_are_killed_in_mid_step(tmp_path, small_run, monkeypatch):
    """One run with LoRA and a KL term, four kills. Checkpoints at steps 2 and 4; the learner dies in step 4: step 3 is
    repeated."""

    def kill_workers(handle: VerifierHandle) -> None:
        for worker in verifier_of(handle).children():
            worker.kill()

    faults = Faults(monkeypatch)
    faults.at_groups = {1: lambda _: os.kill(faults.sampler, signal.SIGKILL), 2: kill_workers}
    faults.at_verdicts = {3: lambda handle: ray.kill(handle.actor)}
    faults.in_step = {4: lambda learners: os.kill(learners.processes[0].pid, signal.SIGKILL)}
    learner = {**GXPO, "lora": {"rank": 4, "alpha": 8}, "loss": {"kl_beta": 0.01}, "optimizer": {"learning_rate": 1e-3}}
    out = tmp_path / "run"
    train_listening(small_run(budget={"steps": 4}, learner=learner), out)
    assert faults.done
    rows = trained_rows(out)
    steps_once(rows, 4)
    assert [row["attempt"] for row in rows[1:3]] == [1, 2]
    kinds = [event["kind"] for event in read_events(out)]
    assert {"sampler_restarted", "verifier_restarted", "learner_died"} <= set(kinds)
    assert max(row["metrics"]["rollout/logprob_gap_max"] for row in rows) <= 1e-4
    assert max(row["metrics"]["rollout/logprob_gap_mean"] for row in rows) <= 1e-6
    assert rows[-1]["metrics"]["policy/kl"] > 0
    assert_merged(out / "checkpoints" / "step-00000004")
    assert [row["step"] for row in read_evaluations(out)] == [4], "at the end, also where none is due"


@pytest.mark.long("the kill of another source of samples")
def test_weights_learned_from_completions_survive_a_kill_to_the_bit(tmp_path, small_run, monkeypatch):
    """Of a warm start and the step after it. A checkpoint at step 2; the learner dies in step 3."""
    config = small_run(
        learner=GXPO,
        rollout={"deterministic": True},
        evaluation={"benchmarks": []},
        budget={"steps": 1},
        warm_start={"steps": 3, "rows_per_step": 8, "learning_rate": 1e-3},
    )
    policies = []
    for name in ("whole", "killed"):
        if name == "killed":
            faults = Faults(monkeypatch)
            faults.in_step = {3: lambda learners: os.kill(learners.processes[0].pid, signal.SIGKILL)}
        out = tmp_path / name
        assert train_run(config, out) == "steps"
        policies.append(load_file(out / "checkpoints" / "step-00000004" / "policy" / "model.safetensors"))
        last = read_metrics(out)[-1]["metrics"]
        assert last["update/backward_passes_total"] == last["warm_start/backward_passes_total"] == 3
    assert faults.done
    whole, killed = policies
    start = load_file(STARTER_FOLDER / "model.safetensors")
    for tensor, value in whole.items():
        assert killed[tensor].equal(value), tensor
        assert not value.equal(start[tensor]), tensor


@pytest.mark.long("chaos at length")
def test_a_sampler_a_verifier_and_a_learner_rank_hang_in_mid_step(tmp_path, small_run, monkeypatch, capfd):
    """One run of two learner ranks, three hangs. Checkpoints at steps 2 and 4; the rank hangs in step 4, so step 3 is
    repeated. Time-outs are short from a stop until the process is replaced: no limit of this test is ever near what a
    loaded machine needs."""
    faults = Faults(monkeypatch)
    processes: list[psutil.Process] = []
    watches: list[Any] = []

    def stop(stopped: list[psutil.Process], **limit: float) -> None:
        processes.extend(stopped)
        watches[-1].timeouts = TimeoutsConfig(**limit)
        for process in stopped:
            process.suspend()

    def replaced(_: Any) -> None:
        watches[-1].timeouts = TimeoutsConfig()

    def stop_verifier(handle: VerifierHandle) -> None:
        verifier = verifier_of(handle)
        stop([verifier, *verifier.children()], verifying_s=2)

    def started(learners: LearnerGroup) -> None:
        watches.append(learners.placement.group.watch)
        replaced(learners)

    faults.before(LearnerGroup, "start", started)
    faults.before(Engines, "restart", replaced)
    faults.before(VerifierHandle, "_restart", replaced)
    faults.at_groups = {1: lambda _: stop([psutil.Process(faults.sampler)], sampling_s=2), 2: stop_verifier}
    faults.in_step = {4: lambda learners: stop([psutil.Process(learners.processes[1].pid)], updating_s=2)}
    placement = {"learner_ranks": 2, "learner_cpus": 0.4, "learner_threads": 1}
    out = tmp_path / "run"
    assert train_run(small_run(budget={"steps": 5}, learner=GXPO, placement=placement), out) == "steps"
    assert faults.done
    steps_once(trained_rows(out), 5)
    events = [event for event in read_events(out) if event["kind"].endswith(("restarted", "died"))]
    assert [event["kind"] for event in events] == ["sampler_restarted", "verifier_restarted", "learner_died"]
    for event, doing in zip(events, ("sampling", "verifying", "updating"), strict=True):
        assert f"while {doing} (timeouts.{doing}_s = 2)" in event["message"]
    log = capfd.readouterr().err
    for name in ("sampler", "verifier", "learner rank 1"):
        assert f"the stacks of the {name} follow\nit takes no signals" in log
    waiting = log.partition("the stacks of the learner rank 0 follow\n")[2].partition("the stacks of")[0]
    assert "learner/rank.py" in waiting, "its peer waits for it in a collective"
    assert "in train_step" in waiting
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive, f"stopped processes are left: {alive}"
