"""The interface of a reward component."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from gxpo_trainer.types import VerdictStatus


@dataclass(frozen=True, slots=True)
class RewardInput:
    """One response and what is known about it.

    problem: as a person reads it, before any template. gold: the final answer alone. extra: further fields of the
    problem's row, JSON-able. num_tokens: length of the response. truncated: cut at the limit. status: the verdict,
    one of correct, wrong, unparsed (a response without a verdict has no reward and is not asked about). extracted: the
    final answer that was read, None when there was none.
    """

    problem: str
    gold: str
    response: str
    num_tokens: int
    truncated: bool
    status: VerdictStatus
    extracted: str | None
    extra: Mapping[str, Any]


class Reward(Protocol):
    """A component: a finite number for a response. It must depend on nothing but its argument.

    An exception, or a value that is not finite, makes the verdict `error`; a call past `verifier.deadline_s` makes it
    `timeout`. Neither carries a reward.
    """

    def __call__(self, sample: RewardInput) -> float: ...
