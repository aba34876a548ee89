"""A run whose checkpoints cannot be written, on real engines."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from gxpo_trainer.errors import TrainingError
from gxpo_trainer.learner.group import LearnerGroup
from gxpo_trainer.reporting.reading import read_events, read_metrics
from gxpo_trainer.training.launch import Launch
from gxpo_trainer.training.run import train_run

pytestmark = [
    pytest.mark.engine,
    pytest.mark.usefixtures("ray_on_loopback"),
    pytest.mark.long("a whole run of what test_learner_group proves"),
]


def limit_files(num_bytes: int) -> Callable[[Any], None]:
    """For an actor: files may have this many bytes; writing more fails as on a full disk."""
    return lambda actor: resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


@pytest.mark.parametrize("ended", ["steps", "pause"])
def test_a_run_goes_on_without_a_checkpoint_but_does_not_end_without_the_last_one(
    tmp_path: Path, small_run: Any, monkeypatch: pytest.MonkeyPatch, ended: str
) -> None:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    save, train_step, steps = LearnerGroup.save, LearnerGroup.train_step, []

    def limited(self: LearnerGroup, folder: Path) -> dict[str, Any]:
        """Buckets of weights are files too, so the limit holds for a checkpoint alone."""
        try:
            self.ranks[0].__ray_call__.remote(limit_files(1000))
            return save(self, folder)
        finally:
            self.ranks[0].__ray_call__.remote(limit_files(resource.RLIM_INFINITY))

    def trained(self: LearnerGroup, *arguments: Any, **options: Any) -> Any:
        steps.append(self)
        return train_step(self, *arguments, **options)

    monkeypatch.setattr(LearnerGroup, "save", limited)
    monkeypatch.setattr(LearnerGroup, "train_step", trained)
    if ended == "pause":
        monkeypatch.setattr(Launch, "control_request", lambda self: "pause" if len(steps) == 3 else None)
    config = small_run(budget={"steps": 3 if ended == "steps" else 9})
    with pytest.raises(TrainingError, match=r"last checkpoint at step 3 could not be written: .*File too large"):
        train_run(config, tmp_path / "run")
    outcome = json.loads((tmp_path / "run" / "outcome.json").read_text(encoding="utf-8"))
    assert outcome["outcome"] == "failed"
    assert [event["step"] for event in read_events(tmp_path / "run") if event["kind"] == "checkpoint_failed"] == [2, 3]
    assert read_metrics(tmp_path / "run")[-1]["step"] == 3
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
