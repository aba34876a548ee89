"""Verdicts of episodes: failed ones, those that their environment judged, and those left to the verifier."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gxpo_trainer.config import RewardConfig, VerifierConfig
from gxpo_trainer.config.io import build
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.grading.options import VerifyOptions
from gxpo_trainer.rollout.requests import FinishedGroups
from gxpo_trainer.rollout.verification import VerifierActor, episode_verdict, pairs_of
from gxpo_trainer.types import Episode, EpisodeEnd, Group, Prompt, Sample, Utterance, Verdict

IDS = np.zeros(3, np.int32)
LOGPROBS = np.zeros(3, np.float32)
RIGHT = r"so \boxed{5}"


def single(text: str) -> Sample:
    return Sample(text, IDS, LOGPROBS, "stop")


def played(text: str, *rewards: float | None, end: EpisodeEnd = "done", detail: str = "") -> Sample:
    """An episode whose policy wrote `text` in its first turn, and two of the three tokens."""
    turns = [Utterance("policy", text)]
    for reward in rewards:
        turns += [Utterance("environment", "seen", reward), Utterance("policy", "")]
    episode = Episode(tuple(turns), end, detail)
    return Sample(text, IDS, LOGPROBS, "stop", sampled=np.array([True, False, True]), episode=episode)


def group(*samples: Sample, extra: dict[str, Any] | None = None) -> Group:
    return Group(Prompt("p", "What?", "5", extra or {"level": "5"}), IDS, samples, weights_version=0)


def score(config: VerifierConfig, group: Group, *, rewards: bool = True) -> tuple[Verdict, ...]:
    async def scenario() -> list[tuple[Verdict, ...]]:
        actor = VerifierActor(config)
        try:
            return await actor.score(FinishedGroups((0,), (group,)), rewards)
        finally:
            await actor.close()

    (found,) = asyncio.run(scenario())
    return found


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        (single(RIGHT), None),
        (played(RIGHT), None),
        (played(RIGHT, None, None), None),
        (played(RIGHT, None, end="max_turns"), None),
        (played(RIGHT, None, end="length"), None),
        (played(RIGHT, 0.25, None, 0.5), Verdict("correct", None, 0.0, score=0.75)),
        (played(RIGHT, 1.0, -1.0), Verdict("wrong", None, 0.0, score=0.0)),
        (played(RIGHT, -2.0, end="length"), Verdict("wrong", None, 0.0, score=-2.0)),
        (played(RIGHT, 1.0, end="timeout", detail="step took 5 s"), Verdict("timeout", None, 0.0, "step took 5 s")),
        (played(RIGHT, 1.0, end="error", detail="KeyError"), Verdict("error", None, 0.0, "KeyError")),
        (
            played(RIGHT, 1e308, 1e308),
            Verdict("error", None, 0.0, "the sum of the environment's rewards is inf"),
        ),
    ],
)
def test_an_episode_decides_its_verdict_by_failing_or_by_its_rewards(sample: Sample, expected: Verdict | None) -> None:
    assert episode_verdict(sample) == expected


def test_a_failed_episode_has_no_reward_and_the_sum_is_the_reward_of_a_judged_one() -> None:
    failed, judged = (episode_verdict(played("", 0.5, end=end)) for end in ("error", "done"))
    assert failed is not None
    assert judged is not None
    assert (failed.reward, failed.reward_components) == (None, {})
    assert (judged.reward, judged.reward_components) == (0.5, {"correctness": 0.5})


def test_messages_of_single_turns_hold_nothing_about_episodes() -> None:
    samples = [(single("a"), None), (single("b"), None)]
    with_options = {"verify": VerifyOptions((0.5,)), "level": "5"}
    rules = VerifyOptions((0.5,)).to_dict()
    assert pairs_of(group(), samples, False) == [("5", "a"), ("5", "b")]
    assert pairs_of(group(extra=with_options), samples[:1], False) == [("5", "a", {"options": rules})]
    context = {"problem": "What?", "extra": {"level": "5"}, "num_tokens": 3, "truncated": False}
    assert pairs_of(group(), samples[1:], True) == [("5", "b", {"context": context})]
    assert pairs_of(group(extra=with_options), samples[1:], True) == [
        ("5", "b", {"options": rules, "context": context})
    ]


def test_messages_of_episodes_hold_turns_and_only_sampled_tokens_count() -> None:
    judged = played("a", 0.5)
    message: Any = pairs_of(group(), [(judged, episode_verdict(judged))], True)[0]
    extras = message[2]
    assert extras["status"] == "correct"
    assert extras["context"]["num_tokens"] == 2
    assert extras["context"]["environment_reward"] == 0.5
    assert extras["context"]["turns"] == [
        ("policy", "a", None),
        ("environment", "seen", 0.5),
        ("policy", "", None),
    ]


def test_with_correctness_alone_the_workers_judge_only_what_no_environment_did() -> None:
    samples = (played("5", 0.25), played("5", end="error", detail="no"), played(RIGHT), single("6"))
    found = score(VerifierConfig(workers=1, deadline_s=60.0), group(*samples))
    assert [verdict.status for verdict in found] == ["correct", "error", "correct", "wrong"]
    assert [verdict.reward for verdict in found] == [0.25, None, 1.0, 0.0]
    assert [verdict.extracted for verdict in found] == [None, None, "5", "6"]


CLASS = '''
class Turns:
    """Turns of the conversation, and a tenth of what the environment gave."""

    def __call__(self, sample):
        assert all(turn.speaker in ("policy", "environment") for turn in sample.turns)
        return len(sample.turns) + (sample.environment_reward or 0) / 10
'''


def test_components_see_the_environments_verdict_its_reward_and_the_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "episode_rewards.py").write_text(CLASS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("GXPO_REWARD_ALLOWLIST", "episode_rewards:Turns")
    names = (
        RewardConfig(weight=2.0),
        RewardConfig(name="environment", weight=0.5),
        RewardConfig(name="episode_rewards:Turns", weight=0.01),
    )
    samples = (played("6", 0.5), played(RIGHT, -1.0), played(RIGHT, None), single(RIGHT), played("", end="timeout"))
    found = score(VerifierConfig(workers=1, deadline_s=60.0, rewards=names), group(*samples))
    assert [verdict.components for verdict in found] == [
        {"correctness": 1.0, "environment": 0.5, "Turns": 3.05},
        {"correctness": 0.0, "environment": -1.0, "Turns": 2.9},
        {"correctness": 1.0, "environment": 0.0, "Turns": 3.0},
        {"correctness": 1.0, "environment": 0.0, "Turns": 0.0},
        None,
    ]
    assert [verdict.reward for verdict in found] == pytest.approx([2.2805, -0.471, 2.03, 2.0, None])


def test_an_evaluation_judges_episodes_without_components() -> None:
    names = (RewardConfig(), RewardConfig(name="format"))
    config = VerifierConfig(workers=1, deadline_s=60.0, rewards=names)
    found = score(config, group(played("", 1.0), played(RIGHT)), rewards=False)
    assert [(verdict.status, verdict.components) for verdict in found] == [("correct", None), ("correct", None)]


def test_the_environments_component_needs_an_environment() -> None:
    with pytest.raises(ConfigError, match=r"environment is always 0 with environment.name = \"single_turn\""):
        build({"verifier": {"rewards": [{"name": "environment"}]}})
    build({"verifier": {"rewards": [{"name": "environment"}]}, "environment": {"name": "calculator"}})
