"""Reward components. Pure, except for `http`, which asks a server.

A component is a class without constructor arguments, made once per worker process and called for each response. The run
file refers to it as `package.module:Class`, or by the name that an installed package registers in the entry-point group
`gxpo.rewards`. With settings of its own it takes an instance of its settings class, a subclass of
`gxpo_trainer.config.RewardConfig` that names it as its `implementation`. See docs/tutorials/write-a-reward.md, and
gxpo_trainer/plugins.py for what may be imported.

Also the addresses that reward components may call, and the tokens for them: both are the administrator's.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from gxpo_trainer import plugins
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.grading.extract import find_boxes, response_tail
from gxpo_trainer.types import Utterance, Verdict, VerdictStatus


@dataclass(frozen=True, slots=True)
class RewardInput:
    """One response with its problem and verdict.

    problem: text before any template. gold: empty without one. num_tokens: those that the policy wrote. truncated: cut
    at the length limit. status: neither timeout nor error, which have no reward. extracted: the final answer, None if
    there is none or the environment gave the verdict. extra: further JSON-serializable fields of the problem's row.
    turns: the conversation after the prompt; empty without an environment. environment_reward: None where it gave none.
    """

    problem: str
    gold: str
    response: str
    num_tokens: int
    truncated: bool
    status: VerdictStatus
    extracted: str | None
    extra: Mapping[str, Any] = field(hash=False)  # hashable without it, for `functools.lru_cache`
    turns: tuple[Utterance, ...] = ()
    environment_reward: float | None = None


class Reward(Protocol):
    """A component: maps a response to a finite number, as a pure function of its argument.

    An exception, or what is no finite number (`reward_number`), makes the verdict `error`; a call longer than
    `verifier.deadline_s` makes it `timeout`. Neither has a reward.
    """

    def __call__(self, sample: RewardInput) -> float: ...


__all__ = ["Reward", "RewardInput"]


def correctness(sample: RewardInput) -> float:
    """1 if the final answer equals the gold answer, else 0. Raises ValueError where the problem has none."""
    if sample.status == "ungraded":
        raise ValueError("the problem has no answer, and its environment gave no reward")
    return 1.0 if sample.status == "correct" else 0.0


def one_box(sample: RewardInput) -> float:
    """1 if the response is not truncated and has exactly one box, not counting its thinking part; else 0."""
    return 1.0 if not sample.truncated and len(find_boxes(response_tail(sample.response))) == 1 else 0.0


def environment_reward(sample: RewardInput) -> float:
    """Sum of the environment's rewards, 0 where it gave none."""
    return sample.environment_reward or 0.0


def length_penalty(sample: RewardInput, max_tokens: int, buffer_tokens: int) -> float:
    """Soft overlong punishment: DAPO, arXiv 2503.14476, eq. 13.

    0 up to L_max − L_cache tokens, then (L_max − L_cache − length) / L_cache, and −1 from L_max on.
    """
    beyond = sample.num_tokens - (max_tokens - buffer_tokens)
    return -min(max(beyond / buffer_tokens, 0.0), 1.0)


OWN: dict[str, Callable[..., float]] = {
    "correctness": correctness,
    "format": one_box,
    "environment": environment_reward,
    "length_penalty": length_penalty,
}
"""The built-in components; what they take besides the response are their settings."""
_LONGEST_PROBLEM = 200


class NoNumber(ValueError):
    """A component returned no finite number; the message says what."""


class RewardFailed(Exception):
    """Components raised an exception or returned no finite number; the message names each of them."""


def reward_number(value: object) -> float:
    """The finite number that a component of any kind returned; True is 1 and False 0. Raises NoNumber otherwise.

    Text is no number, also where it could be read as one.
    """
    number = math.nan
    with suppress(TypeError, ValueError, OverflowError):
        if not isinstance(value, str | bytes | bytearray):
            number = float(value)  # type: ignore[arg-type]  # tensors of one element have __float__
    if not math.isfinite(number):
        raise NoNumber(f"{value!r:.80}, which is not a finite number")
    return number


@dataclass(frozen=True, slots=True)
class Scorer:
    """Components as (label, weight, component), in the order of the run file."""

    parts: tuple[tuple[str, float, Reward], ...]

    @classmethod
    def load(cls, rewards: Sequence[Mapping[str, Any]], environment: Mapping[str, str]) -> Scorer:
        """Import and create the components with these settings, those of RewardConfig. Raises ConfigError."""
        return cls(tuple((r["name"].rpartition(":")[2], r["weight"], _build(r, environment)) for r in rewards))

    def score(self, gold: str, response: str, verdict: Verdict, context: Mapping[str, Any]) -> dict[str, Any]:
        """`components` and `score` of one response; empty when its verdict has no reward.

        context: problem, num_tokens, truncated, extra; for an episode also turns, each speaker, text and reward, and
        environment_reward; `rewards`: labels of the components that judge it, all without. Raises RewardFailed.
        """
        if verdict.failed:
            return {}
        given = {"rewards": [label for label, _, _ in self.parts], "turns": ()} | dict(context)
        parts = [part for part in self.parts if part[0] in given["rewards"]]
        given["turns"] = tuple(Utterance(*turn) for turn in given["turns"])
        del given["rewards"]
        sample = RewardInput(gold=gold, response=response, status=verdict.status, extracted=verdict.extracted, **given)
        values: dict[str, float] = {}
        problems: list[str] = []
        for label, _, component in parts:
            try:
                values[label] = reward_number(component(sample))
            except MemoryError:
                raise
            except BaseException as error:  # third-party code may raise anything, also SystemExit
                reason = f" returned {error}" if isinstance(error, NoNumber) else f": {type(error).__name__}: {error}"
                problems.append(f"reward {label}{reason}"[:_LONGEST_PROBLEM])
        score = sum(weight * values[label] for label, weight, _ in parts if label in values)
        if not math.isfinite(score):
            problems.append(f"the weighted sum of the rewards is {score}")
        if problems:
            raise RewardFailed("; ".join(problems))
        return {"components": values, "score": score}


def _build(settings: Mapping[str, Any], environment: Mapping[str, str]) -> Reward:
    name = settings["name"]
    if name in OWN:
        own = {key: value for key, value in settings.items() if key not in ("name", "weight")}
        return functools.partial(OWN[name], **own)
    try:
        component: Reward = plugins.factory("rewards", settings, environment)()
    except ConfigError as error:
        raise ConfigError(f"verifier.rewards: {name!r} {error}") from error
    except Exception as error:  # third-party code may raise anything
        raise ConfigError(
            f"verifier.rewards: cannot create {name!r} ({type(error).__name__}: {error}); it must be a class without "
            "constructor arguments, or a settings class whose implementation takes the settings"
        ) from error
    if not callable(component):
        raise ConfigError(f"verifier.rewards: {name!r} is not callable; define __call__(sample) -> float")
    if inspect.iscoroutinefunction(component) or inspect.iscoroutinefunction(component.__call__):
        raise ConfigError(f"verifier.rewards: {name!r} is a coroutine function; define it without async")
    with suppress(ValueError):  # functions of C may have no signature
        try:
            inspect.signature(component).bind(RewardInput)
        except TypeError as error:
            raise ConfigError(
                f"verifier.rewards: {name!r} does not take one response ({error}); define it with one parameter, "
                "(sample) -> float, whose fields are those of gxpo.RewardInput"
            ) from None
    return component


URLS = "GXPO_REWARD_URLS"
TOKEN_FILE = "GXPO_REWARD_TOKEN_FILE"


def tokens(environment: Mapping[str, str]) -> dict[str, str]:
    """Address → bearer token, from the file that GXPO_REWARD_TOKEN_FILE names: lines `URL TOKEN`. Raises ConfigError.

    A file, and not the variable itself, so that no list of processes or jobs shows a token.
    """
    if not (name := environment.get(TOKEN_FILE)):
        return {}
    try:
        lines = Path(name).read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{TOKEN_FILE} = {name} cannot be read: {error}") from None
    values = {}
    for number, line in enumerate(lines, start=1):
        parts = line.split()
        if not parts or parts[0].startswith("#"):
            continue
        if len(parts) != 2:
            raise ConfigError(f"{TOKEN_FILE} = {name}, line {number}: must be an address, a blank and a token")
        values[parts[0]] = parts[1]
    return values
