"""Calls of episodes: what a sampling engine asks the processes that run environments."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, Protocol

from gxpo_trainer.environments.base import Observation, Problem, Turn


@dataclass(frozen=True, slots=True)
class Call:
    """Advance an episode by its last action, or begin it: the history is complete, so that an episode whose process
    was lost can be played again.

    episode: unique in the run. actions: all turns of the policy so far; empty: reset.
    """

    episode: str
    problem: Problem
    seed: int
    actions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reply:
    """answer: an Observation to a reset, else a Turn; None when the environment failed, with the reason in `detail`."""

    answer: Observation | Turn | None
    failure: Literal["timeout", "error"] | None = None
    detail: str = ""


class Environments(Protocol):
    """Runs the episodes of a run, each in a process of its own."""

    def advance(self, call: Call) -> Future[Reply]:
        """Reply to a call; a failure of the environment is a Reply. The future has an exception, a GxpoError, only when
        no environment can be run at all."""
        ...

    def end(self, episode: str) -> None:
        """The episode needs its process no longer. May be called for an unknown or ended episode."""
        ...
