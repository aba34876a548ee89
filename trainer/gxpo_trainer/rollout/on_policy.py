"""Batches of the strict loop: sampled by the weights that the learner is about to move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from gxpo_trainer.rollout.planner import RolloutPlanner, Rollouts
from gxpo_trainer.rollout.pool import Collected, RolloutPool
from gxpo_trainer.rollout.requests import SampleRequest, SamplingSettings
from gxpo_trainer.rollout.weight_sync import PoolSync


class RolloutSource(Protocol):
    """Where the training loop takes its batches from."""

    sync_due: bool
    """Whether a sync was put off that can be made now."""

    def batch(self, step: int) -> Rollouts:
        """The scored groups of this step."""

    def sync(self, version: int) -> PoolSync | None:
        """Bring the engines to the learner's weights; None: put off."""

    def collect(
        self, requests: Sequence[SampleRequest], sampling: SamplingSettings, version: int, *, rewards: bool = True
    ) -> Collected:
        """Sample and score requests that belong to no step, by the weights of `version`."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def restart(self) -> None:
        """Return to the first prompt."""

    def discard(self) -> None:
        """Drop what was sampled for coming steps."""


class OnPolicyRollouts:
    """Samples a batch when its step begins; nothing is ever put off or discarded."""

    sync_due = False

    def __init__(self, pool: RolloutPool, planner: RolloutPlanner) -> None:
        self._pool, self._planner = pool, planner
        self.sync = pool.sync
        self.collect = pool.collect
        self.state_dict, self.load_state_dict = planner.state_dict, planner.load_state_dict
        self.restart = planner.restart

    def batch(self, step: int) -> Rollouts:
        return self._planner.collect(self._pool, step, version=step - 1)

    def discard(self) -> None:
        pass
