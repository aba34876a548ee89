"""Verdicts of a run with components over HTTP: their values, their sum, their failures and what they cost."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.reward_server import PATIENCE_S, RewardServer, reply

from gxpo_trainer.config import HttpRewardConfig, RewardConfig, RunConfig, VerifierConfig
from gxpo_trainer.config.io import build, load_run, to_toml
from gxpo_trainer.config.tasks import AnyReward
from gxpo_trainer.errors import ConfigError, VerifierFailed
from gxpo_trainer.grading.options import VerifyOptions
from gxpo_trainer.grading.rewards import TOKEN_FILE, URLS, check_urls, tokens
from gxpo_trainer.rollout.pool import Collected
from gxpo_trainer.rollout.requests import FinishedGroups
from gxpo_trainer.rollout.sources import RolloutPlanner, http_usage
from gxpo_trainer.rollout.verification import VerifierActor, check_rewards
from gxpo_trainer.training.proofs import check_verdicts
from gxpo_trainer.types import Episode, Group, HttpUsage, Prompt, Sample, ScoredGroup, Utterance, Verdict, VerdictStatus

IDS = np.zeros(2, np.int32)
LOGPROBS = np.zeros(2, np.float32)


def group(*samples: Sample | str) -> Group:
    made = [Sample(s, IDS, LOGPROBS, "stop") if isinstance(s, str) else s for s in samples]
    extra = {"level": "5", "verify": VerifyOptions((0.5,))}
    return Group(Prompt("p", "What?", "5", extra), IDS, tuple(made), weights_version=0)


def episode(text: str, *, reward: float | None = None, failed: bool = False) -> Sample:
    turns = (Utterance("policy", text), Utterance("environment", "84", reward))
    return Sample(text, IDS, LOGPROBS, "stop", episode=Episode(turns, "error" if failed else "done", "it broke"))


def judge(url: str, label: str = "judge", **settings: Any) -> HttpRewardConfig:
    return HttpRewardConfig.model_validate({"url": url, "label": label, "deadline_s": PATIENCE_S, **settings})


def score(rewards: tuple[AnyReward, ...], *groups: Group, components: bool = True) -> list[tuple[Verdict, ...]]:
    async def scenario() -> list[tuple[Verdict, ...]]:
        actor = VerifierActor(VerifierConfig(workers=1, deadline_s=PATIENCE_S, rewards=rewards))
        try:
            return await actor.score(FinishedGroups(tuple(range(len(groups))), groups), components)
        finally:
            await actor.close()

    return asyncio.run(scenario())


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


# ---- verdicts ----------------------------------------------------------------------------------------------------


def test_all_components_are_weighed_in_the_order_of_the_run_file(server: RewardServer) -> None:
    rewards = (judge(server.url, weight=0.2), RewardConfig(), judge(server.url, "sandbox", weight=-2.0))
    ((right, wrong, broken),) = score(rewards, group(r"\boxed{5}", "6", "break 5"))
    assert list((right.components or {}).items()) == [("judge", 0.5), ("correctness", 1.0), ("sandbox", 0.5)]
    assert (right.status, right.reward) == ("correct", pytest.approx(0.2 * 0.5 + 1.0 - 2.0 * 0.5))
    assert (wrong.status, wrong.reward) == ("wrong", pytest.approx(0.1 - 1.0))
    assert (broken.status, broken.reward, broken.components) == ("error", None, None)
    assert broken.detail == "reward judge: was answered with HTTP 500; reward sandbox: was answered with HTTP 500"
    assert [verdict.http.calls for verdict in (right, wrong, broken) if verdict.http] == [2, 2, 2]


def test_what_is_posted(server: RewardServer) -> None:
    score((judge(server.url),), group(r"so \boxed{5}", "no number", episode(r"\boxed{4}", reward=1.0)))
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


def test_an_answer_without_a_verdict_is_not_posted(server: RewardServer) -> None:
    ((failed, fine),) = score((judge(server.url),), group(episode("", failed=True), "5"))
    assert (failed.status, failed.detail, failed.http) == ("error", "it broke", HttpUsage())
    assert (fine.status, fine.components, fine.reward) == ("correct", {"judge": 0.5}, 0.5)
    assert len(server.requests) == 1


def test_evaluations_post_nothing(server: RewardServer) -> None:
    ((verdict,),) = score((judge(server.url),), group("5"), components=False)
    assert (verdict.status, verdict.components, verdict.http, server.requests) == ("correct", None, None, [])


def test_a_run_stops_when_a_server_fails_for_too_many_answers(server: RewardServer) -> None:
    rewards = (RewardConfig(), judge(server.url))
    ours = group("5", "break", "break 5", "6")
    (verdicts,) = score(rewards, ours)
    groups = [ScoredGroup(ours, verdicts)]
    allowed, stopped = (
        RunConfig.model_validate({"verifier": {"rewards": rewards, "max_failed_fraction": share}})
        for share in (0.5, 0.4)
    )
    check_verdicts(allowed, groups)
    with pytest.raises(
        VerifierFailed,
        match=r"2 of 4 verdicts are timeout or error \(50%; .* 'reward judge: was answered with HTTP 500'",
    ):
        check_verdicts(stopped, groups)


def test_the_cost_of_a_step_is_the_sum_over_its_answers(server: RewardServer) -> None:
    ours = group("5", "5", "6", episode("", failed=True))
    (verdicts,) = score((judge(server.url),), ours)
    found = http_usage([ScoredGroup(ours, verdicts)] * 2)
    assert found is not None
    assert (found.calls, found.cache_hits) == (4, 2)
    assert found.seconds > 0
    more = http_usage([ScoredGroup(ours, verdicts)], found)
    assert more is not None
    assert more.calls == 6
    assert http_usage([ScoredGroup(ours, (Verdict("correct", "5", 0.0),) * 4)]) is None


def test_resampled_groups_cost_too() -> None:
    loss = {"zero_variance": "resample", "resample_limit": 1}
    sizes = {"prompts_per_step": 1, "samples_per_prompt": 2}
    config = RunConfig.model_validate({"learner": {"loss": loss}, "rollout": sizes})
    planner = RolloutPlanner(config, [Prompt("p", "", "1")] * 4, [IDS] * 4)

    def collected(statuses: tuple[VerdictStatus, VerdictStatus], usage: HttpUsage) -> Collected:
        verdicts = tuple(Verdict(status, None, 0.0, http=usage) for status in statuses)
        return Collected([ScoredGroup(group("a", "b"), verdicts)], 1.0, 0.0, 0.0, 1)

    equal = collected(("wrong", "wrong"), HttpUsage(3, 0.25, 1))
    again = collected(("wrong", "correct"), HttpUsage(1, 0.5, 0))
    rollouts = planner.complete(equal, 1, lambda requests: again)
    assert rollouts.groups == again.groups
    assert rollouts.http == HttpUsage(8, 1.5, 2)


# ---- settings ----------------------------------------------------------------------------------------------------


def test_two_servers_are_told_apart_by_their_labels(tmp_path: Path) -> None:
    urls = ("https://judge.example/score", "http://127.0.0.1:8000/run?limit=3")
    rewards = [{"name": "http", "label": f"judge-{n}", "url": url, "weight": 0.5} for n, url in enumerate(urls)]
    config = build({"verifier": {"rewards": [{"name": "correctness"}, *rewards]}})
    assert [reward.label for reward in config.verifier.rewards] == ["correctness", "judge-0", "judge-1"]
    assert [reward.name for reward in config.verifier.worker_rewards] == ["correctness"]
    file = tmp_path / "run.toml"
    file.write_text(to_toml(config))
    assert load_run(file) == config


def test_settings_of_other_components_did_not_change() -> None:
    assert RewardConfig().model_dump() == {"name": "correctness", "weight": 1.0}
    assert [reward.model_dump() for reward in VerifierConfig().rewards] == [{"name": "correctness", "weight": 1.0}]


@pytest.mark.parametrize(
    ("reward", "complaint"),
    [
        ({}, "verifier.rewards[0].url: is missing; set it"),
        ({"url": "ftp://host/"}, 'verifier.rewards[0].url = "ftp://host/": must look like https://host:port/path'),
        ({"url": "http://"}, "must look like https://host:port/path"),
        ({"url": "http://host:99999/"}, "must look like https://host:port/path"),
        ({"url": "judge"}, "must look like https://host:port/path"),
        (
            {"url": "http://me:secret@host/"},
            "has credentials; the administrator gives a token in GXPO_REWARD_TOKEN_FILE",
        ),
        ({"url": "http://me@host/"}, "has credentials"),
        ({"url": "http://host/#part"}, "has a fragment, which is not sent; remove it"),
        ({"url": "http://host/a,b"}, "has a blank, comma, backslash or control character"),
        ({"url": "http://host/\r\nX: 1"}, "has a blank, comma, backslash or control character"),
        ({"url": "http://host/", "label": "a/b"}, "verifier.rewards[0].label"),
        ({"url": "http://host/", "weight": 0}, "must be a finite number other than 0"),
        ({"url": "http://host/", "deadline_s": 0}, "verifier.rewards[0].deadline_s = 0: must be above 0"),
        ({"url": "http://host/", "concurrency": 0}, "verifier.rewards[0].concurrency = 0: must be at least 1"),
        ({"url": "http://host/", "token": "x"}, "verifier.rewards[0].token"),
    ],
)
def test_an_address_or_limit_that_cannot_be_used_is_rejected(reward: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build({"verifier": {"rewards": [{"name": "http", **reward}]}})
    assert complaint in str(caught.value)


def test_settings_of_http_are_refused_for_other_components_in_one_message() -> None:
    with pytest.raises(ConfigError) as caught:
        build({"verifier": {"rewards": [{"name": "format", "url": "http://host/", "retries": 2}]}})
    (line,) = str(caught.value).splitlines()[1:]
    assert line.strip() == 'verifier.rewards[0]: retries, url: only for name = "http"; remove it or set that name'


# ---- permission --------------------------------------------------------------------------------------------------


def test_an_address_must_be_listed_character_by_character() -> None:
    listed = {URLS: "https://judge.example/score, http://127.0.0.1:8000/run ,"}
    check_urls(["http://127.0.0.1:8000/run", "https://judge.example/score"], listed)
    check_urls([], {})
    for other in ("https://judge.example/", "https://judge.example/score/", "http://judge.example/score"):
        with pytest.raises(ConfigError, match=rf"{other} is not an allowed address on this machine.*{URLS}"):
            check_urls([other], listed)


def test_a_run_with_an_address_that_is_not_listed_never_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(URLS, raising=False)
    with pytest.raises(ConfigError, match=r"http://host/ is not an allowed address on this machine.*\(now empty\)"):
        check_rewards(VerifierConfig(rewards=(judge("http://host/"),)))


def test_the_verifiers_own_list_is_the_one_that_holds(server: RewardServer, monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = (judge(server.url),)
    check_rewards(VerifierConfig(rewards=rewards))
    monkeypatch.setenv(URLS, "http://elsewhere/")
    with pytest.raises(ConfigError, match="is not an allowed address on this machine"):
        score(rewards, group("5"))
    assert server.requests == []


def test_each_address_gets_its_own_token_and_no_other(
    server: RewardServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"# judges\nhttp://elsewhere/ other\n\n{server.url}  s3cret\n")
    monkeypatch.setenv(TOKEN_FILE, str(file))
    score((judge(server.url),), group("5"))
    assert "Authorization: Bearer s3cret" in server.headers.splitlines()
    file.write_text("http://elsewhere/ other\n")
    score((judge(server.url),), group("5"))
    assert "authorization" not in server.headers.lower()


@pytest.mark.parametrize(
    ("text", "complaint"), [("a b\nonly-one\n", "line 2: must be an address"), (None, "cannot be read")]
)
def test_a_token_file_that_cannot_be_used_is_rejected(tmp_path: Path, text: str | None, complaint: str) -> None:
    file = tmp_path / "tokens"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        tokens({TOKEN_FILE: str(file)})
    assert tokens({}) == {}
