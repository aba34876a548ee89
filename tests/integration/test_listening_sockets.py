"""What listens while a run of one learner rank trains. Two ranks: test_training_loop; `gxpo up`: test_up."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from support import sockets

from gxpo_trainer.training.controller import Controller
from gxpo_trainer.training.run import train_run

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("ray_on_loopback")]


@pytest.mark.long("two ranks listen on more")
def test_every_socket_of_a_run_is_known_and_on_loopback(
    tmp_path: Path, small_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[sockets.Listening] = []
    report = Controller._report

    def look(self: Controller, *arguments: Any) -> None:
        seen.extend(sockets.listening(os.getpid(), {os.getpid(): "driver"}))
        report(self, *arguments)

    monkeypatch.setattr(Controller, "_report", look)
    config = small_run(
        budget={"steps": 1},
        checkpoint={"every_steps": 0},
        placement={"learner_cpus": 0.4, "learner_threads": 1},
    )
    assert train_run(config, tmp_path / "run") == "steps"
    assert {"driver", "gcs_server", "raylet", "ray::SamplerActor", "ray::VerifierActor", "ray::LearnerRank"} <= {
        one.process for one in seen
    }
    sockets.check(seen, sockets.RUN)
