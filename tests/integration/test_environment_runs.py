"""Whole runs and evaluations whose policy uses the calculator."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from docs_build.metrics import undescribed
from gxpo_trainer.cli import main
from gxpo_trainer.config import RunConfig
from gxpo_trainer.reporting.reading import read_evaluations, read_events, read_metrics, read_samples
from gxpo_trainer.training.run import train_run

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("ray_on_loopback")]
CALCULATION = re.compile(r"<calc>(\d+)([-+*])(\d+)</calc>")
SAMPLED, OBSERVED = 48, 12
ENVIRONMENT = {"name": "calculator", "max_turns": 4, "max_observation_tokens": OBSERVED}


def conversing(small_run: Any, **parts: Any) -> RunConfig:
    body = {"model": {"path": "starter-tools", "max_length": 224}, "environment": ENVIRONMENT, **parts}
    return small_run(**body)


def value(expression: re.Match[str]) -> int:
    a, operator, b = int(expression[1]), expression[2], int(expression[3])
    return a + b if operator == "+" else a - b if operator == "-" else a * b


def assert_is_a_conversation(row: dict[str, Any]) -> int:
    """A row of samples.jsonl whose observations are the values of its calculations; how many there were."""
    policy = [turn["text"] for turn in row["turns"] if turn["speaker"] == "policy"]
    assert row["response"] == "\n".join(policy)
    assert row["end"] in ("done", "max_turns", "length")
    assert row["sampled_length"] <= SAMPLED
    assert row["truncated"] == (row["end"] == "length")
    checked = 0
    observed = any(turn["speaker"] == "environment" for turn in row["turns"][:-1])
    assert (row["length"] > row["sampled_length"]) == observed
    for turn, answer in pairwise(row["turns"]):
        if answer["speaker"] == "environment":
            assert turn["speaker"] == "policy"
            assert answer["reward"] is None
            last = [*CALCULATION.finditer(turn["text"])][-1:]
            if last and turn["text"].endswith("</calc>"):
                assert answer["text"] == str(value(last[0]))
                checked += 1
    return checked


@pytest.mark.parametrize(
    "ahead", [False, pytest.param(True, marks=pytest.mark.long("a second whole run"))], ids=["strict", "ahead"]
)
def test_a_run_learns_from_conversations(tmp_path: Path, small_run: Any, ahead: bool) -> None:
    rollout = {"async_depth": 1, "update_in_flight": True} if ahead else {}
    evaluation = {"num_problems": 48, "samples_per_prompt": 4}
    config = conversing(small_run, rollout={"max_new_tokens": SAMPLED, **rollout}, evaluation=evaluation)
    assert train_run(config, tmp_path / "run") == "steps"
    rows = [row["metrics"] for row in read_metrics(tmp_path / "run") if row["step"] > 0]
    assert len(rows) == 3
    # Learner and sampler agree over all turns, where the sampler has the learner's weights.
    assert max(row["rollout/logprob_gap_mean"] for row in rows[: 1 if ahead else 3]) <= 1e-6
    for row in rows:
        assert 1 < row["env/turns_mean"] <= 4
        assert row["env/done_fraction"] > 0.5
        assert row["env/timeout_fraction"] == row["env/error_fraction"] == 0
        assert 0 < row["env/observation_tokens"] <= 3 * OBSERVED
        assert 0 < row["rollout/length_mean"] <= SAMPLED
        assert row["update/weights_changed_fraction"] > 0.5 or row is rows[0]
    assert not undescribed({name for row in rows for name in row})
    samples = read_samples(tmp_path / "run")
    assert len(samples) == 3 * 4 * 4
    assert sum(map(assert_is_a_conversation, samples)) > 12
    if ahead:
        spans = [row["versions"] for row in samples if "versions" in row]
        lengths = [row["length"] for row in samples if "versions" in row]
        assert [sum(count for _, count in parts) for parts in spans] == lengths
        assert all("rollout/staleness_mean" in row for row in rows)
    (record,) = read_evaluations(tmp_path / "run")
    assert record["environment"] == ENVIRONMENT
    # With the calculator this policy solves one problem in six, without it one in a hundred.
    assert record["scores"]["pass@1"] > 0.05
    assert not [event for event in read_events(tmp_path / "run") if event["kind"] in ("verifier_failed", "stalled")]


@pytest.mark.long("two evaluations in full")
def test_gxpo_eval_plays_in_the_environment(tmp_path: Path) -> None:
    common = ["eval", "--model", "starter-tools", "--benchmark", "word_problems", "--samples", "4", "--problems", "24"]
    played, single = tmp_path / "played.jsonl", tmp_path / "single.jsonl"
    environment = [
        "--set", "environment.name=calculator", "--set", f"environment.max_observation_tokens={OBSERVED}",
    ]  # fmt: skip
    assert main([*common, *environment, "--out", str(played)]) == 0
    assert main([*common, "--out", str(single), "--against", str(played)]) == 0
    with_tool, without = (json.loads(file.read_text()) for file in (played, single))
    assert with_tool["environment"] == ENVIRONMENT
    assert "environment" not in without
    assert with_tool["scores"]["pass@1"] > without["scores"]["pass@1"]
