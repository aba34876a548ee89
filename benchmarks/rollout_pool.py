"""The pool on two cores: two engines against one, and a sync to four engines against one.

Every engine has one thread. The pool of one engine runs on one core with all that belongs to it (verifier, controlling
process, Ray), the pool of two on two; a pool of one whose engine has a core to itself is measured as well. Each engine
samples MOST_SEQUENCES at a time and has more to do, so that one of two engines is as busy as one alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.measure import Figure, median, ratio, save
from benchmarks.small_loop import small_loop
from gxpo_trainer.config import RunConfig
from gxpo_trainer.rollout.sources import OnPolicyRollouts

ROUNDS = 10
MOST_SEQUENCES = 128


def config_of(samplers: int) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"max_length": 256},
            "data": {"num_problems": 512},
            "rollout": {
                "prompts_per_step": 128,
                "samples_per_prompt": 8,
                "max_new_tokens": 48,
                "max_num_seqs": MOST_SEQUENCES,
                "deterministic": True,
            },
            "placement": {
                "samplers": samplers,
                "sampler_threads": 1,
                "sampler_cpus": 0.2,
                "learner_cpus": 0.2,
                "verifier_cpus": 0.2,
            },
        }
    )


@contextmanager
def pool_of(samplers: int, cores: int = 2) -> Iterator[Any]:
    """A pool on the starter policy, synced from a learner in this process, and its rollouts; all on so many cores."""
    config, usable = config_of(samplers), os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(usable)[:cores])
    try:
        with small_loop(config) as loop, loop.learner() as (_, batches):
            loop.pool.sync(0)
            loop.pool.engines.await_ready(every=True)
            yield loop.pool, batches.rollouts
    finally:
        os.sched_setaffinity(0, usable)


def main() -> None:
    rates: dict[tuple[int, int], list[float]] = {}
    syncs: dict[int, list[float]] = {}
    for samplers, cores in ((1, 1), (2, 2), (1, 2), (4, 2)):
        with pool_of(samplers, cores) as (pool, rollouts):
            if cores == 2:
                syncs[samplers] = [_seconds(lambda version: pool.sync(version), n + 1) for n in range(ROUNDS)]
            else:
                pool.sync(ROUNDS)
            if samplers < 4:
                rates[samplers, cores] = [_tokens_per_s(rollouts, ROUNDS) for _ in range(ROUNDS)]
    figures: list[Figure] = [
        median("one engine, all on one core", rates[1, 1], "tokens/s"),
        median("one engine with a core to itself", rates[1, 2], "tokens/s"),
        median("two engines, all on two cores", rates[2, 2], "tokens/s"),
        ratio("two engines on two cores / one on one", rates[2, 2], rates[1, 1], at_least=1.8),
        ratio("two engines on two cores / one with a core to itself", rates[2, 2], rates[1, 2]),
        median("sync to one engine", syncs[1], "s"),
        median("sync to two engines", syncs[2], "s"),
        median("sync to four engines", syncs[4], "s"),
        ratio("sync to two / to one, a core for each", syncs[2], syncs[1]),
        ratio("sync to four / to one", syncs[4], syncs[1], at_most=1.5),
    ]
    save("rollout_pool", figures, {"cores": len(os.sched_getaffinity(0)), "most_sequences": MOST_SEQUENCES})


def _seconds(action: Any, *arguments: Any) -> float:
    begin = time.perf_counter()
    action(*arguments)
    return time.perf_counter() - begin


def _tokens_per_s(rollouts: OnPolicyRollouts, version: int) -> float:
    batch = rollouts.batch(version + 1)
    return batch.num_tokens / batch.rollout_s


if __name__ == "__main__":
    main()
