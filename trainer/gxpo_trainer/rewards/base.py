"""The interface of a reward component."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from gxpo_trainer.types import Utterance, VerdictStatus


@dataclass(frozen=True, slots=True)
class RewardInput:
    """One response with its problem and verdict.

    problem: text before any template. gold: the final answer alone. num_tokens: those that the policy wrote.
    truncated: cut at the length limit. status: correct, wrong or unparsed (timeouts and errors have no reward).
    extracted: the final answer in the response, None if there is none or the environment gave the verdict. extra:
    further JSON-serializable fields of the problem's row. turns: the conversation after the prompt; empty without an
    environment, where `response` is all of it. environment_reward: sum of the environment's rewards, None where it gave
    none.
    """

    problem: str
    gold: str
    response: str
    num_tokens: int
    truncated: bool
    status: VerdictStatus
    extracted: str | None
    extra: Mapping[str, Any]
    turns: tuple[Utterance, ...] = ()
    environment_reward: float | None = None


class Reward(Protocol):
    """A component: maps a response to a finite number, as a pure function of its argument.

    An exception or a non-finite value makes the verdict `error`, a call longer than `verifier.deadline_s` makes it
    `timeout`; neither has a reward.
    """

    def __call__(self, sample: RewardInput) -> float: ...
