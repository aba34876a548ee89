"""Assumptions fitted to metrics that the model itself made with other factors are those factors again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from support.small_plan import CPU, EXACT, SHAPE, small

from gxpo_trainer.config import GxpoRule
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.planner import make_plan
from gxpo_trainer.planner.devices import Assumptions
from gxpo_trainer.planner.inputs import Inputs, workload_of
from gxpo_trainer.planner.memory import learner_parts
from gxpo_trainer.planner.timing import calibrate, fit_two, observe, step_time

TRUE = replace(
    EXACT,
    utilization=0.2,
    micro_batch_s=0.5,
    sampling_efficiency=0.25,
    decode_step_s=0.05,
    verify_s=0.125,
    sync_s=0.0625,
    step_s=0.03125,
    memory_factor=1.5,
    runtime_bytes=4000,
    engine_bytes=1000,
    prompt_fraction=0.25,
    response_fraction=0.75,
)
BASE = replace(EXACT, engine_bytes=500)


def measured(inputs: Inputs, assumed: Assumptions) -> Mapping[str, float]:
    load = workload_of(inputs, assumed)
    time = step_time(inputs, assumed, load, inputs.rule, gate_open=True)
    allocated = sum(learner_parts(inputs, assumed, load).values())
    return {
        "rollout/length_mean": load.response,
        "rollout/prompt_length_mean": load.prompt,
        "update/backward_passes": 3.0,
        "time/rollout_s": time.sampling,
        "time/verify_s": time.verify,
        "time/update_s": time.update,
        "time/sync_s": time.sync,
        "time/step_s": time.total,
        "system/learner_idle_bytes": float(assumed.runtime_bytes),
        "system/learner_peak_bytes": float(allocated),
    }


def runs_of(*sizes: int) -> list[Inputs]:
    found = []
    for hidden in sizes:
        shape = replace(SHAPE, hidden=hidden, intermediate=2 * hidden, heads=hidden // 4)
        inputs = small(shape=shape, trainable=shape.parameters, device=CPU, rule=GxpoRule(), kv_bytes=10**9)
        found.append(replace(inputs, learner_ranks=1))
    return found


def test_runs_of_several_sizes_give_every_factor_back() -> None:
    runs = [
        observe(f"run {n}", inputs, [measured(inputs, TRUE)] * 5) for n, inputs in enumerate(runs_of(256, 512, 768))
    ]
    found = calibrate(BASE, runs)
    for name in ("utilization", "micro_batch_s", "sampling_efficiency", "decode_step_s", "memory_factor"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=1e-2), name
    for name in ("verify_s", "sync_s", "step_s", "prompt_fraction", "response_fraction"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=1e-6), name
    assert found.runtime_bytes == 4000
    assert found.source == "calibrated to run 0, run 1, run 2"


def test_a_plan_calibrated_to_one_run_gives_that_runs_times_and_memory() -> None:
    (inputs,) = runs_of(64)
    metrics = measured(inputs, TRUE)
    plan = make_plan(inputs, calibrate(BASE, [observe("a", inputs, [metrics])]))
    own = next(rule for rule in plan.rules if rule.own)
    assert own.time.total == pytest.approx(metrics["time/step_s"], rel=1e-6)
    assert own.time.sampling == pytest.approx(metrics["time/rollout_s"], rel=1e-6)
    learner = sum(learner_parts(inputs, plan.assumed, plan.load).values())
    assert learner == pytest.approx(metrics["system/learner_peak_bytes"], rel=1e-3)


def test_the_first_steps_are_left_out_where_there_are_others() -> None:
    (inputs,) = runs_of(64)
    usual = dict(measured(inputs, TRUE))
    slow = usual | {"time/update_s": 99.0}
    assert observe("a", inputs, [slow, slow, usual, usual]).metrics["time/update_s"] == usual["time/update_s"]
    assert observe("a", inputs, [slow, slow]).metrics["time/update_s"] == 99.0


def test_a_run_without_steps_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"--calibrate a: no step has rollout/length_mean, .*name the folder of a run"
    ):
        observe("a", small(), [{"time/checkpoint_s": 1.0}])


@pytest.mark.parametrize(
    ("terms", "expected"),
    [
        ([(1.0, 1.0, 5.0), (1.0, 2.0, 7.0), (2.0, 1.0, 8.0)], (3.0, 2.0)),
        ([(2.0, 2.0, 8.0)], (2.0, 2.0)),  # one measurement: both terms alike
        ([(1.0, 1.0, 3.0), (2.0, 2.0, 6.0)], (1.5, 1.5)),  # no difference in shape: the same
        ([(1.0, 1.0, 1.0), (1.0, 2.0, 1.0), (1.0, 4.0, 1.0)], (1.0, 0.0)),
        ([(1.0, 10.0, 4.0), (5.0, 10.0, 4.0), (10.0, 10.0, 3.9)], (0.0, 0.39655)),  # never below 0
    ],
)
def test_two_terms_are_fitted_to_relative_errors(
    terms: list[tuple[float, float, float]], expected: tuple[float, float]
) -> None:
    assert fit_two(terms) == pytest.approx(expected, abs=1e-4)
