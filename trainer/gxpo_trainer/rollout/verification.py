"""The verifier as a Ray actor: scores groups while the sampler is still sampling.

`ray.remote(VerifierActor).options(...)` makes the actor. Its methods are coroutines, so that many groups can be in
flight at once; the pool's worker processes do the work and the actor itself imports neither torch nor vLLM.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from typing import Any

from gxpo_trainer.config import VerifierConfig
from gxpo_trainer.errors import ConfigError, VerifierFailed
from gxpo_trainer.rewards.scoring import check_allowed
from gxpo_trainer.types import Group, Sample, ScoredGroup
from gxpo_trainer.verify.options import EXTRA_KEY
from gxpo_trainer.verify.pool import VerifierPool
from gxpo_trainer.verify.process import Pair


class VerifierActor:
    """Scores groups in killable processes.

    Verdicts `timeout` and `error` are passed on as such: who uses them decides, and counts them. When the workers
    cannot be started at all, `score` raises VerifierFailed.
    """

    def __init__(self, config: VerifierConfig) -> None:
        self._pool = make_pool(config, config.workers)
        self._components = not config.correctness_alone

    async def score(self, groups: Sequence[Group], rewards: bool = True) -> list[ScoredGroup]:
        """One ScoredGroup a group, in order, with one verdict a sample. Several calls may be in flight.

        rewards: also the components of the reward, which an evaluation has no use for.
        """
        futures = [self._pool.submit(pairs_of(group, rewards and self._components)) for group in groups]
        verdicts = await asyncio.gather(*(asyncio.wrap_future(future) for future in futures))
        return [ScoredGroup(group, tuple(found)) for group, found in zip(groups, verdicts, strict=True)]

    async def worker_pids(self) -> list[int]:
        """Process ids of the present workers."""
        return self._pool.worker_pids()

    async def close(self) -> None:
        """Kill the workers."""
        await asyncio.to_thread(self._pool.close)


def make_pool(config: VerifierConfig, workers: int) -> VerifierPool:
    """The pool of a run. A reward of correctness alone needs no components."""
    rewards = () if config.correctness_alone else tuple((reward.name, reward.weight) for reward in config.rewards)
    return VerifierPool(workers, config.deadline_s, config.memory_mb, rewards)


def pairs_of(group: Group, components: bool) -> list[Pair]:
    """What the workers need about each sample: more than gold and response only where it is used."""
    options = group.prompt.extra.get(EXTRA_KEY)
    shared: dict[str, Any] = {} if options is None else {"options": options.to_dict()}
    gold = group.prompt.gold
    if not components:
        return [(gold, sample.text, shared) if shared else (gold, sample.text) for sample in group.samples]
    extra = {name: value for name, value in group.prompt.extra.items() if name != EXTRA_KEY}
    # A row of a parquet file may hold dates and the like, which JSON has no form for.
    plain = json.loads(json.dumps(extra, default=str))
    return [
        (gold, sample.text, {**shared, "context": _context(group.prompt.text, sample, plain)})
        for sample in group.samples
    ]


def _context(problem: str, sample: Sample, extra: dict[str, Any]) -> dict[str, Any]:
    return {
        "problem": problem,
        "num_tokens": len(sample.token_ids),
        "truncated": sample.truncated,
        "extra": extra,
    }


def check_rewards(config: VerifierConfig) -> None:
    """Raises ConfigError when a reward class is not allowed here, or cannot be made in a worker; before a run starts.

    The class itself is imported in a worker process alone, never in this one.
    """
    names = [reward.name for reward in config.rewards]
    check_allowed(names, os.environ)
    if not any(":" in name for name in names):
        return
    try:
        with make_pool(config, workers=1) as pool:
            pool.verify_many([("1", "1")])
    except VerifierFailed as error:
        raise ConfigError(f"verifier.rewards: no worker starts with them: {error}") from error
