"""What a step's requests say of their episodes."""

from __future__ import annotations

from typing import Any

import numpy as np

from gxpo_trainer.config import RunConfig
from gxpo_trainer.environments.contract import Problem
from gxpo_trainer.grading.options import EXTRA_KEY, VerifyOptions
from gxpo_trainer.rollout.sources import RolloutPlanner
from gxpo_trainer.types import Group, Prompt

IDS = np.array([1, 2], dtype=np.int32)


def planner(**parts: Any) -> RolloutPlanner:
    data = {"template": "Q: {problem}", "max_prompt_tokens": 77}
    prompts = [Prompt(str(n), f"{n}+1?", str(n + 1), {"level": n, EXTRA_KEY: VerifyOptions((0.5,))}) for n in range(4)]
    return RolloutPlanner(RunConfig.model_validate({"data": data, **parts}), prompts, [IDS] * 4)


CALCULATOR = {"environment": {"name": "calculator"}}


def test_single_turns_have_no_episode() -> None:
    assert [request.episode for request in planner().requests([0, 1], step=1)] == [None, None]


def test_an_episode_begins_with_the_problem_in_the_runs_template() -> None:
    (request,) = planner(**CALCULATOR).requests([2], step=1)
    assert request.episode is not None
    assert request.episode.problem == Problem("2", "Q: 2+1?", "3", {"level": 2})
    assert request.episode.max_prompt_tokens == 77
    assert request.seed is None, "unseeded sampling; the episode has a seed all the same"


def test_episodes_have_seeds_by_run_step_and_position() -> None:
    def seeds(step: int, **parts: Any) -> list[int]:
        requests = planner(**CALCULATOR, **parts).requests([0, 1], step=step)
        return [request.episode.seed for request in requests if request.episode is not None]

    found = [*seeds(1), *seeds(2), *seeds(1, seed=1)]
    assert len({*found}) == 6
    assert seeds(1) == found[:2]
    seeded = planner(**CALCULATOR, rollout={"deterministic": True}).requests([0], step=1)
    assert seeded[0].seed == seeded[0].episode.seed == found[0]  # type: ignore[union-attr]


def test_a_repeated_prompt_has_a_new_episode() -> None:
    mine = planner(**CALCULATOR)
    (first,) = mine.requests([3], step=5)
    group = Group(first.prompt, first.prompt_token_ids, (), 1)
    (again,) = mine.repeated([group], step=5)
    assert again.episode is not None
    assert first.episode is not None
    assert again.episode.problem == first.episode.problem
    assert again.episode.seed != first.episode.seed
    assert again.num_samples == first.num_samples
