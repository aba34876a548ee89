"""Several engines as one: samples do not depend on the assignment, and no prompt is lost with an engine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.rollouts import requests, tokens

from gxpo_trainer.errors import TrainingError
from gxpo_trainer.learner.models import STARTER_FOLDER
from gxpo_trainer.rollout.pool import RolloutPool, build_pool
from gxpo_trainer.rollout.vllm_driver import SamplingSettings
from gxpo_trainer.runtime.placement import Placement

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("ray_on_loopback"), pytest.mark.long("several engines")]

SAMPLING = SamplingSettings(max_new_tokens=40)
PLACEMENT = {"learner_cpus": 0.1, "verifier_cpus": 0.1, "sampler_cpus": 0.3, "sampler_threads": 1}


def make_pool(
    small_run: Any, samplers: int, events: list[str], model: Path = STARTER_FOLDER, **placement: Any
) -> RolloutPool:
    """A pool on the starter policy as it is, without a learner."""
    config = small_run(placement={**PLACEMENT, "samplers": samplers, **placement})
    log = lambda kind, message, **_: events.append(f"{kind}: {message}")  # noqa: E731
    pool = build_pool(config, Placement.decide(config), str(model), log)
    pool.start()
    return pool


def test_seeded_samples_do_not_depend_on_the_engines_or_their_deaths(small_run: Any) -> None:
    """Two engines; then one of them is killed after the first groups, and the other samples the rest."""
    wanted = requests(small_run(), 24)
    events: list[str] = []
    pool = make_pool(small_run, 2, events)
    try:
        pool.engines.await_ready(every=True)
        reference = pool.collect(wanted, SAMPLING, 0)
        assert reference.engines_alive == 2
        assert 0 < reference.busy_s <= reference.elapsed_s
        pid = pool.engines.all[1].process.pid
        folders = [engine.folder for engine in pool.engines.all]
        assert all(any(folder.glob("vllm_dist_*")) for folder in folders), "vLLM's own temporary files are in it"
        submit, killed = type(pool.verifier).submit, []

        def kill_first(self: Any, submitted: Any) -> Any:
            if not killed:
                killed.append(pid)
                os.kill(pid, signal.SIGKILL)
            return submit(self, submitted)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(pool.verifier), "submit", kill_first)
            survived = pool.collect(wanted, SAMPLING, 0)
        assert killed
        assert any(event.startswith("sampler_restarted: the sampler 1 died") for event in events)
        assert tokens(survived) == tokens(reference), "no prompt is lost, doubled or moved"
        verdicts = [[[v.status for v in g.verdicts] for g in collected.groups] for collected in (survived, reference)]
        assert verdicts[0] == verdicts[1]
        # The restarted engine joins the pool again.
        pool.engines.await_ready(every=True)
        assert pool.collect(wanted[:6], SAMPLING, 0).engines_alive == 2
        assert not folders[1].exists(), "the restarted engine removed the folder of the killed one"
        folders[1] = pool.engines.all[1].folder
    finally:
        pool.kill()
    assert not any(folder.exists() for folder in folders)


def test_a_tensor_parallel_engine_dies_with_its_worker(small_run: Any) -> None:
    """That it agrees with transformers: test_sampler_sync.py."""
    wanted = requests(small_run(), 8)
    events: list[str] = []
    pool = make_pool(small_run, 1, events, tensor_parallel=2)
    try:
        split = pool.collect(wanted, SAMPLING, 0)
        # kill -9 of one worker process ends the engine, which is then restarted.
        parent = pool.engines.all[0].process.pid
        processes("VLLM::Worker", parent)[0].kill()
        assert tokens(pool.collect(wanted, SAMPLING, 0)) == tokens(split)
        assert any(event.startswith("sampler_restarted") for event in events)
    finally:
        pool.kill()


def test_an_engine_killed_in_its_start_is_restarted_and_one_that_cannot_start_ends_the_run(
    small_run: Any, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(STARTER_FOLDER, model)
    settings = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps({**settings, "architectures": ["NoSuchPolicy"]}), encoding="utf-8")
    events: list[str] = []
    pool = make_pool(small_run, 1, events, model)
    try:
        while not (starting := processes("ray::SamplerActor")):
            time.sleep(0.05)
        starting[0].kill()
        with pytest.raises(TrainingError, match=r"the sampler cannot start: .*NoSuchPolicy"):
            pool.engines.await_ready(every=True)
        assert [event.partition(" (")[0] for event in events] == ["sampler_restarted: the sampler died"]
        assert not events[0].count("NoSuchPolicy")
    finally:
        pool.kill()


def processes(name: str, parent: int | None = None) -> list[psutil.Process]:
    """Descendants of a process, by default of this test, whose command has this name."""
    named = []
    for process in psutil.Process(parent).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # one that ended meanwhile
            if name in " ".join(process.cmdline()):
                named.append(process)
    return named
