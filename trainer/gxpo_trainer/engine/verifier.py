"""The verifier as a Ray actor: scores groups while the sampler is still sampling.

`ray.remote(VerifierActor).options(...)` makes the actor. Its methods are coroutines, so that many groups can be in
flight at once; the pool's worker processes do the work and the actor itself imports neither torch nor vLLM.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from gxpo_trainer.config import VerifierConfig
from gxpo_trainer.types import Group, ScoredGroup
from gxpo_trainer.verify.pool import VerifierPool


class VerifierActor:
    """Scores groups in killable processes.

    Verdicts `timeout` and `error` are passed on as such: who uses them decides, and counts them. When the workers
    cannot be started at all, `score` raises VerifierFailed.
    """

    def __init__(self, config: VerifierConfig) -> None:
        self._pool = VerifierPool(config.workers, config.deadline_s, config.memory_mb)

    async def score(self, groups: Sequence[Group]) -> list[ScoredGroup]:
        """One ScoredGroup a group, in order, with one verdict a sample. Several calls may be in flight."""
        futures = [
            self._pool.submit([(group.prompt.gold, sample.text) for sample in group.samples]) for group in groups
        ]
        verdicts = await asyncio.gather(*(asyncio.wrap_future(future) for future in futures))
        return [ScoredGroup(group, tuple(found)) for group, found in zip(groups, verdicts, strict=True)]

    async def worker_pids(self) -> list[int]:
        """Process ids of the present workers."""
        return self._pool.worker_pids()

    async def close(self) -> None:
        """Kill the workers."""
        await asyncio.to_thread(self._pool.close)
