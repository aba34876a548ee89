"""The order in which a run's engines and learner start where they share GPUs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from gxpo_trainer.config import RunConfig
from gxpo_trainer.data.prompts import TokenizedPrompts
from gxpo_trainer.rollout.engines import Engines
from gxpo_trainer.runtime.placement import Placement
from gxpo_trainer.training.controller import Controller
from gxpo_trainer.training.runtime import Fit, build_runtime
from gxpo_trainer.types import Prompt


class LearnerStarted(Exception):
    """A learner rank was about to start."""


@pytest.mark.parametrize("resident", [True, False])
def test_engines_measure_their_gpus_before_a_learner_rank_starts(
    resident: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM sizes its KV cache by the device's free memory, so a learner that loads meanwhile would shrink it."""
    config = RunConfig.model_validate({"placement": {"colocate": True}})
    placement = Placement.decide(config)
    prompts = TokenizedPrompts((Prompt("0", "", ""),), (np.ones(3, np.int32),), 0)
    runtime = build_runtime(config, placement, "model", prompts, lambda *_, **__: None, fit=Fit(resident))
    log: list[str] = []

    def start_rank(*_: Any, **__: Any) -> None:
        raise LearnerStarted

    monkeypatch.setattr("gxpo_trainer.learner.group.ray.remote", start_rank)
    monkeypatch.setattr(runtime.pool, "start", lambda: log.append("engines start"))
    monkeypatch.setattr(Engines, "await_ready", lambda self, *, every: log.append(f"await every engine: {every}"))
    unused = cast(Any, SimpleNamespace(out_dir=tmp_path))
    controller = Controller(runtime, unused, unused, unused, unused)
    with pytest.raises(LearnerStarted):
        controller.run(None)
    assert log == ["engines start", "await every engine: True"]
