"""The contract of an environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict


class Message(TypedDict):
    """One message of a chat template. role: usually "user" or "system"."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Problem:
    """text: the problem in the run's template (`data.template`). gold: the final answer alone. extra: further
    JSON-serializable fields of the problem's row."""

    id: str
    text: str
    gold: str
    extra: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Observation:
    """What the policy sees first."""

    messages: tuple[Message, ...]

    @classmethod
    def of_text(cls, text: str) -> Observation:
        """One message of the user."""
        return cls((Message(role="user", content=text),))


@dataclass(frozen=True, slots=True)
class Turn:
    """Answer to one turn of the policy.

    observation: text that the policy sees next, as a message of the user; not shown when `done`. reward: added to the
    episode's reward; None in every turn leaves the verdict to the verifier. done: the episode ends.
    """

    observation: str = ""
    reward: float | None = None
    done: bool = False


class Environment(Protocol):
    """One episode.

    `reset` is called once, then `step` for every turn of the policy. The same problem and seed must give the same
    first observation, and the same actions the same turns: an episode whose process was lost is played again from its
    actions.
    """

    def reset(self, problem: Problem, seed: int) -> Observation: ...

    def step(self, action: str) -> Turn: ...
