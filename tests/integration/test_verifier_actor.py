"""The verifier's actor on a real Ray: one death costs one restart, whatever was submitted before it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray

from gxpo_trainer.config import RunConfig
from gxpo_trainer.rollout.verification import Submitted, VerifierHandle
from gxpo_trainer.rollout.vllm_driver import Sampled
from gxpo_trainer.runtime.placement_group import RunPlacementGroup
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
        submitted = Submitted([step], ray.put(Sampled([(step, group)], 0.0)), rewards=True)
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
