"""Whole runs and evaluations with the calculator, built in and as an agent, and their agreement."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from test_training_loop import train_listening

from docs_build.metrics import undescribed
from gxpo_trainer.cli import main
from gxpo_trainer.config import RunConfig
from gxpo_trainer.reporting.reading import read_evaluations, read_events, read_metrics, read_samples
from gxpo_trainer.training.run import train_run

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("ray_on_loopback"), pytest.mark.long("whole runs")]
SAMPLED = 48
BUILT_IN = {"name": "calculator", "max_turns": 4, "max_observation_tokens": 12}
AGENTS = Path(__file__).parents[1] / "unit/environments/agents_of_tests.py"


def settings(small_run: Any, environment: dict[str, Any], **parts: Any) -> RunConfig:
    rollout = {"max_new_tokens": SAMPLED, "deterministic": True}
    return small_run(
        model={"path": "starter-tools", "max_length": 224},
        environment=environment,
        **{"rollout": rollout, "budget": {"steps": 2}, **parts},
    )


def test_an_agent_trains_as_the_built_in_environment_does(tmp_path: Path, small_run: Any) -> None:
    """The same requests give the same tokens, the same batches and the same losses, step by step."""
    agent = {"name": "agent", "command": [sys.executable, str(AGENTS), "calculates"], "max_turns": 4}
    rows: list[list[dict[str, float]]] = []
    samples = []
    for name, environment in (("agent", agent), ("built_in", BUILT_IN)):
        assert train_run(settings(small_run, environment), tmp_path / name) == "steps"
        rows.append([row["metrics"] for row in read_metrics(tmp_path / name) if row["step"] > 0])
        samples.append(read_samples(tmp_path / name))
    ours, theirs = rows
    assert not undescribed({name for row in ours for name in row})
    for own, other in zip(ours, theirs, strict=True):
        assert own["env/branches_mean"] == own["env/timeout_fraction"] == own["env/error_fraction"] == 0
        assert max(row["rollout/logprob_gap_mean"] for row in (own, other)) <= 1e-6
        for name in ("policy/loss", "grad/norm_g0", "reward/mean", "rollout/tokens", "env/turns_mean"):
            assert own[name] == pytest.approx(other[name], rel=1e-5, abs=1e-9), name
        assert 0 < own["env/observation_tokens"] == other["env/observation_tokens"] <= 3 * 12
    assert 1 < ours[-1]["env/turns_mean"] <= 4
    for own, other in zip(*samples, strict=True):
        assert all(own[name] == other[name] for name in ("length", "sampled_length", "end"))
        policy = [[turn["text"] for turn in row["turns"] if turn["speaker"] == "policy"] for row in (own, other)]
        assert policy[0] == policy[1]
    for row in samples[1]:
        assert row["response"] == "\n".join(turn["text"] for turn in row["turns"] if turn["speaker"] == "policy")
        assert row["truncated"] == (row["end"] == "length")
        assert row["sampled_length"] <= min(SAMPLED, row["length"])
    for name in ("agent", "built_in"):
        (record,) = read_evaluations(tmp_path / name)
        assert record["scores"]["pass@1"] > 0.05
        assert not [event for event in read_events(tmp_path / name) if event["kind"] in ("verifier_failed", "stalled")]
    assert record["environment"] == BUILT_IN


def test_rows_rewards_and_faults_of_a_run_that_samples_ahead(tmp_path: Path, small_run: Any) -> None:
    """Each episode edits its history, and so has two rows; some of the agents die."""
    config = settings(
        small_run,
        {"name": "agent", "command": [sys.executable, str(AGENTS), "edits_and_dies"]},
        rollout={"max_new_tokens": SAMPLED, "async_depth": 1, "update_in_flight": True},
        evaluation={"benchmarks": []},
        verifier={"max_failed_fraction": 1.0},
    )
    seen = train_listening(config, tmp_path / "run")
    assert "ray::EnvironmentActor" in {one.process for one in seen}
    rows = [row["metrics"] for row in read_metrics(tmp_path / "run") if row["step"] > 0]
    # The learner computes the same log-probabilities for every token of every row.
    assert rows[0]["rollout/logprob_gap_mean"] <= 1e-6
    for row in rows:
        assert 0 < row["env/error_fraction"] == row["verify/error_fraction"] < 1
        assert row["env/branches_mean"] == pytest.approx(1 - row["env/error_fraction"])
        assert 0.5 <= row["reward/mean"] <= 1.5
    for sample in read_samples(tmp_path / "run"):
        texts = [turn["text"] for turn in sample["turns"] if turn["speaker"] == "policy"]
        assert sample["sampled_length"] == sample["length"]
        if sample["end"] == "error":
            assert sample["reward"] is None
            assert sample["end_detail"] == f"the agent ended with exit code 1: no more, after {len(texts[0])}"
        else:
            assert sample["reward"] == 0.5 + len(texts[0]) % 2
            assert sample["branches"] == 1
            assert sample["response"] == texts[1]


def test_gxpo_eval_plays_in_the_environment(tmp_path: Path) -> None:
    common = ["eval", "--model", "starter-tools", "--benchmark", "word_problems", "--samples", "4", "--problems", "24"]
    played, single = tmp_path / "played.jsonl", tmp_path / "single.jsonl"
    environment = ["--set", "environment.name=calculator", "--set", "environment.max_observation_tokens=12"]
    assert main([*common, *environment, "--out", str(played)]) == 0
    assert main([*common, "--out", str(single)]) == 0
    with_tool, without = (json.loads(file.read_text()) for file in (played, single))
    assert with_tool["environment"] == BUILT_IN
    assert "environment" not in without
    assert with_tool["scores"]["pass@1"] > without["scores"]["pass@1"]
