"""Selection of each step's prompts and seeds, and the resulting rollouts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gxpo_trainer.algo.advantages import zero_variance
from gxpo_trainer.config import RunConfig
from gxpo_trainer.data.cursor import PromptCursor
from gxpo_trainer.data.prompts import resolve_template
from gxpo_trainer.rollout.requests import EpisodeStart, SampleRequest, SamplingSettings
from gxpo_trainer.types import Group, HttpUsage, Prompt, ScoredGroup

if TYPE_CHECKING:
    from gxpo_trainer.rollout.pool import Collected, RolloutPool

REPEATED = -1
"""Round of prompts that are sampled again because their groups were too old."""


@dataclass(frozen=True, slots=True)
class Rollouts:
    """One step's scored groups. num_tokens counts all sampled tokens, including those of resampled groups, and none
    that an environment wrote.

    idle_fraction: see pool.Collected. engines_alive: engines that were ready at the end. http: cost of reward
    components over HTTP, of resampled groups too; None in a run without them.
    """

    groups: list[ScoredGroup]
    num_tokens: int
    rollout_s: float
    verify_s: float
    num_resampled: int
    sampling_s: float
    idle_fraction: float = 0.0
    engines_alive: int = 1
    num_dropped: int = 0
    http: HttpUsage | None = None


class RolloutPlanner:
    """Draws prompts with a resumable cursor, whose position is its only state."""

    def __init__(
        self, config: RunConfig, prompts: Sequence[Prompt], token_ids: Sequence[npt.NDArray[np.int32]]
    ) -> None:
        self.config = config
        self._template = resolve_template(config.data.template, config.data.source)
        self.prompts, self.token_ids = prompts, token_ids
        self.sampling = SamplingSettings(
            max_new_tokens=config.rollout.max_new_tokens,
            temperature=config.rollout.temperature,
            ignore_eos=config.rollout.ignore_eos,
        )
        self.restart()

    def restart(self) -> None:
        """Return to the first prompt of the first epoch."""
        self.cursor = PromptCursor(len(self.prompts), seed=self.config.seed, shuffle=self.config.data.shuffle)

    def collect(self, pool: RolloutPool, step: int, version: int) -> Rollouts:
        """Sample and score one step's groups with the weights of `version`."""

        def collect(requests: Sequence[SampleRequest]) -> Collected:
            return pool.collect(requests, self.sampling, version)

        prompts = self.cursor.next(self.config.rollout.prompts_per_step)
        return self.complete(collect(self.requests(prompts, step)), step, collect)

    def complete(
        self, first: Collected, step: int, collect: Callable[[Sequence[SampleRequest]], Collected]
    ) -> Rollouts:
        """The step's rollouts from the groups of its first round.

        With `zero_variance = "resample"`, groups with equal rewards are replaced by groups of other prompts, for at
        most `resample_limit` rounds (dynamic sampling, DAPO, arXiv 2503.14476), which `collect` samples.
        """
        num_groups = self.config.rollout.prompts_per_step
        kept: list[ScoredGroup] = []
        flat: list[ScoredGroup] = []
        tokens, rollout_s, verify_s, idle_s, rounds = 0, 0.0, 0.0, 0.0, 0
        http: HttpUsage | None = None
        resample = self.config.learner.loss.zero_variance == "resample"
        limit = self.config.learner.loss.resample_limit if resample else 0
        part = first
        while True:
            rollout_s, verify_s, rounds = rollout_s + part.rollout_s, verify_s + part.verify_s, rounds + 1
            idle_s += part.idle_fraction * part.rollout_s
            tokens += num_sampled(part.groups)
            http = http_usage(part.groups, http)
            for group in part.groups:
                is_flat = resample and zero_variance([verdict.reward for verdict in group.verdicts])
                (flat if is_flat else kept).append(group)
            if len(kept) >= num_groups or rounds > limit:
                break
            part = collect(self.requests(self.cursor.next(num_groups - len(kept)), step, rounds))
        # Fill up with zero-variance groups, which have no gradient, so that the batch keeps its size.
        groups = kept + flat[: max(0, num_groups - len(kept))]
        return Rollouts(
            groups,
            tokens,
            rollout_s,
            verify_s,
            num_resampled=max(0, rounds - 1),
            sampling_s=rollout_s,
            idle_fraction=idle_s / rollout_s if rollout_s else 0.0,
            engines_alive=part.engines_alive,
            http=http,
        )

    def requests(
        self, indices: Sequence[int], step: int, round_: int = 0, version: int | None = None
    ) -> list[SampleRequest]:
        """One request per prompt, seeded only in deterministic mode, which is slightly slower.

        version: of the weights that sample, None for the step's own, step − 1.
        """
        return [
            self._request(
                self.prompts[index],
                self.token_ids[index],
                request_seed(self.config.seed, step, round_, position, version),
            )
            for position, index in enumerate(indices)
        ]

    def repeated(self, groups: Sequence[Group], step: int) -> list[SampleRequest]:
        """Requests for the prompts of these groups again."""
        return [
            self._request(
                group.prompt, group.prompt_token_ids, request_seed(self.config.seed, step, REPEATED, position)
            )
            for position, group in enumerate(groups)
        ]

    def _request(self, prompt: Prompt, token_ids: npt.NDArray[np.int32], seed: int) -> SampleRequest:
        config = self.config
        return SampleRequest(
            prompt=prompt,
            prompt_token_ids=token_ids,
            num_samples=config.rollout.samples_per_prompt,
            seed=seed if config.rollout.deterministic else None,
            episode=EpisodeStart.of(prompt, self._template, seed, config.data.max_prompt_tokens)
            if config.environment.multi_turn
            else None,
        )

    def state_dict(self) -> dict[str, Any]:
        return dict(self.cursor.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.cursor.load_state_dict(state)


def http_usage(groups: Sequence[ScoredGroup], before: HttpUsage | None = None) -> HttpUsage | None:
    """Cost of the groups' reward components over HTTP, added to `before`; None without such components."""
    found = [verdict.http for group in groups for verdict in group.verdicts if verdict.http is not None]
    return sum(found, before or HttpUsage()) if found else before


def num_sampled(groups: Sequence[ScoredGroup]) -> int:
    """Tokens that the policy wrote."""
    return sum(sample.num_sampled for scored in groups for sample in scored.group.samples)


def request_seed(run_seed: int, step: int, round_: int, position: int, version: int | None = None) -> int:
    """A 31-bit seed, a platform-independent hash of its arguments. version: None stands for step − 1."""
    key = f"{run_seed}/{step}/{round_}/{position}"
    if version is not None and version != step - 1:
        key += f"/{version}"
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") >> 1
