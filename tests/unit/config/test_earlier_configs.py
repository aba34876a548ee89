"""Configs that an earlier version has stored are still read: a service keeps them for years."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.io import build

RECORDINGS = Path(__file__).parents[2] / "browser" / "recordings"


@pytest.mark.parametrize("name", ["demo", "demo-grpo"])
def test_the_config_of_a_recorded_run_is_read(name: str) -> None:
    stored = json.loads((RECORDINGS / name / "run.json").read_text(encoding="utf-8"))["config"]
    found = RunConfig.model_validate(stored)
    assert (found.name, found.learner.rule.name) == (stored["name"], stored["learner"]["rule"]["name"])
    assert (found.learner.loss.correction, found.learner.loss.importance_high) == ("auto", 2.0)


def test_a_cap_of_importance_weights_is_a_truncation() -> None:
    loss = build({"learner": {"loss": {"importance_cap": 3.0}}}).learner.loss
    assert (loss.correction, loss.importance_high) == ("token_truncate", 3.0)
    assert build({}, ["learner.loss.correction=none"]).learner.loss.correction == "none"
    assert build({"learner": {"loss": {"importance_cap": "none"}}}) == build({})
