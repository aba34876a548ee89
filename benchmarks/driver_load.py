"""What the controlling process pays for a large step: 64 stand-in engines return ready groups at once.

1,024 prompts × 16 samples × 4,096 tokens, 67 million tokens, through the real pool, dispatch, object store and batch
maker. Stand-ins replace only what samples and what grades; they answer from memory.
"""

from __future__ import annotations

import resource
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from benchmarks.measure import Figure, median, save
from gxpo_trainer.algo.batch import make_batch, shard
from gxpo_trainer.config import RunConfig
from gxpo_trainer.rollout.engines import Engine
from gxpo_trainer.rollout.pool import build_pool
from gxpo_trainer.rollout.vllm_driver import Intake, Sampled, SampleRequest, SamplingSettings
from gxpo_trainer.runtime.placement import Placement
from gxpo_trainer.types import Group, Prompt, Sample, Verdict

ENGINES, HOSTS = 64, 4
PROMPTS, SAMPLES, TOKENS = 1024, 16, 4096
PROMPT_TOKENS = 512
RANKS = 8
ROUNDS = 3


class StandInHost:
    """Sixteen engines in one process: this machine has no memory for 64."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self._ids = rng.integers(0, 150_000, (SAMPLES, TOKENS)).astype(np.int32)
        self._logprobs = -rng.random((SAMPLES, TOKENS)).astype(np.float32)
        self._text = "x" * TOKENS
        self._intakes: dict[tuple[int, int], Intake] = defaultdict(Intake)

    def stream(self, engine: int, stream_id: int) -> Iterator[Sampled]:
        intake = self._intakes[engine, stream_id]
        while not intake.closed:
            intake.run_calls(wait=True)
            while intake.requests:
                index, request = intake.requests.popleft()
                samples = tuple(
                    Sample(self._text, ids, logprobs, "length")
                    for ids, logprobs in zip(self._ids.copy(), self._logprobs.copy(), strict=True)
                )
                yield Sampled([(index, Group(request.prompt, request.prompt_token_ids, samples, 0))], 0.0)
        yield Sampled([], 0.0)

    def submit(self, engine: int, stream_id: int, requests: Any, last: bool) -> None:
        self._intakes[engine, stream_id].put(requests, last=last)


class StandInVerifier:
    """Every second sample of a group is right."""

    def score(self, sampled: Sampled, rewards: bool) -> list[tuple[Verdict, ...]]:
        answers = [Verdict("correct" if n % 2 else "wrong", "1", 0.0) for n in range(SAMPLES)]
        return [tuple(answers) for _ in sampled.groups]


@dataclass
class _Method:
    """A method of one engine on its host, called as a method of an actor of its own."""

    actor: Any
    name: str
    engine: int
    streaming: bool = False

    def remote(self, *arguments: Any) -> Any:
        call = getattr(self.actor, self.name)
        if self.streaming:
            return call.options(num_returns="streaming").remote(self.engine, arguments[0])
        return call.remote(self.engine, *arguments)


@dataclass
class StandInEngine:
    actor: Any
    engine: int

    @property
    def stream(self) -> _Method:
        return _Method(self.actor, "stream", self.engine, streaming=True)

    @property
    def submit(self) -> _Method:
        return _Method(self.actor, "submit", self.engine)


def main() -> None:
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=4 * 2**30,
        _node_ip_address="127.0.0.1",
        log_to_driver=False,
    )
    try:
        figures, seconds = _measure()
    finally:
        ray.shutdown()
    save("driver_load", figures, {"engines": ENGINES, "tokens": PROMPTS * SAMPLES * TOKENS, "wall_s": seconds})


def _measure() -> tuple[list[Figure], list[float]]:
    config = RunConfig.model_validate(
        {
            "model": {"max_length": PROMPT_TOKENS + TOKENS},
            "rollout": {"prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES, "max_new_tokens": TOKENS},
            "placement": {"samplers": ENGINES},
        }
    )
    pool = build_pool(config, Placement.decide(config), "none", lambda *_, **__: None)
    options = {"num_cpus": 0, "max_concurrency": 2 * ENGINES}
    hosts = [ray.remote(StandInHost).options(**options).remote() for _ in range(HOSTS)]
    pool.engines.all = [
        Engine(index, StandInEngine(hosts[index % HOSTS], index), None, 0.0, version=0) for index in range(ENGINES)
    ]
    pool.verifier.actor = ray.remote(StandInVerifier).options(num_cpus=0).remote()
    pool.verifier._traced = ray.put(None)
    ids = np.arange(PROMPT_TOKENS, dtype=np.int32)
    requests = [SampleRequest(Prompt(str(n), "p", "1"), ids, SAMPLES) for n in range(PROMPTS)]
    sampling = SamplingSettings(max_new_tokens=TOKENS)
    cpu, wall = [], []
    for _ in range(ROUNDS):
        begin, started = time.process_time(), time.perf_counter()
        collected = pool.collect(requests, sampling, 0)
        batch, _ = make_batch(collected.groups, config.learner.loss, TOKENS)
        shares = shard(batch, RANKS)
        assert len(shares) == RANKS
        cpu.append(time.process_time() - begin)
        wall.append(time.perf_counter() - started)
        del collected, batch, shares
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30
    return [
        median("driver, CPU seconds a step of 67 M tokens", cpu, "s", at_most=7.5),
        median("driver, peak resident memory", [peak], "GiB", at_most=4.0),
    ], wall


if __name__ == "__main__":
    main()
