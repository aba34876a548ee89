"""SIGTERM during a run: what is given up, what a checkpoint then contains, and when the process ends in any case."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gxpo_trainer.config import RunConfig
from gxpo_trainer.errors import ConfigError, Interrupted, LearnerDied
from gxpo_trainer.learner.group import LearnerGroup
from gxpo_trainer.rollout.timeline import Timeline
from gxpo_trainer.runtime.placement import Placement
from gxpo_trainer.runtime.progress import ProgressWatch
from gxpo_trainer.runtime.ray_session import connect_ray
from gxpo_trainer.training.controller import Controller, Counters
from gxpo_trainer.training.launch import TERMINATED, Launch


class Interrupting:
    """A run after step 3, and SIGTERM at one moment of it: a start, a batch, an evaluation or a recovery."""

    def __init__(self, moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.moment, self.request, self.cursor = moment, None, 30
        self.saved: list[tuple[int, dict[str, Any]]] = []
        config = RunConfig.model_validate({"evaluation": {"at_start": False, "every_steps": 3}})
        runtime: Any = SimpleNamespace(
            config=config,
            watch=ProgressWatch(),
            learners=SimpleNamespace(save=None),
            pool=SimpleNamespace(timeline=Timeline()),
            planner=None,
            rollouts=self,
        )
        ignore = lambda *_, **__: None  # noqa: E731
        reporter: Any = SimpleNamespace(out_dir=tmp_path, sync=ignore, log_event=ignore, log_metrics=ignore)
        evaluator: Any = SimpleNamespace(run=lambda *_, **__: self.interrupt("evaluation"))
        store: Any = SimpleNamespace(save=lambda step, state, *_, **__: self.saved.append((step, state)))
        self.controller = Controller(
            runtime, evaluator, reporter, store, cast(Any, None), control_request=lambda: cast(Any, self.request)
        )
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
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == TERMINATED == 143
    assert "not ended 0.2 s after SIGTERM, while training; --resume continues from the last checkpoint" in printed


@pytest.mark.parametrize("value", ["0", "-3", "soon", "nan", "inf"])
def test_a_limit_that_is_none_is_refused(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
