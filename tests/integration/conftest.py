"""One Ray for all tests of a session that need it."""

from __future__ import annotations

import pytest

from gxpo_trainer.config import RunConfig


@pytest.fixture(scope="session")
def ray_on_loopback():
    """A Ray of our own on loopback; runs connect to it instead of starting one each."""
    import ray

    from gxpo_trainer.runtime.placement import Placement
    from gxpo_trainer.runtime.ray_session import connect_ray

    connect_ray(Placement.decide(RunConfig()))
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def small_run():
    """Settings of a run on the starter policy that takes seconds; a test changes what it is about."""

    def build(**parts) -> RunConfig:
        body = {
            "model": {"max_length": 192},
            "data": {"num_problems": 256},
            "rollout": {"prompts_per_step": 8, "samples_per_prompt": 4, "max_new_tokens": 40, "max_num_seqs": 64},
            "evaluation": {"every_steps": 0, "samples_per_prompt": 2, "num_problems": 16, "at_start": False},
            "checkpoint": {"every_steps": 2},
            "learner": {"optimizer": {"learning_rate": 1e-5}},
            "budget": {"steps": 3},
        }
        for name, value in parts.items():
            body[name] = {**body.get(name, {}), **value} if isinstance(value, dict) else value
        return RunConfig.model_validate(body)

    return build
