"""Metrics of steps whose samples are conversations, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from gxpo_trainer.learner.rank import StepResult
from gxpo_trainer.rollout.sources import Rollouts, num_sampled
from gxpo_trainer.training.controller import careful_metrics, environment_metrics, rollout_metrics, staleness_metrics
from gxpo_trainer.training.evaluation import score_groups
from gxpo_trainer.types import Episode, EpisodeEnd, Group, Prompt, Sample, ScoredGroup, Utterance, Verdict

ASK, GIVEN = Utterance("policy", "<calc>1+1</calc>"), Utterance("environment", "2")


def sample(sampled: list[int], end: EpisodeEnd, turns: int, versions: tuple[tuple[int, int], ...]) -> Sample:
    """turns: of the policy, each but the last with a response."""
    mask = np.array(sampled, dtype=np.bool_)
    ids = np.arange(len(mask), dtype=np.int32)
    episode = Episode((*[ASK, GIVEN] * (turns - 1), *[ASK] * min(turns, 1)), end)
    return Sample("", ids, ids.astype(np.float32), "stop", versions, mask, episode)


def rollouts(*samples: Sample) -> Rollouts:
    group = Group(Prompt("a", "a", "1"), np.array([1, 2], dtype=np.int32), samples, weights_version=3)
    scored = [ScoredGroup(group, tuple(Verdict("wrong", None, 0.0) for _ in samples))]
    return Rollouts(scored, num_sampled(scored), 1.0, 0.0, 0, sampling_s=2.0)


CONVERSATIONS = rollouts(
    sample([1, 1, 0, 0, 0, 1], "done", 2, ((3, 5), (4, 1))),
    sample([1, 0, 1, 0, 1, 1], "max_turns", 3, ((4, 6),)),
    sample([1], "timeout", 1, ((4, 1),)),
    sample([], "error", 0, ()),
)


def test_episodes_by_their_ends_and_turns() -> None:
    samples = list(CONVERSATIONS.groups[0].group.samples)
    assert environment_metrics(samples) == {
        "env/turns_mean": (2 + 3 + 1 + 0) / 4,
        "env/done_fraction": 0.25,
        "env/timeout_fraction": 0.25,
        "env/error_fraction": 0.25,
        "env/observation_tokens": (3 + 2) / 4,
    }
    plain = Sample("", np.arange(3, dtype=np.int32), np.zeros(3, dtype=np.float32), "stop")
    assert environment_metrics([plain]) == {}


def test_lengths_and_rates_count_sampled_tokens() -> None:
    result = StepResult({}, 1, 0, 0.0, 0.0, True, None, 1.0, 0.0, 0)
    metrics = rollout_metrics(CONVERSATIONS, result, version=4, total=8)
    # 3, 4, 1 and 0 sampled tokens.
    assert metrics["rollout/tokens"] == 8
    assert metrics["rollout/tokens_per_s"] == 4
    assert metrics["rollout/length_mean"] == 2
    assert metrics["rollout/length_std"] == pytest.approx(((1 + 4 + 1 + 4) / 4) ** 0.5)
    assert metrics["env/turns_mean"] == 1.5
    assert score_groups(CONVERSATIONS.groups)[0]["length_mean"] == 2


def test_staleness_counts_sampled_tokens() -> None:
    # Version 3 sampled 2 tokens of the first response (and saw 3 of its environment), version 4 all others: 6.
    metrics = staleness_metrics(CONVERSATIONS, version=5)
    assert metrics["rollout/staleness_mean"] == (2 * 2 + 6 * 1) / 8
    assert metrics["rollout/staleness_max"] == 2


def test_a_step_whose_episodes_all_failed_has_metrics() -> None:
    failed = rollouts(sample([], "error", 0, ()))
    metrics = staleness_metrics(failed, version=5)
    assert (metrics["rollout/staleness_mean"], metrics["rollout/staleness_max"]) == (0, 0)


def test_sampled_tokens_of_each_version() -> None:
    first, second, *_ = CONVERSATIONS.groups[0].group.samples
    assert first.sampled_versions == ((3, 2), (4, 1))
    assert second.sampled_versions == ((4, 4),)
    # A version that only an observation belongs to sampled nothing.
    assert sample([1, 0, 0, 1], "done", 2, ((1, 1), (2, 2), (3, 1))).sampled_versions == ((1, 1), (3, 1))
    plain = Sample("", np.arange(3, dtype=np.int32), np.zeros(3, dtype=np.float32), "stop", ((1, 3),))
    assert plain.sampled_versions == ((1, 3),)


def test_careful_answers_are_those_with_a_calculation() -> None:
    def answers(*texts: str, correct: tuple[bool, ...]) -> ScoredGroup:
        ids = np.arange(1, dtype=np.int32)
        samples = tuple(Sample(text, ids, ids.astype(np.float32), "stop") for text in texts)
        verdicts = tuple(Verdict("correct" if right else "wrong", None, 0.0) for right in correct)
        return ScoredGroup(Group(Prompt("a", "a", "1"), ids, samples, weights_version=3), verdicts)

    hasty = answers("\\boxed{4}", "\\boxed{5}", correct=(True, False))
    mixed = answers("1+3=4, so \\boxed{4}", "\\boxed{4}", "1+3=5, so \\boxed{5}", correct=(True, True, False))
    assert careful_metrics([hasty]) == {"response/careful_fraction": 0}
    # Two of five answers calculate, and one of the two is right.
    assert careful_metrics([hasty, mixed]) == {"response/careful_fraction": 0.4, "response/careful_correctness": 0.5}
