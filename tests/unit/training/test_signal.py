"""A run without signal warns once, with what to do."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from gxpo_trainer.config import BudgetConfig, RunConfig
from gxpo_trainer.reporting.reading import read_events, read_metrics
from gxpo_trainer.reporting.reporter import RunReporter
from gxpo_trainer.runtime.progress import ProgressWatch
from gxpo_trainer.training.controller import Controller, component_means, no_signal, source_metrics
from gxpo_trainer.training.progress import TrainingProgress
from gxpo_trainer.types import Group, Prompt, ScoredGroup, Verdict

NOTHING = {"reward/zero_variance_fraction": 0.97, "rollout/truncated_fraction": 0.0, "reward/correctness": 0.0}


def test_five_steps_without_signal_are_an_event_a_metric_and_a_line_once_until_there_is_signal(tmp_path: Path) -> None:
    stream, unused = io.StringIO(), cast(Any, None)
    parts: Any = SimpleNamespace(
        config=RunConfig(), watch=ProgressWatch(), learners=None, pool=None, planner=None, rollouts=None
    )
    result: Any = SimpleNamespace(backward_passes=1.0, update_s=1.0, peak_bytes=0, fallback=None)
    shares = [0.97] * 7 + [0.9] + [1.0] * 5
    with RunReporter(tmp_path) as reporter:
        progress = TrainingProgress(BudgetConfig(steps=20), stream=stream)
        controller = Controller(parts, unused, reporter, unused, progress)
        for step, share in enumerate(shares, start=1):
            controller.host.begin_step()
            metrics = NOTHING | {"reward/zero_variance_fraction": share}
            controller._report(step, metrics, result, 1.0)
    assert [(event["kind"], event["step"]) for event in read_events(tmp_path)] == [("no_signal", 5), ("no_signal", 13)]
    flagged = [row["step"] for row in read_metrics(tmp_path) if "reward/no_signal" in row["metrics"]]
    assert flagged == [5, 6, 7, 13]
    assert stream.getvalue().count("train: step 5: no signal for 5 steps") == 1


def test_each_source_has_its_reward_and_components_count_where_they_judge() -> None:
    def scored(source: str, *values: dict[str, float] | None) -> ScoredGroup:
        verdicts = tuple(
            Verdict("error", None, 0.0)
            if v is None
            else Verdict("wrong", None, 0.0, components=v, score=sum(v.values()))
            for v in values
        )
        return ScoredGroup(Group(Prompt("p", "", "", source=source), np.zeros(1, np.int32), (), 0), verdicts)

    groups = [
        scored("a", {"correctness": 1.0}, {"correctness": 0.0}),
        scored("a", {"correctness": 1.0}, {"correctness": 1.0}),
        scored("b", {"format": 0.5}, None),
        scored("c", None, None),
    ]
    assert source_metrics(groups) == {
        "reward/source/a": 0.75,
        "reward/source/a/zero_variance_fraction": 0.5,
        "reward/source/b": 0.5,
        "reward/source/b/zero_variance_fraction": 1.0,
    }
    assert component_means(groups) == {"reward/format": 0.5}
    assert source_metrics([scored("", {"format": 1.0})]) == {}


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({}, "97% of the groups, which have no gradient. 0% of the responses are correct: choose easier"),
        ({"reward/correctness": 1.0}, "100% of the responses are correct: choose harder problems"),
        ({"rollout/truncated_fraction": 0.8}, "80% of the responses are truncated: raise rollout.max_new_tokens. 0%"),
    ],
)
def test_the_warning_says_what_to_do(metrics: dict[str, float], words: str) -> None:
    assert words in no_signal(NOTHING | metrics)
