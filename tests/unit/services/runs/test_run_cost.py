"""Backward passes that a config can take, worked by hand."""

from __future__ import annotations

from typing import Any

import pytest

from gxpo_services.runs.plan import expected_cost, resources
from gxpo_trainer.config import RunConfig


def config(rule: dict[str, Any] | None = None, **budget: float) -> RunConfig:
    learner = {} if rule is None else {"learner": {"rule": rule}}
    return RunConfig.model_validate({**learner, "budget": budget or {"steps": 40}})


@pytest.mark.parametrize(
    ("rule", "per_step"),
    [
        ({"name": "grpo"}, 1),
        ({"name": "sfpo", "k": 3}, 4),
        ({"name": "sfpo", "k": 10}, 11),
        ({"name": "gxpo", "k": 3}, 3),
        ({"name": "gxpo", "k": 10}, 3),
        ({"name": "gxpo", "k": 10, "predictor": "replay"}, 3),
        ({"name": "gxpo", "k": 10, "predictor": "replay", "probes": 1}, 2),
    ],
)
def test_passes_of_a_step(rule: dict[str, Any], per_step: int) -> None:
    cost = expected_cost(config(rule))
    assert (cost.per_step, cost.steps, cost.backward_passes) == (per_step, 40, 40 * per_step)
    assert f"{per_step} backward pass" in cost.words


def test_the_budget_in_passes_caps_them_and_is_named() -> None:
    gxpo = expected_cost(config({"name": "gxpo"}, steps=40, backward_passes=100))
    assert (gxpo.steps, gxpo.backward_passes) == (40, 100)
    assert "budget.backward_passes = 100 ends the run (up to 2 more to finish the last step)" in gxpo.words
    loose = expected_cost(config({"name": "gxpo"}, steps=40, backward_passes=121))
    assert loose.backward_passes == 120
    assert "budget" not in loose.words


def test_passes_alone_bound_the_steps_of_grpo() -> None:
    assert expected_cost(config({"name": "grpo"}, backward_passes=50)).steps == 50
    assert expected_cost(config({"name": "gxpo"}, backward_passes=50)).steps is None


def test_a_budget_of_hours_alone_gives_no_cost() -> None:
    cost = expected_cost(config({"name": "sfpo"}, hours=2, tokens=1000))
    assert (cost.steps, cost.backward_passes) == (None, None)
    assert "budget.hours or budget.tokens ends the run" in cost.words


@pytest.mark.parametrize(
    ("gate", "words"),
    [
        ({}, "1 after the gate has fired (upper bound)"),
        ({"mode": "rearm"}, "1 while the gate is closed (upper bound)"),
        ({"mode": "never"}, None),
        ({"threshold": float("inf")}, None),
    ],
)
def test_a_gate_that_can_fire_makes_it_an_upper_bound(gate: dict[str, Any], words: str | None) -> None:
    explanation = expected_cost(config({"name": "gxpo", "gate": gate})).words
    assert words in explanation if words else "upper bound" not in explanation


def test_logical_cpus_and_gpus_of_a_run() -> None:
    placement = {"learner_ranks": 4, "learner_cpus": 1.5, "sampler_cpus": 0.75, "verifier_cpus": 0.25}
    body = {"placement": placement | {"device": "cpu"}}
    assert resources(RunConfig.model_validate(body)) == (7.0, 0.0)
    # Four ranks and an engine, where there are GPUs.
    body = {"placement": placement}
    assert resources(RunConfig.model_validate(body)) == (7.0, 5.0)
    body = {"placement": placement | {"device": "gpu", "tensor_parallel": 2}}
    assert resources(RunConfig.model_validate(body)) == (7.0, 6.0)
    # Two engines on two GPUs each: with the learner's four ranks on the same four, or on eight.
    body = {"placement": placement | {"device": "gpu", "tensor_parallel": 2, "samplers": 2}}
    assert resources(RunConfig.model_validate(body)) == (7.75, 4.0)
    body["placement"]["colocate"] = False
    assert resources(RunConfig.model_validate(body)) == (7.75, 8.0)
