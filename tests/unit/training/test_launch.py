"""One launch: the folder is its own, the outcome records how it ended, SIGTERM and a takeover end it at a step."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from ray.exceptions import OutOfMemoryError
from support.ingest_server import IngestServer

from gxpo_trainer import cli
from gxpo_trainer.config import RunConfig
from gxpo_trainer.errors import ConfigError, Diverged, Interrupted, LearnerDied, TrainingError, VerifierFailed
from gxpo_trainer.learner.group import LearnerGroup
from gxpo_trainer.reporting.outcome import reason_of
from gxpo_trainer.reporting.reading import read_metrics
from gxpo_trainer.reporting.reporter import RunReporter
from gxpo_trainer.reporting.uploader import ServiceAddress
from gxpo_trainer.rollout.timeline import Timeline
from gxpo_trainer.runtime.locks import RunLock, process_start
from gxpo_trainer.runtime.placement import Placement
from gxpo_trainer.runtime.progress import ProgressWatch
from gxpo_trainer.runtime.ray_session import connect_ray
from gxpo_trainer.training import proofs
from gxpo_trainer.training.checkpoints import Checkpoint, next_attempt, repeated_passes
from gxpo_trainer.training.controller import Controller, Counters
from gxpo_trainer.training.launch import TERMINATED, Launch
from gxpo_trainer.types import Verdict


def service(server: IngestServer, attempt: int = 3) -> ServiceAddress:
    return ServiceAddress(server.url, "r", attempt, "secret")


def outcome(folder: Path) -> Any:
    path = folder / "outcome.json"
    return json.loads(path.read_text()) if path.exists() else None


def run_until(launch: Launch, error: BaseException, *, setting_up: bool = False) -> None:
    """A run that has begun and is ended by an error."""
    with launch, RunReporter(launch.out_dir) as reporter:
        launch.begin(reporter)
        launch.fail(error, setting_up=setting_up)
        raise error


HOLDER = """
import subprocess, sys, time
from pathlib import Path
from gxpo_trainer.runtime.locks import RunLock
lock = RunLock(Path(sys.argv[1]), wait_s=0)
lock.acquire()
child = subprocess.Popen(["sleep", "600"], close_fds=False)
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_folder_has_one_trainer_and_is_free_when_that_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        child = int(holder.stdout.readline())
        try:
            assert (tmp_path / ".lock").read_text() == f"{holder.pid} {process_start(holder.pid)}\n"
            with pytest.raises(TrainingError, match=f"in use by another trainer \\(process {holder.pid}\\)"):
                RunLock(tmp_path, wait_s=0).acquire()
            holder.kill()
            holder.wait()
            lock = RunLock(tmp_path, wait_s=30)
            lock.acquire()
            assert (tmp_path / ".lock").read_text() == f"{os.getpid()} {process_start(os.getpid())}\n"
            lock.release()
        finally:
            holder.kill()
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize(
    ("ended", "word", "ended_by"),
    [("tokens", "succeeded", "tokens"), ("pause", "paused", None), ("cancel", "cancelled", None)],
)
def test_the_outcome_records_how_a_run_ended(
    ended: str, word: str, ended_by: str | None, tmp_path: Path, server: IngestServer
) -> None:
    with Launch(tmp_path, service(server)) as launch:
        with RunReporter(tmp_path) as reporter:
            launch.begin(reporter)
            reporter.log_metrics(1, {"a": 1.0})
        launch.end(ended)
    written = outcome(tmp_path)
    assert [written[name] for name in ("attempt", "outcome", "ended_by", "reason")] == [3, word, ended_by, None]
    assert server.outcome == written
    assert [row["step"] for row in server.rows["metrics"]] == [1]
    assert launch.exit_code == 0


@pytest.mark.parametrize(
    ("error", "setting_up", "reason", "message"),
    [
        (Diverged("loss is NaN"), False, "diverged", "loss is NaN"),
        (RuntimeError("no such device"), True, "setup_failed", "RuntimeError: no such device"),
        # Databases cannot store NUL and lone surrogates.
        (ValueError("token a\0b\udc80c"), False, "training_error", r"ValueError: token a\x00b\udc80c"),
    ],
    ids=["of the run", "setting up", "not storable"],
)
def test_a_failure_is_recorded_on_disk_and_reported(
    error: Exception, setting_up: bool, reason: str, message: str, tmp_path: Path, server: IngestServer
) -> None:
    with pytest.raises(type(error)):
        run_until(Launch(tmp_path, service(server)), error, setting_up=setting_up)
    written = outcome(tmp_path)
    assert (written["outcome"], written["reason"], written["message"]) == ("failed", reason, message)
    assert server.outcome == written


def test_an_earlier_outcome_does_not_outlive_the_next_start(tmp_path: Path) -> None:
    with Launch(tmp_path) as launch, RunReporter(tmp_path) as reporter:
        launch.begin(reporter)
        launch.end("pause")
    assert outcome(tmp_path)["attempt"] == 1
    with pytest.raises(KeyboardInterrupt):
        run_until(Launch(tmp_path), KeyboardInterrupt())
    assert outcome(tmp_path) is None


def test_what_cannot_be_written_is_still_sent(tmp_path: Path, server: IngestServer, monkeypatch: Any) -> None:
    error = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("gxpo_trainer.training.launch.write_json", Mock(side_effect=error))
    with pytest.raises(OSError, match="No space"), Launch(tmp_path, service(server)):
        raise error
    assert (outcome(tmp_path), server.outcome["reason"]) == (None, "disk_full")


@pytest.mark.parametrize(("ended", "code"), [("pause", 143), ("steps", 0)])
def test_sigterm_pauses_without_an_outcome_a_run_that_has_not_succeeded(ended: str, code: int, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Launch(tmp_path) as launch, RunReporter(tmp_path) as reporter:
        launch.begin(reporter)
        assert launch.control_request() is None
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as Ray, which puts a handler of its own in place
        launch.watch_sigterm()
        os.kill(os.getpid(), signal.SIGTERM)
        assert launch.control_request() == "pause"
        launch.end(ended)
    assert launch.exit_code == code
    assert (outcome(tmp_path) is None) is (ended == "pause")
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_launch_that_was_taken_over_stops_and_reports_nothing_more(tmp_path: Path, server: IngestServer) -> None:
    server.token = "newer"

    def proceed() -> None:
        with Launch(tmp_path, service(server)) as launch, RunReporter(tmp_path) as reporter:
            launch.begin(reporter)
            while True:
                launch.control_request()
                time.sleep(0.01)

    with pytest.raises(TrainingError, match="another launch owns the run"):
        proceed()
    assert outcome(tmp_path) is None
    assert server.outcome is None


def train(*argv: str | Path) -> int:
    return cli.main(["train", *map(str, argv)])


def test_a_refused_config_is_reported_to_the_service(tmp_path: Path, server: IngestServer, capsys: Any) -> None:
    config, address = tmp_path / "config.toml", tmp_path / "service.json"
    config.write_text("seed = -1\n")
    address.write_text(json.dumps({"url": server.url, "run": "r", "attempt": 1, "token": "secret"}))
    assert train(config, "--out", tmp_path, "--continue", "--service", address) == 2
    assert "seed = -1" in capsys.readouterr().err
    assert outcome(tmp_path)["reason"] == "invalid_config"
    assert "seed = -1" in server.outcome["message"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "config.toml", "outcome.json"]
    assert train(config, "--service", address) == 2
    assert "--service requires --out" in capsys.readouterr().err


STALLS = """
import sys, time
from pathlib import Path
from gxpo_trainer.config import TimeoutsConfig
from gxpo_trainer.reporting.reporter import RunReporter
from gxpo_trainer.reporting.uploader import ServiceAddress
from gxpo_trainer.training.launch import Launch
from gxpo_trainer.runtime.progress import ProgressWatch, Watchdog

def hang_in_a_write():
    time.sleep(600)

watch = ProgressWatch(TimeoutsConfig(checkpointing_s=0.2))
service = ServiceAddress(sys.argv[2], "r", 3, "secret")
with Launch(Path(sys.argv[1]), service) as launch, RunReporter(launch.out_dir) as reporter:
    launch.begin(reporter)
    reporter.log_metrics(1, {"x": 1.0})
    with Watchdog(watch, launch.end_stalled, launch.show_idle, grace_s=0.1, poll_s=0.05):
        watch.begin("checkpointing")
        hang_in_a_write()
"""


def test_a_trainer_that_hangs_logs_its_stacks_and_ends_recoverably(tmp_path: Path, server: IngestServer) -> None:
    words = [sys.executable, "-c", STALLS, str(tmp_path / "run"), server.url]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert "hang_in_a_write" in ended.stderr, "the stack of the main thread"
    written = outcome(tmp_path / "run")
    assert (written["outcome"], written["reason"], written["recoverable"]) == ("failed", "stalled", True)
    assert "while checkpointing (timeouts.checkpointing_s = 0.2)" in written["message"]
    assert [row["metrics"] for row in server.rows["metrics"]] == [{"x": 1.0}], "rows of a hanging trainer still arrive"
    assert server.outcome == written


def checkpoint(folder: Path, attempt: int, passes: float) -> Checkpoint:
    return Checkpoint(folder, 2, {"attempt": attempt, "counters": {"backward_passes": passes}})


def test_an_attempt_is_above_all_that_have_begun_and_counts_what_it_repeats(tmp_path: Path) -> None:
    assert next_attempt(tmp_path, None) == 1
    assert repeated_passes(tmp_path, None) == 0
    with RunReporter(tmp_path) as made:
        made.start_attempt(1, 0)
        for step in range(1, 6):
            made.log_metrics(step, {"update/backward_passes_total": 3.0 * step})
        made.log_metrics(5, {"eval/x/pass@1": 0.5})
    # Killed after step 5; the checkpoint is of step 2: nine passes are done again.
    assert next_attempt(tmp_path, checkpoint(tmp_path, 1, 6.0)) == 2
    assert repeated_passes(tmp_path, checkpoint(tmp_path, 1, 6.0)) == 9
    with RunReporter(tmp_path) as made:
        made.start_attempt(2, 2)
        made.log_metrics(3, {"update/backward_passes_total": 9.0, "update/repeated_passes_total": 9.0})
    # Killed again before the next checkpoint: three more, and the number 2 is used up.
    assert next_attempt(tmp_path, checkpoint(tmp_path, 1, 6.0)) == 3
    assert [next_attempt(tmp_path, None, after=received) for received in (1, 4)] == [3, 5]
    assert repeated_passes(tmp_path, checkpoint(tmp_path, 1, 6.0)) == 12
    assert repeated_passes(tmp_path, None) == 18
    assert [(row["step"], row["attempt"]) for row in read_metrics(tmp_path)] == [(1, 1), (2, 1), (3, 2)]


# SIGTERM during a run: what is given up, what a checkpoint then contains, and when the process ends in any case.


class Interrupting:
    """A run after step 3, and SIGTERM at one moment of it: a start, a batch, an evaluation or a recovery."""

    def __init__(self, moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.moment, self.request, self.cursor = moment, None, 30
        self.saved: list[tuple[int, dict[str, Any]]] = []
        config = RunConfig.model_validate({"evaluation": {"at_start": False, "every_steps": 3}})
        pool = Mock(timeline=Timeline(), group=Mock(watch=ProgressWatch()))
        runtime: Any = Mock(config=config, pool=pool, rollouts=self)
        evaluator: Any = Mock(run=lambda *_, **__: self.interrupt("evaluation"))
        store: Any = Mock(save=lambda step, state, *_, **__: self.saved.append((step, state)))
        reporter: Any = Mock(out_dir=tmp_path)
        requested: Any = lambda: self.request  # noqa: E731
        self.controller = Controller(runtime, evaluator, reporter, store, Mock(), control_request=requested)
        self.controller.counters = Counters(step=3)
        monkeypatch.setattr(self.controller, "_start", lambda _: self.interrupt("start"))
        monkeypatch.setattr(self.controller, "_recover", lambda _: self.interrupt("recovery"))
        if moment == "evaluation":
            monkeypatch.setattr(self.controller, "step", self.controller._evaluate)

    def interrupt(self, moment: str) -> Any:
        if moment == self.moment:
            self.request = "pause"
            raise Interrupted

    def batch(self, step: int) -> Any:
        assert step == 4
        self.cursor += 8
        self.interrupt("batch")
        raise LearnerDied

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": self.cursor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.cursor = state["cursor"]

    def discard(self) -> None: ...


@pytest.mark.parametrize("moment", ["batch", "evaluation", "start", "recovery"])
def test_samples_are_given_up_for_a_checkpoint_but_not_a_learner_that_is_not_there(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Interrupting(moment, tmp_path, monkeypatch)
    assert run.controller.run(None) == "pause"
    if moment in ("start", "recovery"):
        assert run.saved == []
        return
    ((step, state),) = run.saved
    assert (step, state["counters"]["step"]) == (3, 3)
    assert state["cursor"] == {"cursor": 30}, "the prompts of step 4 are drawn again"
    assert state["evaluation_owed"]


@pytest.mark.parametrize(("due", "deaths"), [(True, 0), (True, 1), (False, 0)])
def test_a_resumed_run_begins_with_the_evaluation_that_is_still_due_also_when_the_learner_dies_in_it(
    due: bool, deaths: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Interrupting("never", tmp_path, monkeypatch)
    evaluated: list[int] = []

    def evaluate() -> None:
        evaluated.append(run.controller.counters.step)
        if len(evaluated) <= deaths:
            raise LearnerDied

    monkeypatch.setattr(run.controller, "_evaluate", evaluate)
    monkeypatch.setattr(run.controller, "_next", lambda: "steps")
    assert run.controller.run(Checkpoint(tmp_path, 3, {"evaluation_owed": due})) == "steps"
    assert evaluated == [3] * (due + deaths)


FINISHED = RunConfig.model_validate({"budget": {"steps": 2}})


@pytest.mark.parametrize(
    ("score", "saved_by", "evaluations"), [(0.5, FINISHED, 0), (None, FINISHED, 1), (0.5, RunConfig(), 1)]
)
def test_a_finished_run_is_not_evaluated_again_unless_its_settings_changed(
    score: float | None, saved_by: RunConfig, evaluations: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a score it was killed between its last checkpoint and the evaluation after it."""
    state = {"attempt": 1, "rule": {}, "cursor": {}, "counters": asdict(Counters(step=2)), "score": score}
    saved = Checkpoint(tmp_path, 2, {**state, "evaluation_owed": False, "config_sha256": saved_by.sha256()})
    monkeypatch.setattr(proofs, "canary", Mock())
    pool = Mock(timeline=Timeline(), group=Mock(watch=ProgressWatch()), engines=Mock(ready=[]))
    learners, rollouts = Mock(nodes=list, load=lambda *_: None), Mock(sync=lambda _: None)
    runtime: Any = Mock(config=FINISHED, pool=pool, learners=learners, rollouts=rollouts)
    evaluator: Any = Mock(run=Mock(return_value=([], {"eval/average/pass@1": 0.7})))
    store: Any = Mock()
    assert Controller(runtime, evaluator, Mock(out_dir=tmp_path), store, Mock()).run(saved) == "steps"
    assert evaluator.run.call_count == store.record_score.call_count == rollouts.finish.call_count == evaluations
    store.save.assert_not_called()


@pytest.mark.parametrize("moment", ["start", "canary"])
def test_a_learner_that_dies_while_it_starts_is_started_again(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"attempt": 1, "rule": {}, "cursor": {}, "counters": asdict(Counters(step=2, backward_passes=6.0))}
    saved = Checkpoint(tmp_path, 2, {**state, "evaluation_owed": False})
    died = LearnerDied("killed")
    monkeypatch.setattr(proofs, "canary", Mock(side_effect=[died, None] if moment == "canary" else [None]))

    def controller(**placement: int) -> Controller:
        pool = Mock(timeline=Timeline(), group=Mock(watch=ProgressWatch()), engines=Mock(ready=[]))
        learners = Mock(start=Mock(side_effect=died if moment == "start" else None), nodes=list, load=lambda *_: None)
        config = RunConfig.model_validate({"placement": placement})
        runtime: Any = Mock(config=config, pool=pool, learners=learners, rollouts=Mock(sync=lambda _: None))
        reporter, store = Mock(out_dir=tmp_path), Mock(latest_valid=lambda: (saved, []))
        return Controller(runtime, Mock(), reporter, store, Mock(), repeated_passes=9.0)

    run = controller()
    monkeypatch.setattr(run, "_next", lambda: "steps")
    assert run.run(saved) == "steps"
    assert (run.ready, run.attempt) == (True, 2)
    # Of steps that the attempts before spent: this one has not begun any.
    assert (run.counters.backward_passes, run.counters.repeated_passes) == (6, 9)
    monkeypatch.setattr(proofs, "canary", Mock(side_effect=died))
    with pytest.raises(TrainingError, match=r"the learner died 1 times \(killed\); see events\.jsonl"):
        controller(max_restarts=0).run(saved)


def test_a_run_that_does_not_end_after_sigterm_exits_at_the_limit(tmp_path: Path) -> None:
    program = """
        import pathlib, sys, time
        from gxpo_trainer.training.launch import Launch
        with Launch(pathlib.Path(sys.argv[1])) as launch:
            launch.enter_phase("training")
            print("ready", flush=True)
            while True:
                time.sleep(1)
    """.replace("\n        ", "\n")
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", program, str(tmp_path)]
    process = subprocess.Popen(command, env={"GXPO_STOP_WAIT_S": "0.2"}, **pipes)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == TERMINATED == 143
    assert "not ended 0.2 s after SIGTERM, while training; --resume continues from the last checkpoint" in printed


def test_a_limit_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("0", "-3", "soon", "nan", "inf"):
        monkeypatch.setenv("GXPO_STOP_WAIT_S", value)
        with pytest.raises(ConfigError, match=rf"GXPO_STOP_WAIT_S = '{value}' must be a number of seconds above 0"):
            Launch(tmp_path)


def test_ranks_that_are_still_being_built_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a rank answers after its set-up, which may take minutes; Ctrl-C would seem not to work."""
    config = RunConfig()
    group = LearnerGroup(config, Placement.decide(config))
    killed: list[Any] = []
    monkeypatch.setattr("gxpo_trainer.learner.group.ray.kill", lambda rank, **_: killed.append(rank))
    group.ranks = ["a rank without methods"]
    group.close()
    assert killed == ["a rank without methods"]
    assert group.ranks == []


def test_a_rank_that_was_killed_for_memory_is_a_learner_that_died(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig()
    group = LearnerGroup(config, Placement.decide(config), wait_for_one=lambda calls, _: calls)
    killed = OutOfMemoryError("low on memory\ndetails")
    monkeypatch.setattr("gxpo_trainer.learner.group.result_of", Mock(side_effect=killed))
    group.ranks = [Mock()]
    with pytest.raises(LearnerDied, match="low on memory") as died:
        group.trim()
    assert reason_of(died.value) == "out_of_memory"


def test_a_run_goes_on_without_a_checkpoint_but_does_not_end_without_the_last_one(tmp_path: Path) -> None:
    runtime: Any = Mock(config=RunConfig())
    reporter: Any = Mock(out_dir=tmp_path)
    store: Any = Mock(save=Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    controller = Controller(runtime, Mock(), reporter, store, Mock())
    controller._checkpoint()
    kind, message = reporter.log_event.call_args.args
    assert (kind, message.partition(": ")[0]) == ("checkpoint_failed", "step 0")
    reporter.log_metrics.assert_not_called()
    with pytest.raises(TrainingError, match=r"last checkpoint at step 0 could not be written: .*No space left.*free"):
        controller._checkpoint(last=True)


def test_a_checkpoint_gets_the_score_of_an_evaluation_after_it(tmp_path: Path) -> None:
    config = RunConfig.model_validate({"budget": {"steps": 2}})
    pool = Mock(timeline=Timeline(), group=Mock(watch=ProgressWatch()))
    runtime: Any = Mock(config=config, pool=pool)
    evaluator: Any = Mock(run=lambda *_, **__: ([], {"eval/average/pass@1": 0.5}))
    store: Any = Mock()
    controller = Controller(runtime, evaluator, Mock(out_dir=tmp_path), store, Mock(), control_request=lambda: None)
    controller.counters = Counters(step=2)
    controller._checkpoint()
    assert controller._next() == "steps"
    assert store.save.call_args.kwargs == {"score": None}
    store.record_score.assert_called_once_with(2, 0.5)


def test_a_step_reports_the_seconds_of_both_its_syncs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig.model_validate({"checkpoint": {"every_steps": 0}, "evaluation": {"every_steps": 0}})
    pool = Mock(timeline=Timeline(), group=Mock(watch=ProgressWatch()), engines=Mock(all=[0]))
    controller = Controller(Mock(config=config, pool=pool), Mock(), Mock(out_dir=tmp_path), Mock(), Mock())
    reported: list[Any] = []
    monkeypatch.setattr(controller, "_learn_rewards", lambda *_: (Mock(diagnostics_s=0.0), {"time/sync_s": 3.0}))
    monkeypatch.setattr(controller, "_report", lambda _, metrics, *__: reported.append(metrics["time/sync_s"]))
    for synced in ({"time/sync_s": 2.0}, {}):
        monkeypatch.setattr(controller, "_sync", lambda synced=synced: {**synced})
        controller.step()
    assert reported == [5.0, 3.0]


def test_the_responses_of_a_step_that_nothing_judges_are_kept() -> None:
    config = RunConfig()
    verdicts = (Verdict("error", None, 0.0, "no judge"),) * 2
    rollouts: Any = Mock(sampled=[Mock(verdicts=verdicts)])
    runtime: Any = Mock(config=config, rollouts=Mock(sync_due=False))
    reporter: Any = Mock()
    controller = Controller(runtime, Mock(), reporter, Mock(), Mock())
    with pytest.raises(VerifierFailed, match=r"2 of 2 responses have no reward .* 2 error, last: 'no judge'"):
        controller._learn_rewards(1, rollouts)
    reporter.log_samples.assert_called_once_with(1, rollouts.sampled)


def test_signals_end_the_process_while_ray_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler of Python would run only when Ray's call returns, after up to 30 s."""
    monkeypatch.setattr(os, "environ", {})
    seen: list[Any] = []
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    def init(**_: Any) -> None:
        seen.extend(signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM))

    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", init)
    assert connect_ray(Placement.decide(RunConfig()))
    assert seen == [signal.SIG_DFL, signal.SIG_DFL]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
