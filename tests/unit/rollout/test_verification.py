"""Verdicts of groups: of episodes, which fail or are judged by their environment, and with components over HTTP."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
import ray
from support.reward_server import PATIENCE_S, RewardServer, reply, score

from gxpo_trainer.config import HttpRewardConfig, RewardConfig, RunConfig, VerifierConfig
from gxpo_trainer.errors import ConfigError, VerifierFailed
from gxpo_trainer.grading.rewards import TOKEN_FILE, URLS, tokens
from gxpo_trainer.plugins import check_address
from gxpo_trainer.rollout.sources import http_usage
from gxpo_trainer.rollout.verification import Submitted, VerifierActor, VerifierHandle, check_rewards, episode_verdict
from gxpo_trainer.rollout.vllm_driver import Sampled
from gxpo_trainer.training.proofs import check_verdicts
from gxpo_trainer.types import (
    Episode,
    EpisodeEnd,
    Group,
    HttpUsage,
    Prompt,
    Sample,
    ScoredGroup,
    Utterance,
    Verdict,
    VerifyOptions,
)

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


def group(*samples: Sample | str, extra: dict[str, Any] | None = None, rewards: tuple[str, ...] = ()) -> Group:
    made = tuple(single(sample) if isinstance(sample, str) else sample for sample in samples)
    prompt = Prompt("p", "What?", "5", extra or {"level": "5"}, rewards=rewards)
    return Group(prompt, IDS, made, weights_version=0)


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
        (played(RIGHT, 1e308, 1e308), Verdict("error", None, 0.0, "the sum of the environment's rewards is inf")),
    ],
)
def test_an_episode_decides_its_verdict_by_failing_or_by_its_rewards(sample: Sample, expected: Verdict | None) -> None:
    assert episode_verdict(sample) == expected


def test_without_an_answer_only_other_components_judge() -> None:
    group = Group(Prompt("p", "Write.", ""), IDS, (single(RIGHT), played(RIGHT)), 0)
    for verdict in score((RewardConfig(name="format", weight=2.0),), group):
        assert (verdict.status, verdict.reward, verdict.components) == ("ungraded", 2.0, {"format": 1.0})
    assert [verdict.reward for verdict in score((RewardConfig(),), group)] == [None, None]
    (verdict, _) = score((RewardConfig(), RewardConfig(name="format")), group)
    assert (verdict.status, verdict.reward) == ("error", None)
    assert "the problem has no answer, and its environment gave no reward" in verdict.detail


def test_with_correctness_alone_the_workers_judge_only_what_no_environment_did() -> None:
    samples = (played("5", 0.25), played("5", end="error", detail="no"), played(RIGHT), single("6"))
    verdicts = score((RewardConfig(),), group(*samples))
    assert [verdict.status for verdict in verdicts] == ["correct", "error", "correct", "wrong"]
    assert [verdict.reward for verdict in verdicts] == [0.25, None, 1.0, 0.0]
    assert [verdict.extracted for verdict in verdicts] == [None, None, "5", "6"]


@pytest.mark.parametrize("others", [(), (RewardConfig(name="format"),)])
def test_the_weight_of_correctness_alone_scales_what_the_environment_gave(others: tuple[RewardConfig, ...]) -> None:
    samples = (played("5", 0.25), played("5", -1.0), played("5", end="error"), played(RIGHT), single("6"))
    rewards = (RewardConfig(weight=0.5), *others)
    verdicts = score(rewards, group(*samples, rewards=("correctness",) if others else ()))
    assert [verdict.reward for verdict in verdicts] == [0.125, -0.5, None, 0.5, 0.0]
    assert [verdict.reward_components for verdict in verdicts] == [
        {"correctness": 0.25}, {"correctness": -1.0}, {}, {"correctness": 1.0}, {"correctness": 0.0}
    ]  # fmt: skip
    assert score(rewards, group(played("5", 0.25)), components=False)[0].reward == 0.25, "evaluations have no weights"


CLASS = '''
class Turns:
    """Turns of the conversation, and a tenth of what the environment gave."""

    def __call__(self, sample):
        assert all(turn.speaker in ("policy", "environment") for turn in sample.turns)
        return len(sample.turns) + (sample.environment_reward or 0) / 10
'''


def test_components_see_the_environments_verdict_reward_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "episode_rewards.py").write_text(CLASS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("GXPO_REWARD_ALLOWLIST", "episode_rewards:Turns")
    names = (
        RewardConfig(weight=2.0),
        RewardConfig(name="environment", weight=0.5),
        RewardConfig(name="episode_rewards:Turns", weight=0.01),
    )
    samples = (played("6", 0.5), played(RIGHT, -1.0), played(RIGHT, None), single(RIGHT), played("", end="timeout"))
    verdicts = score(names, group(*samples))
    assert [verdict.components for verdict in verdicts] == [
        {"correctness": 1.0, "environment": 0.5, "Turns": 3.05},
        {"correctness": 0.0, "environment": -1.0, "Turns": 2.9},
        {"correctness": 1.0, "environment": 0.0, "Turns": 3.0},
        {"correctness": 1.0, "environment": 0.0, "Turns": 0.0},
        None,
    ]
    assert [verdict.reward for verdict in verdicts] == pytest.approx([2.2805, -0.471, 2.03, 2.0, None])


def judge(url: str, label: str = "judge", **settings: Any) -> HttpRewardConfig:
    return HttpRewardConfig.model_validate({"url": url, "label": label, "deadline_s": PATIENCE_S, **settings})


FAILED = played("", end="error", detail="it broke")


def half(_: int, body: Any, connection: socket.socket) -> None:
    """0.5, an error for a response that says so."""
    if "break" in body["response"]:
        reply(connection, "", "500 Internal Server Error")
    else:
        reply(connection, '{"reward": 0.5}')


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Any:
    with RewardServer(half) as started:
        monkeypatch.setenv(URLS, f"http://elsewhere/, {started.url}")
        yield started


def test_all_components_are_weighed_in_the_order_of_the_run_file(server: RewardServer) -> None:
    rewards = (judge(server.url, weight=0.2), RewardConfig(), judge(server.url, "sandbox", weight=-2.0))
    right, wrong, broken = score(rewards, group(r"\boxed{5}", "6", "break 5"))
    assert list((right.components or {}).items()) == [("judge", 0.5), ("correctness", 1.0), ("sandbox", 0.5)]
    assert (right.status, right.reward) == ("correct", pytest.approx(0.2 * 0.5 + 1.0 - 2.0 * 0.5))
    assert (wrong.status, wrong.reward) == ("wrong", pytest.approx(0.1 - 1.0))
    assert (broken.status, broken.reward, broken.components) == ("error", None, None)
    assert broken.detail == "reward judge: was answered with HTTP 500; reward sandbox: was answered with HTTP 500"
    assert [verdict.http.calls for verdict in (right, wrong, broken) if verdict.http] == [2, 2, 2]
    (huge,) = score(tuple(judge(server.url, label, weight=1.7e308) for label in "abc"), group("5"))
    assert (huge.status, huge.reward, huge.detail) == ("error", None, "the weighted sum of the rewards is inf")


@pytest.mark.parametrize("chosen", [("judge",), ("correctness",), ("format", "judge"), ("correctness", "format")])
def test_a_source_is_judged_by_its_own_components_alone(server: RewardServer, chosen: tuple[str, ...]) -> None:
    every = (RewardConfig(weight=2.0), RewardConfig(name="format", weight=4.0), judge(server.url))
    (verdict,) = score(every, group(RIGHT, rewards=chosen))
    values = {"correctness": 1.0, "format": 1.0, "judge": 0.5}
    weights = {"correctness": 2.0, "format": 4.0, "judge": 1.0}
    assert verdict.reward_components == {name: values[name] for name in chosen}
    assert verdict.reward == sum(values[name] * weights[name] for name in chosen)
    assert len(server.requests) == ("judge" in chosen)


def test_what_is_posted(server: RewardServer) -> None:
    turns = (Utterance("policy", r"\boxed{4}"), Utterance("environment", "84", 1.0))
    judged = Sample(r"\boxed{4}", IDS, LOGPROBS, "stop", episode=Episode(turns, "done"))
    extra = {"level": "5", "verify": VerifyOptions(0.5)}
    score((judge(server.url),), group(r"so \boxed{5}", "no number", judged, extra=extra))
    posted = sorted(server.requests, key=lambda body: body["response"], reverse=True)
    common = {"problem": "What?", "gold": "5", "extra": {"level": "5"}}
    assert posted == [
        {**common, "answer": "5", "response": r"so \boxed{5}", "turns": []},
        {**common, "answer": "no number", "response": "no number", "turns": []},
        {
            **common,
            "answer": r"\boxed{4}",
            "response": r"\boxed{4}",
            "turns": [
                {"speaker": "policy", "text": r"\boxed{4}", "reward": None},
                {"speaker": "environment", "text": "84", "reward": 1.0},
            ],
        },
    ]


def test_an_answer_without_a_verdict_and_evaluations_are_not_posted(server: RewardServer) -> None:
    failed, fine = score((judge(server.url),), group(FAILED, "5"))
    assert (failed.status, failed.detail, failed.http) == ("error", "it broke", HttpUsage())
    assert (fine.status, fine.components, fine.reward) == ("correct", {"judge": 0.5}, 0.5)
    (verdict,) = score((judge(server.url),), group("5"), components=False)
    assert (verdict.status, verdict.components, verdict.http) == ("correct", None, None)
    assert len(server.requests) == 1


def test_of_groups_that_finish_together_only_those_of_the_training_get_components(server: RewardServer) -> None:
    async def scenario() -> list[tuple[Verdict, ...]]:
        ours, rewards = group(f"break {RIGHT}"), (judge(server.url),)
        actor = VerifierActor(VerifierConfig(workers=1, deadline_s=PATIENCE_S, rewards=rewards))
        try:
            return await actor.score(Sampled([(0, ours), (1, ours)], 0.0), (True, False))
        finally:
            await actor.close()

    (trained,), (evaluated,) = asyncio.run(scenario())
    assert (trained.status, evaluated.status, evaluated.http) == ("error", "correct", None)


def ranked(_: int, body: Any, connection: socket.socket) -> None:
    """The rank of each response among those of its group by length; an error for a group that says so."""
    responses = [entry["response"] for entry in body["responses"]]
    if "break" in responses:
        return reply(connection, "", "500 Internal Server Error")
    return reply(connection, json.dumps({"rewards": [sorted(responses, key=len).index(text) for text in responses]}))


def test_a_judge_of_groups_sees_all_judged_responses_and_its_failure_is_one_of_the_whole_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with RewardServer(ranked) as server:
        monkeypatch.setenv(URLS, server.url)
        rewards = (RewardConfig(), judge(server.url, weight=0.1, per="group"))
        verdicts = score(rewards, group("5", FAILED, "about 6", r"\boxed{5}."))
        broken = score(rewards, group("5", "break", FAILED))
    assert [entry["response"] for entry in server.requests[0]["responses"]] == ["5", "about 6", r"\boxed{5}."]
    assert [verdict.status for verdict in verdicts] == ["correct", "error", "wrong", "correct"]
    assert [verdict.reward for verdict in verdicts] == pytest.approx([1.0, None, 0.1, 1.2])
    assert [verdict.http.calls for verdict in verdicts if verdict.http] == [1, 0, 0, 0]
    assert [(verdict.status, verdict.reward) for verdict in broken] == [("error", None)] * 3
    assert [verdict.detail for verdict in broken] == ["reward judge: was answered with HTTP 500"] * 2 + ["it broke"]


def test_distillation_does_without_rewards_and_a_run_that_learns_from_them_stops_where_nothing_judges() -> None:
    # The example of docs/distillation.md has no answers: rewards are measured where there are any.
    ours = Group(Prompt("p", "What?", ""), IDS, (single(RIGHT),) * 2, weights_version=0)
    verdicts = score((RewardConfig(),), ours)
    assert [(verdict.status, verdict.reward) for verdict in verdicts] == [("ungraded", None)] * 2
    body = {"rollout": {"source": "teacher"}, "teacher": {"path": "starter"}}
    check_verdicts(RunConfig.model_validate(body), [ScoredGroup(ours, verdicts)])
    with pytest.raises(VerifierFailed, match=r"2 of 2 .*: 2 ungraded, last: '.* no answer to compare with'"):
        check_verdicts(RunConfig(), [ScoredGroup(ours, verdicts)])


def test_a_run_stops_when_a_server_fails_too_often_and_a_step_costs_the_sum_over_its_answers(
    server: RewardServer,
) -> None:
    rewards = (RewardConfig(), judge(server.url))
    ours = group("5", "break", "break 5", "6", "5")
    verdicts = score(rewards, ours)
    groups = [ScoredGroup(ours, verdicts)]
    allowed, stopped = (
        RunConfig.model_validate({"verifier": {"rewards": rewards, "max_failed_fraction": share}})
        for share in (0.4, 0.3)
    )
    check_verdicts(allowed, groups)
    failed = r"2 of 5 responses have no reward \(40%; .*\): 2 error, last: 'reward judge: was answered with HTTP 500'"
    with pytest.raises(VerifierFailed, match=failed):
        check_verdicts(stopped, groups)
    usage: Any = http_usage(groups * 2)
    assert (usage.calls, usage.cache_hits) == (8, 2)
    assert usage.seconds > 0
    more: Any = http_usage(groups, usage)
    assert more.calls == 12
    assert http_usage([ScoredGroup(ours, (Verdict("correct", "5", 0.0),) * 5)]) is None


@pytest.mark.parametrize(
    "lost", [ray.exceptions.ObjectLostError("00" * 28, None, ""), ray.exceptions.OutOfMemoryError("low on memory")]
)
def test_verdicts_that_were_lost_with_their_node_or_for_memory_are_computed_again(
    lost: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gxpo_trainer.rollout.verification.ray.kill", Mock())
    group = SimpleNamespace(get=Mock(side_effect=[None, lost, None, ["verdicts"]]), back_off=Mock())
    events: list[str] = []
    handle = VerifierHandle(
        RunConfig(), cast(Any, SimpleNamespace(group=group)), lambda kind, *_, **__: events.append(kind)
    )
    monkeypatch.setattr(handle, "start", lambda: setattr(handle, "actor", Mock()))
    handle.start()
    submitted = Submitted([3], "groups", [True])
    assert handle.await_verdicts({handle.submit(submitted): submitted}) == {3: "verdicts"}
    assert events == ["verifier_restarted"]
    # No training time: `ProgressWatch.working_s` has no wait in the phase "setup".
    assert [call.args[1] for call in group.get.mock_calls] == ["setup", "verifying"] * 2


def test_an_address_must_be_listed_character_by_character(
    server: RewardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verifier's own list is the one that holds."""
    listed = {URLS: "https://judge.example/score, http://127.0.0.1:8000/run ,"}
    for address in ("http://127.0.0.1:8000/run", "https://judge.example/score"):
        check_address("verifier.rewards", address, URLS, listed)
    for other in ("https://judge.example/", "https://judge.example/score/", "http://judge.example/score"):
        with pytest.raises(ConfigError, match=rf"{other} is not an allowed address on this machine.*{URLS}"):
            check_address("verifier.rewards", other, URLS, listed)
    check_rewards(VerifierConfig(rewards=(judge(server.url),)))
    monkeypatch.setenv(URLS, "http://elsewhere/")
    with pytest.raises(ConfigError, match="is not an allowed address on this machine"):
        score((judge(server.url),), group("5"))
    assert server.requests == []


def test_each_address_gets_its_token(server: RewardServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"# judges\nhttp://elsewhere/ other\n\n{server.url}  s3cret\n")
    monkeypatch.setenv(TOKEN_FILE, str(file))
    score((judge(server.url),), group("5"))
    assert "Authorization: Bearer s3cret" in server.headers.splitlines()
    file.write_text("http://elsewhere/ other\n")
    score((judge(server.url),), group("5"))
    assert "authorization" not in server.headers.lower()


def test_a_token_file_that_cannot_be_used_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    with pytest.raises(ConfigError, match="cannot be read"):
        tokens({TOKEN_FILE: str(file)})
    file.write_text("a b\nonly-one\n")
    with pytest.raises(ConfigError, match="line 2: must be an address"):
        tokens({TOKEN_FILE: str(file)})
    assert tokens({}) == {}
