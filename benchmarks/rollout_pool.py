"""The pool on two cores: two engines against one, a sync to four engines against one, and 20 kills.

Every engine has one thread, so that two engines use two cores and one engine uses one.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

from benchmarks.measure import Figure, median, ratio, save
from benchmarks.small_loop import small_loop
from gxpo_trainer.config import RunConfig
from gxpo_trainer.rollout.engines import MAX_RESTARTS
from gxpo_trainer.rollout.planner import RolloutPlanner

ROUNDS = 5
KILLS = 20


def config_of(samplers: int) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"max_length": 256},
            "data": {"num_problems": 512},
            "rollout": {"prompts_per_step": 64, "samples_per_prompt": 8, "max_new_tokens": 48, "deterministic": True},
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
def pool_of(samplers: int) -> Iterator[Any]:
    """A pool on the starter policy, synced from a learner in this process, and a planner."""
    config = config_of(samplers)
    with small_loop(config) as loop, loop.learner() as (_, batches):
        loop.pool.sync(0)
        loop.pool.engines.await_ready(every=True)
        yield loop.pool, batches.planner


def main() -> None:
    rates: dict[int, list[float]] = {}
    syncs: dict[int, list[float]] = {}
    for samplers in (1, 2, 4):
        with pool_of(samplers) as (pool, planner):
            syncs[samplers] = [_seconds(lambda version: pool.sync(version), n + 1) for n in range(ROUNDS)]
            if samplers < 4:
                rates[samplers] = [_tokens_per_s(pool, planner, ROUNDS) for _ in range(ROUNDS)]
    figures: list[Figure] = [
        median("one engine on one core", rates[1], "tokens/s"),
        median("two engines on a core each", rates[2], "tokens/s"),
        ratio("two engines / one engine", rates[2], rates[1], at_least=1.8),
        median("sync to one engine", syncs[1], "s"),
        median("sync to four engines", syncs[4], "s"),
        ratio("sync to four / to one", syncs[4], syncs[1], at_most=1.5),
    ]
    kills, doubled = _kills()
    figures.append(median(f"prompts lost or doubled in {kills} kills", [float(doubled)], "prompts", at_most=0.0))
    save("rollout_pool", figures, {"cores": len(os.sched_getaffinity(0))})


def _seconds(action: Any, *arguments: Any) -> float:
    begin = time.perf_counter()
    action(*arguments)
    return time.perf_counter() - begin


def _tokens_per_s(pool: Any, planner: RolloutPlanner, version: int) -> float:
    rollouts = planner.collect(pool, 1, version)
    return rollouts.num_tokens / rollouts.rollout_s


def _kills() -> tuple[int, int]:
    """Kill engines of a pool of three in mid-step until KILLS have died; compare with an undisturbed collection."""
    draw, kills, wrong = random.Random(0), 0, 0
    with pool_of(3) as (pool, planner):
        requests = planner.requests(range(64), step=1)
        reference = _tokens(pool.collect(requests, planner.sampling, 0))
        while kills < KILLS:
            alive = [engine for engine in pool.engines.ready if engine.restarts < MAX_RESTARTS - 1]
            victims = [ray.get(engine.actor.pid.remote()) for engine in draw.sample(alive, min(2, len(alive)))]
            timers = [threading.Timer(draw.uniform(0.05, 0.6), os.kill, (pid, signal.SIGKILL)) for pid in victims]
            for timer in timers:
                timer.start()
            found = _tokens(pool.collect(requests, planner.sampling, 0))
            for timer in timers:
                timer.join()
            kills += len(victims)
            wrong += sum(mine != theirs for mine, theirs in zip(found, reference, strict=True))
            pool.engines.await_ready(every=False)
    return kills, wrong


def _tokens(collected: Any) -> list[list[list[int]]]:
    return [[sample.token_ids.tolist() for sample in group.group.samples] for group in collected.groups]


if __name__ == "__main__":
    main()
