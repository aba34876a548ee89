"""Loads the reward components of a run file and computes scores.

The author of a run file may not be trusted to run code on this machine. A class is therefore imported only if the
environment of this process, which the machine's administrator controls, lists it.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gxpo_trainer.errors import ConfigError
from gxpo_trainer.rewards.base import Reward, RewardInput
from gxpo_trainer.rewards.components import OWN
from gxpo_trainer.types import Utterance, Verdict

ALLOWLIST = "GXPO_REWARD_ALLOWLIST"


def allowed_classes(environment: Mapping[str, str]) -> frozenset[str]:
    """The comma-separated entries `package.module:Class` of the allowlist."""
    return frozenset(name.strip() for name in environment.get(ALLOWLIST, "").split(",") if name.strip())


def check_allowed(names: Sequence[str], environment: Mapping[str, str]) -> None:
    """Raises ConfigError for the first class that is not allowlisted. Imports nothing."""
    allowed = allowed_classes(environment)
    for name in names:
        if name not in OWN and name not in allowed:
            raise ConfigError(
                f"verifier.rewards: the class {name!r} is not allowed on this machine; its administrator can list it "
                f"in the environment variable {ALLOWLIST} (now {', '.join(sorted(allowed)) or 'empty'})"
            )


class RewardFailed(Exception):
    """A component raised an exception or returned a non-finite number."""


@dataclass(frozen=True, slots=True)
class Scorer:
    """Components as (label, weight, component), in the order of the run file."""

    parts: tuple[tuple[str, float, Reward], ...]

    @classmethod
    def load(cls, rewards: Sequence[tuple[str, float]], environment: Mapping[str, str]) -> Scorer:
        """Import and create the components of (name, weight) pairs. Raises ConfigError."""
        check_allowed([name for name, _ in rewards], environment)
        return cls(tuple((name.rpartition(":")[2], weight, _build(name)) for name, weight in rewards))

    def score(self, gold: str, response: str, verdict: Verdict, context: Mapping[str, Any]) -> dict[str, Any]:
        """`components` and `score` of one response; empty when its verdict has no reward.

        context: problem, num_tokens, truncated, extra; for an episode also turns, each speaker, text and reward, and
        environment_reward. Raises RewardFailed.
        """
        if verdict.reward is None:
            return {}
        turns = tuple(Utterance(*turn) for turn in context.get("turns", ()))
        sample = RewardInput(
            gold=gold,
            response=response,
            status=verdict.status,
            extracted=verdict.extracted,
            **{**context, "turns": turns},
        )
        values = {label: _value(label, component, sample) for label, _, component in self.parts}
        return {"components": values, "score": sum(weight * values[label] for label, weight, _ in self.parts)}


def _build(name: str) -> Reward:
    if name in OWN:
        return OWN[name]()
    module, _, attribute = name.partition(":")
    try:
        component: Reward = getattr(importlib.import_module(module), attribute)()
    except Exception as error:  # third-party code may raise anything
        raise ConfigError(
            f"verifier.rewards: cannot create {name!r} ({type(error).__name__}: {error}); it must be a class without "
            "constructor arguments on the import path of the verifier's machine"
        ) from error
    if not callable(component):
        raise ConfigError(f"verifier.rewards: {name!r} is not callable; define __call__(sample) -> float")
    return component


def _value(label: str, component: Reward, sample: RewardInput) -> float:
    try:
        value = float(component(sample))
    except MemoryError:
        raise
    except Exception as error:  # third-party code may raise anything
        raise RewardFailed(f"reward {label}: {type(error).__name__}: {error}") from error
    if not math.isfinite(value):
        raise RewardFailed(f"reward {label} is {value}; it must be a finite number")
    return value
