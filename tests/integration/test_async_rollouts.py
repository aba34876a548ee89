"""Sampling ahead of the learner on real Ray, vLLM and DeepSpeed: correctness, weights that change in flight, deaths."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from support.rollouts import assert_equal_to_the_bit

from docs_build.metrics import undescribed
from gxpo_trainer.config import RunConfig
from gxpo_trainer.learner.group import LearnerGroup
from gxpo_trainer.reporting.reading import read_evaluations, read_events, read_metrics
from gxpo_trainer.rollout.sources import AsyncRollouts, Rollouts
from gxpo_trainer.training.run import train_run

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("ray_on_loopback")]
GXPO = {"name": "gxpo", "k": 3, "gate": {"mode": "never"}}
STEPS = 6


def ahead(small_run: Any, **parts: Any) -> RunConfig:
    """Six deterministic steps of GXPO, one step ahead, with checkpoints and evaluations every two."""
    # Fewer sequences at a time than a step has, so that the next batch is still sampled when one is complete.
    rollout = {"async_depth": 1, "deterministic": True, "max_num_seqs": 16, **parts.pop("rollout", {})}
    body: dict[str, Any] = {
        "rollout": rollout,
        "learner": {"rule": GXPO, "optimizer": {"learning_rate": 1e-5}},
        "evaluation": {"every_steps": 2},
        "budget": {"steps": STEPS},
        "placement": {"learner_threads": 1, "sampler_threads": 1},
    }
    return small_run(**{**body, **parts})


def steps_once(out: Path) -> None:
    rows = [row for row in read_metrics(out) if "update/backward_passes" in row["metrics"]]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1)), "no hole, no double"
    assert rows[-1]["metrics"]["update/backward_passes_total"] == 3 * STEPS


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, small_run: Any) -> Path:
    """A run that nothing interrupted; for looking only."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert train_run(ahead(small_run), out) == "steps"
    return out


def test_versions_are_one_step_behind_but_after_checkpoints(whole: Path) -> None:
    """Version 0 samples steps 1 and 2, up to the checkpoint; sampling restarts from each checkpointed version."""
    steps_once(whole)
    rows = [row["metrics"] for row in read_metrics(whole)]
    assert [row["rollout/weights_version"] for row in rows] == [0, 0, 2, 2, 4, 4]
    assert [row["rollout/staleness_max"] for row in rows] == [0, 1, 0, 1, 0, 1]
    assert [row["rollout/staleness_mean"] for row in rows] == [0, 1, 0, 1, 0, 1]
    assert {row["rollout/dropped_fraction"] for row in rows} == {0}
    # Fresh samples weigh 1 up to rounding; stale ones do not.
    assert [abs(row["importance/max"] - 1) < 1e-3 for row in rows] == [True, False] * 3
    assert all(0.9 < row["importance/effective_sample_fraction"] < 1 + 1e-6 for row in rows)
    assert all(row["rollout/logprob_gap_mean"] <= 1e-6 for row in rows[::2])
    assert any(row.get("time/overlap_fraction", 0) > 0 for row in rows), "no batch was sampled during an update"
    assert any(0 < row["rollout/engine_idle_fraction"] < 1 for row in rows)
    assert [row["weights_version"] for row in read_evaluations(whole)] == [2, 4, 6]
    assert not undescribed({name for row in rows for name in row})


@pytest.mark.long("deaths, once more ahead of the learner")
def test_a_learner_that_dies_with_batches_in_flight_repeats_no_sample(
    tmp_path: Path, small_run: Any, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 in step 3, while step 4 is sampled: steps 3 to 6 are those of the uninterrupted run."""
    killed: list[None] = []
    inner = AsyncRollouts.serve

    def serve(self: AsyncRollouts, calls: Any, phase: Any) -> Any:
        if {*self._planned} == {4} and not killed:
            killed.append(os.kill(learners[-1].processes[0].pid, signal.SIGKILL))
        return inner(self, calls, phase)

    learners: list[LearnerGroup] = []
    start = LearnerGroup.start
    monkeypatch.setattr(AsyncRollouts, "serve", serve)
    monkeypatch.setattr(LearnerGroup, "start", lambda self: learners.append(self) or start(self))
    out = tmp_path / "run"
    assert train_run(ahead(small_run), out) == "steps"
    assert killed
    assert [row["attempt"] for row in read_metrics(out)] == [1, 1, 2, 2, 2, 2]
    steps_once(out)
    assert_equal_to_the_bit(out, whole)


@pytest.mark.long("a whole run with in-flight updates")
def test_weights_change_between_the_tokens_of_a_sample_which_names_the_versions(
    tmp_path: Path, small_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines hold one prompt at a time, so that syncs meet its samples in the middle. One engine dies on the way.

    That each token has the probability of its version: test_conversations.py.
    """
    batches: list[Rollouts] = []
    inner = AsyncRollouts.batch

    def batch(self: AsyncRollouts, step: int) -> Rollouts:
        batches.append(inner(self, step))
        if step == 3:
            os.kill(self._pool.engines.all[0].process.pid, signal.SIGKILL)
        return batches[-1]

    monkeypatch.setattr(AsyncRollouts, "batch", batch)
    config = ahead(
        small_run,
        rollout={"deterministic": False, "update_in_flight": True, "max_num_seqs": 4, "ignore_eos": True},
        learner={"rule": GXPO, "optimizer": {"learning_rate": 3e-5}},
        evaluation={"every_steps": 0},
    )
    out = tmp_path / "run"
    assert train_run(config, out) == "steps"
    steps_once(out)
    assert any(event["kind"] == "sampler_restarted" for event in read_events(out))
    rows = [row["metrics"] for row in read_metrics(out)]
    assert max(row["rollout/staleness_max"] for row in rows) == 1
    assert any(0 < row["rollout/staleness_mean"] < 1 for row in rows)

    groups = [scored.group for batch in batches for scored in batch.groups]
    assert len({group.prompt.id for group in groups}) == len(groups), "no prompt twice"
    crossing = [(group, sample) for group in groups for sample in group.samples if len(sample.versions) > 1]
    assert crossing, "no sync met a sample in the middle: the test is too weak"
    for group, sample in crossing:
        assert sum(count for _, count in sample.versions) == len(sample.token_ids)
        assert group.weights_version <= sample.versions[0][0] < sample.versions[1][0]
