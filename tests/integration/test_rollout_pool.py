"""Several engines as one: samples do not depend on their number, and no prompt is lost with an engine."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest
import ray

from gxpo_trainer.cluster.placement import Placement
from gxpo_trainer.data.prompts import load_prompts, resolve_template, tokenize_prompts
from gxpo_trainer.models.load import STARTER_FOLDER, load_tokenizer
from gxpo_trainer.rollout.planner import request_seed
from gxpo_trainer.rollout.pool import Collected, RolloutPool
from gxpo_trainer.rollout.requests import SampleRequest, SamplingSettings

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("ray_on_loopback")]

SAMPLING = SamplingSettings(max_new_tokens=40)
PLACEMENT = {"learner_cpus": 0.1, "verifier_cpus": 0.1, "sampler_cpus": 0.3, "sampler_threads": 1}


def make_pool(small_run: Any, samplers: int, events: list[str], **placement: Any) -> RolloutPool:
    """A pool on the starter policy as it is, without a learner."""
    config = small_run(placement={**PLACEMENT, "samplers": samplers, **placement})
    log = lambda kind, message, **_: events.append(f"{kind}: {message}")  # noqa: E731
    pool = RolloutPool(config, Placement.decide(config), str(STARTER_FOLDER), log, initial_version=0)
    pool.start()
    return pool


def requests(small_run: Any, count: int) -> list[SampleRequest]:
    config = small_run()
    prompts = tokenize_prompts(
        load_prompts(config.data, 0).prompts,
        load_tokenizer(config.model),
        resolve_template("auto", "word_problems"),
        96,
    )
    return [
        SampleRequest(prompt, ids, 4, request_seed(0, 1, 0, place))
        for place, (prompt, ids) in enumerate(zip(prompts.prompts[:count], prompts.token_ids[:count], strict=True))
    ]


def tokens(collected: Collected) -> list[list[list[int]]]:
    return [[sample.token_ids.tolist() for sample in group.group.samples] for group in collected.groups]


def test_seeded_samples_are_the_same_for_any_number_of_engines_and_any_death(small_run: Any) -> None:
    """One engine, then three of which one is killed in the middle: the same samples, verdicts and order."""
    wanted = requests(small_run, 24)
    single = make_pool(small_run, 1, [])
    try:
        reference = single.collect(wanted, SAMPLING, 0)
    finally:
        single.kill()
    events: list[str] = []
    pool = make_pool(small_run, 3, events)
    try:
        pool.engines.await_ready(every=True)
        shared = pool.collect(wanted, SAMPLING, 0)
        assert tokens(shared) == tokens(reference)
        assert shared.engines_alive == 3
        assert 0 <= shared.idle_fraction < 1

        victim = pool.engines.all[1]
        pid = ray.get(victim.actor.pid.remote())
        submit, killed = type(pool.verifier).submit, []

        def kill_first(self: Any, finished: Any, rewards: bool) -> Any:
            if not killed:
                killed.append(pid)
                os.kill(pid, signal.SIGKILL)
            return submit(self, finished, rewards)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(pool.verifier), "submit", kill_first)
            survived = pool.collect(wanted, SAMPLING, 0)
        assert killed
        assert any(event.startswith("sampler_restarted: the sampler 1 died") for event in events)
        assert tokens(survived) == tokens(reference), "no prompt is lost, doubled or moved"
        verdicts = [[[v.status for v in group.verdicts] for group in found.groups] for found in (survived, reference)]
        assert verdicts[0] == verdicts[1]
        # The restarted engine joins the pool again.
        pool.engines.await_ready(every=True)
        assert pool.collect(wanted[:6], SAMPLING, 0).engines_alive == 3
    finally:
        pool.kill()


def test_a_tensor_parallel_engine_agrees_with_one_process_and_dies_with_its_worker(small_run: Any) -> None:
    """Sums over two workers round differently, so log-probabilities agree to fp32's precision."""
    wanted = requests(small_run, 8)
    single = make_pool(small_run, 1, [])
    try:
        reference = single.collect(wanted, SAMPLING, 0)
    finally:
        single.kill()
    events: list[str] = []
    pool = make_pool(small_run, 1, events, tensor_parallel=2)
    try:
        split = pool.collect(wanted, SAMPLING, 0)
        assert tokens(split) == tokens(reference)
        for one, two in zip(split.groups, reference.groups, strict=True):
            for mine, theirs in zip(one.group.samples, two.group.samples, strict=True):
                assert np.abs(mine.logprobs - theirs.logprobs).max() < 1e-4
        # kill -9 of one worker process ends the engine, which is then restarted.
        parent = ray.get(pool.engines.all[0].actor.pid.remote())
        os.kill(worker_processes(parent)[0], signal.SIGKILL)
        assert tokens(pool.collect(wanted, SAMPLING, 0)) == tokens(reference)
        assert any(event.startswith("sampler_restarted") for event in events)
    finally:
        pool.kill()


def worker_processes(parent: int) -> list[int]:
    """vLLM's worker processes of an engine."""
    import psutil

    return [child.pid for child in psutil.Process(parent).children() if "spawn_main" in " ".join(child.cmdline())]
