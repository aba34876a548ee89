"""The verifier's actor on a real Ray: one death costs one restart, whatever was submitted; one that hangs is ended."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from ray._private.internal_api import node_stats

from gxpo_trainer.config import RunConfig, TimeoutsConfig
from gxpo_trainer.rollout.verification import Submitted, VerifierHandle
from gxpo_trainer.rollout.vllm_driver import Sampled
from gxpo_trainer.runtime import ray_session
from gxpo_trainer.runtime.placement_group import RunPlacementGroup
from gxpo_trainer.runtime.progress import ProgressWatch
from gxpo_trainer.runtime.ray_session import end_stalled
from gxpo_trainer.types import Group, Prompt, Sample

pytestmark = pytest.mark.engine
IDS, LOGPROBS = np.zeros(3, np.int32), np.zeros(3, np.float32)


def test_groups_of_later_steps_that_were_lost_do_not_cost_the_restarted_verifier(ray_on_loopback: None) -> None:
    events: list[str] = []
    placement: Any = SimpleNamespace(
        group=RunPlacementGroup(), verifier_options=lambda: {"num_cpus": 0, "max_concurrency": 64}
    )
    config = RunConfig.model_validate({"verifier": {"workers": 1}})
    handle = VerifierHandle(config, placement, lambda kind, message, **_: events.append(kind))
    handle.start()

    def submit(step: int) -> dict[Any, Submitted]:
        group = Group(Prompt("p", "What?", str(step)), IDS, (Sample(str(step), IDS, LOGPROBS, "stop"),), 0)
        submitted = Submitted([step], ray.put(Sampled([(step, group)], 0.0)), rewards=[True])
        return {handle.submit(submitted): submitted}

    try:
        ray.get(handle._traced)
        ray.kill(handle.actor)
        steps = [submit(step) for step in (1, 2, 3)]
        verdicts = handle.await_verdicts(steps[0])
        successor = handle.actor
        for pending in steps[1:]:
            verdicts |= handle.await_verdicts(pending)
        assert handle.actor is successor
        assert events == ["verifier_restarted"]
        assert {step: verdict.status for step, (verdict,) in verdicts.items()} == dict.fromkeys((1, 2, 3), "correct")
    finally:
        handle.kill()


def test_a_verifier_that_was_stopped_before_ray_connected_to_it_is_ended(ray_on_loopback: None) -> None:
    """`ray.kill` does not end it, so that its CPUs would stay taken: it is killed by its process id."""
    watch = ProgressWatch()
    events: list[str] = []

    def restarted(kind: str, message: str, **_: Any) -> None:
        events.append(kind)
        watch.timeouts = TimeoutsConfig()

    options = {"num_cpus": 0, "max_concurrency": 64}
    placement: Any = SimpleNamespace(group=RunPlacementGroup(watch=watch), verifier_options=lambda: options)
    handle = VerifierHandle(RunConfig.model_validate({"verifier": {"workers": 1}}), placement, restarted)
    handle.start()
    try:
        stopped = psutil.Process(ray.get(handle._traced).pid)
        stopped.suspend()
        node = ray.nodes()[0]
        node_stats(node["NodeManagerAddress"], node["NodeManagerPort"])  # it fails to connect
        watch.timeouts = TimeoutsConfig(verifying_s=2)
        group = Group(Prompt("p", "What?", "1"), IDS, (Sample("1", IDS, LOGPROBS, "stop"),), 0)
        submitted = Submitted([1], ray.put(Sampled([(1, group)], 0.0)), rewards=[True])
        ((verdict,),) = handle.await_verdicts({handle.submit(submitted): submitted}).values()
        assert verdict.status == "correct"
        assert events == ["verifier_restarted"]
        stopped.wait(60)
    finally:
        handle.kill()


def test_a_process_of_another_node_is_ended_there(ray_on_loopback: None, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = VerifierHandle(RunConfig(), SimpleNamespace(verifier_options=dict), lambda *_, **__: None)  # type: ignore
    handle.start()
    traced = ray.get(handle._traced)
    monkeypatch.setattr(ray_session, "this_node", lambda: "another")
    end_stalled({"verifier": (handle.actor, traced)})
    psutil.Process(traced.pid).wait(60)


def test_an_actor_that_was_stopped_in_its_constructor_is_ended(
    ray_on_loopback: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing has traced it, and `ray.kill` does not end it: Ray's table of actors has its process id (Ray 2.60)."""

    class Unfinished:  # of this function, as Ray's workers do not import this file
        def __init__(self, file: Path) -> None:
            file.with_suffix(".part").write_text(str(os.getpid()), encoding="utf-8")
            file.with_suffix(".part").rename(file)
            threading.Event().wait()

    for number, here in enumerate((True, False)):
        actor = ray.remote(Unfinished).options(num_cpus=0).remote(tmp_path / str(number))
        while not (tmp_path / str(number)).exists():
            time.sleep(0.05)
        stopped = psutil.Process(int((tmp_path / str(number)).read_text(encoding="utf-8")))
        stopped.suspend()
        with monkeypatch.context() as patch:
            if not here:
                patch.setattr(ray_session, "this_node", lambda: "another")
            end_stalled({"sampler": (actor, None)})
        stopped.wait(60)
        text = f"process {stopped.pid} hangs before it could be traced"
        assert capsys.readouterr().err == f"the stacks of the sampler follow\n{text}\n"
    unborn = ray.remote(Unfinished).options(num_cpus=10_000).remote(tmp_path / "never")
    end_stalled({"sampler": (unborn, None)})
    assert capsys.readouterr().err == "the stacks of the sampler follow\nRay has not started its process yet\n"
