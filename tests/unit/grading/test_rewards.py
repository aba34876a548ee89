"""Reward components: built-in and custom classes, the allowlist, and failures."""

from __future__ import annotations

import datetime
import functools
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.reward_server import score

from gxpo_trainer.config import RewardConfig
from gxpo_trainer.config.io import build
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.grading.rewards import RewardFailed, RewardInput, Scorer, correctness, one_box
from gxpo_trainer.plugins import allowed
from gxpo_trainer.training.controller import component_means
from gxpo_trainer.types import Group, Prompt, Sample, ScoredGroup, Verdict, VerifyOptions

ALLOWLIST = "GXPO_REWARD_ALLOWLIST"
OWN_MODULE = '''
import functools


class Brevity:
    """1 minus a tenth of the tokens; misbehaves when the response asks for it."""

    def __call__(self, sample):
        if "hang" in sample.response:
            while True:
                pass
        if "raise" in sample.response:
            raise KeyError("no such thing")
        if "nan" in sample.response:
            return float("nan")
        assert sample.extra["level"] == "5" and sample.problem == "What?"
        return 1 - sample.num_tokens / 10


class Broken:
    def __init__(self):
        raise OSError("no model here")


class NotCallable:
    pass


number = 3


def constant(value, sample):
    return value


partial = functools.partial(constant, 0.5)
instance = Brevity()


async def coroutine(sample):
    return 0.5


class Async:
    async def __call__(self, sample):
        return 0.5


def two(prompts, completions, **columns):
    return [0.5]


class NoParameter:
    def __call__(self):
        return 0.5
'''


CONTEXT: dict[str, Any] = {"problem": "?", "num_tokens": 1, "truncated": False, "extra": {}}
CORRECT = Verdict("correct", "5", 0.0)


def scored_by(*components: Any) -> dict[str, Any]:
    """The score of a response by components of weight 2."""
    parts = tuple((f"part{number}", 2.0, component) for number, component in enumerate(components))
    return Scorer(parts).score("5", "5", CORRECT, CONTEXT)


def sample_input(response: str, *, truncated: bool = False, status: str = "correct") -> RewardInput:
    return RewardInput("What?", "5", response, 4, truncated, status, "5", {})  # type: ignore[arg-type]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module on the import path of worker processes, all of its classes allowed."""
    (tmp_path / "own_rewards.py").write_text(OWN_MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ",".join(f"own_rewards:{name}" for name in ("Brevity", "Broken", "NotCallable", "Missing", "number"))
    monkeypatch.setenv(ALLOWLIST, f" {names}, other:Thing ")
    return "own_rewards"


@pytest.mark.parametrize(
    ("response", "truncated", "value"),
    [
        (r"so $\boxed{5}$.", False, 1.0), (r"so \boxed{\frac{1}{2}} it is", False, 1.0), ("so 5", False, 0.0),
        (r"\boxed{5}, or \boxed{5}", False, 0.0), (r"so \boxed{5", False, 0.0), (r"so \boxed{5}", True, 0.0),
        (r"<think>\boxed{4}? \boxed{5}!</think> It is \boxed{5}.", False, 1.0),
    ],
)  # fmt: skip
def test_format_requires_one_box_and_no_truncation(response: str, truncated: bool, value: float) -> None:
    assert one_box(sample_input(response, truncated=truncated)) == value


def test_the_score_is_the_weighted_sum_and_the_length_penalty_falls_evenly_in_the_buffer() -> None:
    assert [correctness(sample_input("", status=s)) for s in ("correct", "wrong", "unparsed")] == [1.0, 0.0, 0.0]
    # L_max 20, L_cache 8: nothing up to 12 tokens, an eighth less for each more, −1 from 20 on.
    penalty = {"name": "length_penalty", "max_tokens": 20, "buffer_tokens": 8}
    config = build({"verifier": {"rewards": [{"name": "correctness"}, penalty | {"weight": 0.5}]}})
    scorer = Scorer.load([reward.model_dump() for reward in config.verifier.worker_rewards], {})
    scores = [scorer.score("5", "5", CORRECT, CONTEXT | {"num_tokens": n}) for n in (1, 12, 13, 16, 20, 30)]
    assert [score["components"]["length_penalty"] for score in scores] == [0, 0, -0.125, -0.5, -1, -1]
    assert [score["score"] for score in scores] == [1, 1, 0.9375, 0.75, 0.5, 0.5]
    assert scorer.score("5", "5", Verdict("timeout", None, 5.0), CONTEXT) == {}
    with pytest.raises(ConfigError, match="exceeds max_tokens = 7"):
        build({"verifier": {"rewards": [penalty | {"max_tokens": 7}]}})


@pytest.mark.parametrize(
    ("rewards", "complaint"),
    [
        ([], "verifier.rewards = []: is empty; name at least one reward"),
        ([{"name": "os.system"}], 'rewards[0].name = "os.system": must be one of "correctness", "format", '),
        ([{"name": "a:b:c"}], '"environment", "length_penalty", "http", or a class as'),
        ([{"name": "format", "weight": 0}], "rewards[0].weight = 0: must be a finite number other than 0"),
        ([{"name": "format", "weight": float("inf")}], "must be a finite number other than 0"),
        ([{"name": "a:X"}, {"name": "b:X"}], "two rewards are called X"),
        ([{"name": "http", "url": "http://h:1/", "label": "mean"}], "reward/mean is another metric"),
        ([{"name": "mine:correctness"}], "reward/correctness is another metric; rename the class or set another label"),
        ([{"name": "http", "url": "http://h/", "label": "a/b"}], "verifier.rewards[0].label"),
        ([{"name": "http", "url": "http://h/", "deadline_s": 0}], "rewards[0].deadline_s = 0: must be above 0"),
        ([{"name": "http", "url": "http://h/", "token": "x"}], "verifier.rewards[0].token"),
        ([{"name": "http"}], "verifier.rewards[0].url: is missing; set it"),
        ([{"name": "http", "url": "ftp://host/"}],
         'verifier.rewards[0].url = "ftp://host/": must look like https://host:port/path'),
        ([{"name": "http", "url": "http://host:99999/"}], "must look like https://host:port/path"),
        ([{"name": "http", "url": "http://me:secret@host/"}],
         "has credentials; the administrator gives a token in GXPO_REWARD_TOKEN_FILE"),
        ([{"name": "http", "url": "http://host/#part"}], "has a fragment, which is not sent; remove it"),
        ([{"name": "http", "url": "http://h/\r\nX: 1"}], "has a blank, comma, backslash or control character"),
        ([{"name": "format", "url": "http://host/", "retries": 2}],
         'verifier.rewards[0]: retries, url: only for name = "http"; remove it or set that name'),
        ([{"name": "environment"}], 'environment is always 0 with environment.name = "single_turn"'),
    ],
)  # fmt: skip
def test_rewards_that_mean_nothing_are_rejected(rewards: list[dict[str, Any]], complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build({"verifier": {"rewards": rewards}})
    assert complaint in str(caught.value)
    build({"verifier": {"rewards": [{"name": "environment"}]}, "environment": {"name": "calculator"}})


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("Broken", "(OSError: no model here)"),
        ("NotCallable", "is not callable; define __call__(sample) -> float"),
        ("Missing", "module own_rewards has no Missing"),
        ("number", "(TypeError"),
        ("coroutine", "is a coroutine function; define it without async"),
        ("Async", "is a coroutine function; define it without async"),
        ("two", "does not take one response (missing a required argument: 'completions'); define it with one parame"),
        ("NoParameter", "does not take one response (too many positional arguments); define it with one parameter"),
    ],
)
def test_a_class_that_cannot_be_created_is_rejected(module: str, name: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Scorer.load([{"name": f"{module}:{name}", "weight": 1.0}], {ALLOWLIST: f"{module}:{name}"})
    assert complaint in str(caught.value)
    assert f"{module}:{name}" in str(caught.value)


@pytest.mark.parametrize(("name", "value"), [("partial", 0.5), ("instance", 0.9), ("Brevity", 0.9)])
def test_a_class_is_created_and_anything_else_that_can_be_called_is_the_component(
    module: str, name: str, value: float
) -> None:
    rewards = [{"name": f"{module}:{name}", "weight": 1.0}]
    context = CONTEXT | {"problem": "What?", "extra": {"level": "5"}}
    assert Scorer.load(rewards, {}).score("5", "5", CORRECT, context)["score"] == value


def test_a_class_not_on_the_allowlist_is_rejected_without_import() -> None:
    assert allowed("rewards", {ALLOWLIST: "a:B, c.d:E ,"}) == {"a:B", "c.d:E"}
    for name in ("a:C", "os:getcwd"):
        with pytest.raises(ConfigError, match=rf"'{name}' is not allowed on this machine; .*{ALLOWLIST} \(now a:B\)"):
            Scorer.load([{"name": name, "weight": 1.0}], {ALLOWLIST: "a:B"})


def test_a_failing_or_hanging_component_affects_only_its_response_and_others_have_the_sum(module: str) -> None:
    names = (RewardConfig(), RewardConfig(name="format", weight=0.5), RewardConfig(name=f"{module}:Brevity"))
    ids = np.zeros(2, np.int32)
    responses = ("raise", r"\boxed{5}", "hang", "nan", "5.4")
    samples = tuple(Sample(text, ids, np.zeros(2, np.float32), "stop") for text in responses)
    dated = {"level": "5", "date": datetime.date(2024, 1, 1), "verify": VerifyOptions(0.5)}
    group = Group(Prompt("p", "What?", "5", dated), ids, samples, weights_version=0)
    verdicts = score(names, group, deadline_s=5.0)
    assert [verdict.status for verdict in verdicts] == ["error", "correct", "timeout", "error", "correct"]
    # 2 tokens: brevity 0.8. The tolerance of 0.5 makes both answers right; only the first is boxed.
    boxed, bare = ({"correctness": 1.0, "format": form, "Brevity": 0.8} for form in (1.0, 0.0))
    assert [verdict.components for verdict in verdicts] == [None, boxed, None, None, bare]
    assert [verdict.reward for verdict in verdicts] == [None, pytest.approx(2.3), None, None, pytest.approx(1.8)]
    assert "reward Brevity: KeyError" in verdicts[0].detail
    assert "reward Brevity returned nan, which is not a finite number" in verdicts[3].detail
    means = component_means([ScoredGroup(group, verdicts)])
    assert means == pytest.approx({"reward/format": 0.5, "reward/Brevity": 0.8})


def test_a_component_may_be_cached_and_one_that_exits_fails_its_response_alone() -> None:
    calls = []

    @functools.lru_cache
    def cached(sample: RewardInput) -> float:
        calls.append(sample)
        return len(sample.extra)

    for extra, value in (({"a": []}, 1.0), ({"a": []}, 1.0), ({"a": [], "b": 2}, 2.0)):
        assert Scorer((("cached", 1.0, cached),)).score("5", "5", CORRECT, CONTEXT | {"extra": extra})["score"] == value
    assert len(calls) == 2
    with pytest.raises(RewardFailed, match=r"^reward part0: SystemExit: no judge$"):
        scored_by(lambda sample: sys.exit("no judge"))


def test_numbers_of_every_kind_are_rewards_and_every_component_that_returns_none_is_named() -> None:
    for value, number in ((True, 1.0), (0, 0.0), (np.float32(0.5), 0.5), (np.array(2), 2.0), (Fraction(1, 4), 0.25)):
        assert scored_by(lambda sample: value)["score"] == 2 * number  # noqa: B023
    for odd in ("much", "0.5", b"1", None, [1.0], float("nan"), float("-inf"), 10**400, np.float32("nan"), 1j):
        with pytest.raises(RewardFailed, match=r"^reward part0 returned .*, which is not a finite number$"):
            scored_by(lambda sample: odd)  # noqa: B023

    def broken(sample: RewardInput) -> float:
        raise ValueError("x" * 1000)

    with pytest.raises(RewardFailed) as caught:
        scored_by(broken, lambda sample: 1.0, lambda sample: "0.5")
    first, last = str(caught.value).split("; ")
    assert first.startswith("reward part0: ValueError: xxx")
    assert last == "reward part2 returned '0.5', which is not a finite number"
    with pytest.raises(RewardFailed, match=r"^the weighted sum of the rewards is inf$"):
        scored_by(lambda sample: 1e308)
