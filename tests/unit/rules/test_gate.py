"""The z-score gate on hand-worked windows, and the expected step of a false alarm."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.toy_learner import ToyLearner
from torch.utils._python_dispatch import TorchDispatchMode

from gxpo_trainer.config import GateConfig, GrpoRule, GxpoRule, SfpoGateConfig, SfpoRule
from gxpo_trainer.rules import contract, gate as gate_module
from gxpo_trainer.rules.contract import make_rule
from gxpo_trainer.rules.diagnostics import ratio_noise, take_trajectory
from gxpo_trainer.rules.gate import Gate, GatedLookAhead, alarm_probability, describe, expected_false_alarm_step


def run(gate, values):
    return [gate.observe(value, step) for step, value in enumerate(values, start=1)]


def test_z_uses_the_population_std_of_the_window_before_the_value_enters():
    # window (1, 3): mean 2, population std 1; value 4: z = 2.
    readings = run(Gate(GateConfig(threshold=9.0, window=30, warmup=2, epsilon=0.0)), [1.0, 3.0, 4.0])
    assert readings[0].z is None
    assert readings[1].z is None
    assert (readings[2].mean, readings[2].std, readings[2].z) == (2.0, 1.0, 2.0)


@pytest.mark.parametrize(
    ("settings", "values", "later"),
    [
        # (1, 3) has mean 2 and std 1: z = 2, the threshold. (3, 4) has 3.5 and 0.5: z is 1 at 4 and 0.5 at 3.75.
        ({"window": 2, "rearm_threshold": 1.0}, [1.0, 3.0, 4.0], [(4.0, False), (3.75, True)]),
        # The frozen window (1.0, 1.2, 9.0) has mean 3.73: 0.5 is under it, but two steps of cool-down remain.
        ({"window": 4, "rearm_after": 3}, [1.0, 1.2, 9.0], [(0.5, False), (0.5, False), (5.0, False), (0.5, True)]),
        # (6, 8) has mean 7 and std 1: z = −6. (6, 8, 1) has 5 and √(26/3): z is −2.04 at −1, 1.70 at 10, 0.68 at 7.
        ({"window": 3, "two_sided": True, "rearm_threshold": 1.0}, [6.0, 8.0, 1.0],
         [(-1.0, False), (10.0, False), (7.0, True)]),
    ],
)  # fmt: skip
def test_a_fired_gate_rearms_after_its_cool_down_and_only_below_the_lower_threshold(settings, values, later):
    gate = Gate(
        GateConfig(**{"threshold": 2.0, "warmup": 2, "mode": "rearm", "rearm_after": 1, "epsilon": 0.0, **settings})
    )
    run(gate, values)
    assert gate.state.shutoff_step == 3
    for value, active in later:
        gate.observe_inactive(value)
        assert gate.active is active


def test_no_z_before_the_warm_up_is_over_which_may_be_longer_than_the_window():
    gate = Gate(GateConfig(threshold=0.5, window=3, warmup=6))
    readings = run(gate, [1.0, 2.0, 1.0, 2.0, 100.0, 2.0, 900.0])
    assert [r.z is None for r in readings] == [True] * 6 + [False]
    assert "gate/z" not in gate.metrics(readings[5])
    assert gate.state.shutoff_step == 7


def test_the_window_rolls_and_the_value_that_fires_enters_it_too():
    gate = Gate(GateConfig(threshold=5.0, window=3, warmup=2))
    run(gate, [1.0, 2.0, 1.0, 2.0, 50.0])
    assert gate.state.window == [1.0, 2.0, 50.0]
    assert gate.state.shutoff_step == 5
    assert gate.observe_inactive(0.0) is None, "a permanent gate stays shut"
    assert not gate.active


@pytest.mark.parametrize(
    ("settings", "values", "z"),
    [
        ({"threshold": 1.0}, [1.0, 1.1, -50.0], -1021.0),  # one-sided by default: mean 1.05, std 0.05
        # Against a constant window z is zero or infinite.
        ({"threshold": math.inf, "epsilon": 0.0}, [1.0, 1.0, 1.0], 0.0),
        ({"threshold": math.inf, "epsilon": 0.0}, [1.0, 1.0, 2.0], math.inf),
        ({"threshold": math.inf, "epsilon": 0.0}, [1.0, 1.0, 0.5], -math.inf),
        ({"threshold": 0.5, "mode": "never"}, [1.0, 1.1, 50.0], 979.0),
    ],
)
def test_a_gate_that_does_not_fire_still_measures(settings, values, z):
    gate = Gate(GateConfig(window=5, warmup=2, **settings))
    assert run(gate, values)[2].z == pytest.approx(z, rel=1e-3)
    assert gate.active


def test_a_value_that_is_not_finite_is_neither_judged_nor_kept():
    gate = Gate(GateConfig(threshold=0.5, window=5, warmup=2))
    for step, value in enumerate([1.0, 1.1, math.nan, math.inf], start=1):
        gate.collect(value)
        assert (gate.judge(step) is None) is (step > 2)
    assert gate.active
    assert gate.state.window == [1.0, 1.1]


def test_the_state_of_a_look_ahead_survives_json():
    rule = GatedLookAhead(4, GateConfig(threshold=2.0, window=4, warmup=2))
    run(rule.gate, [1.0, 1.2, 1.1])
    rule.num_steps = 3
    other = GatedLookAhead(4, rule.gate.settings)
    other.load_state_dict(json.loads(json.dumps(rule.state_dict())))
    assert other.gate.read(3.0) == rule.gate.read(3.0)
    assert (other.num_steps, other.look_ahead_steps) == (3, 4)


def simulated_first_alarms(gate: GateConfig, runs: int, seed: int = 0) -> np.ndarray:
    """First firing step of `runs` sequences of standard normals under the gate's definition, shape [runs]."""
    rng = np.random.default_rng(seed)
    past = rng.normal(size=(runs, gate.warmup))[:, -gate.window :]
    first = np.zeros(runs)
    alive = np.arange(runs)
    step = gate.warmup
    while len(alive):
        step += 1
        value = rng.normal(size=len(alive))
        z = (value - past.mean(axis=1)) / past.std(axis=1)
        fired = (np.abs(z) if gate.two_sided else z) >= gate.threshold
        first[alive[fired]] = step
        alive = alive[~fired]
        past = np.concatenate([past, value[:, None]], axis=1)[~fired][:, -gate.window :]
    return first


def test_the_chance_of_one_alarm_by_hand() -> None:
    # The paper's τ = 0.5: a standard normal exceeds it with probability 0.3085.
    assert alarm_probability(0.5, 5000) == pytest.approx(0.3085, abs=2e-4)
    assert alarm_probability(0.5, 5000, two_sided=True) == pytest.approx(0.6171, abs=4e-4)

    # N = 2: z = t₁·√3, so P(z ≥ √3) = P(t₁ ≥ 1) = 1/4.
    assert alarm_probability(math.sqrt(3), 2) == pytest.approx(0.25, abs=1e-14)
    with pytest.raises(ValueError, match="at least 2 past values"):
        alarm_probability(1.0, 1)


@pytest.mark.parametrize(
    ("gate", "tolerance"),
    [
        (GateConfig(), 0.03),
        (GateConfig(warmup=90), 0.03),
        (GateConfig(threshold=1.0, two_sided=True, warmup=10), 0.03),
        (GateConfig(threshold=2.0, warmup=10), 0.11),
        (GateConfig(threshold=2.0, warmup=5, window=5), 0.18),
        (GateConfig(threshold=2.0, warmup=30, two_sided=True), 0.08),
    ],
)
def test_the_expected_step_matches_simulation(gate: GateConfig, tolerance: float) -> None:
    simulated = simulated_first_alarms(gate, runs=4000).mean()
    assert expected_false_alarm_step(gate) == pytest.approx(simulated, rel=tolerance)


def test_a_gate_that_cannot_fire_has_no_expected_step() -> None:
    for gate in (GateConfig(threshold=math.inf), GateConfig(mode="never"), SfpoGateConfig(threshold=math.inf)):
        assert expected_false_alarm_step(gate) == math.inf
        assert describe(gate) == "The gate never fires: the look-ahead stays on to the end."
    always = GateConfig(threshold=0.0, two_sided=True, warmup=7)
    assert expected_false_alarm_step(always) == 8, "as soon as the warm-up is over"


def test_the_longest_window_and_warm_up_need_no_evaluation_for_each_of_their_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    evaluated: list[int] = []

    def counted(threshold: float, num_past: int, *, two_sided: bool) -> float:
        evaluated.append(num_past)
        assert len(evaluated) < 200_000, "one for each of two thousand million steps would take an hour"
        return alarm_probability(threshold, num_past, two_sided=two_sided)

    monkeypatch.setattr(gate_module, "alarm_probability", counted)
    longest = 2**31 - 1
    # A standard normal exceeds 5 with the probability 2.8665e-7, once in 3.4886e6 steps.
    assert expected_false_alarm_step(GateConfig(threshold=5.0, warmup=1000, window=longest)) == pytest.approx(
        1000 + 3.4886e6, rel=0.01
    )
    # τ = 0: half of all values fire, so two steps are expected after the warm-up.
    assert expected_false_alarm_step(GateConfig(threshold=0.0, warmup=longest)) == longest + 2
    assert expected_false_alarm_step(GateConfig(threshold=0.0, window=longest)) == 4


def test_the_sentence_for_people_states_two_digits() -> None:
    # With the paper's τ and window; it saw 92 to 123 (table 5), three runs at 100.
    assert "at step 93;" in describe(GateConfig(threshold=0.5, window=30, warmup=90))
    assert "at step 280;" in describe(GateConfig(threshold=3.0, warmup=10))
    assert "at step 640,000;" in describe(GateConfig(threshold=6.0))
    assert "at step 9e+06;" in describe(GateConfig(threshold=7.0))


# No reduction over a shard works on more than a chunk of it at a time.


SIZE, CHUNK = 10_000, 1_000
VIEWS = {"detach", "slice", "split", "view", "alias", "_unsafe_view", "as_strided", "narrow", "select"}
# Whole shards are copied on purpose, and scaled, moved or stepped on in place: nothing is allocated for it.
WHOLE = {"clone", "copy_", "empty_like", "mul_", "add_", "sub_"}


class Sizes(TorchDispatchMode):
    """The largest tensor that each operation reads or makes."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        if name not in VIEWS | WHOLE:
            tensors = [x for x in torch.utils._pytree.tree_leaves((args, out)) if isinstance(x, torch.Tensor)]
            self.largest[name] = max([self.largest.get(name, 0), *(t.numel() for t in tensors)])
        return out


class InPlaceLearner(ToyLearner):
    """Its own gradient and optimizer step are no reductions: they are left out of the count."""

    sizes: Sizes | None = None

    def backward(self) -> Any:
        with torch.utils._python_dispatch._disable_current_modes():
            return super().backward()

    def optimizer_step(self) -> None:
        with torch.utils._python_dispatch._disable_current_modes():
            super().optimizer_step()


def make_learner() -> InPlaceLearner:
    start = torch.linspace(-1, 1, SIZE)
    curvature = torch.linspace(0.1, 0.9, SIZE)
    return InPlaceLearner(start, lambda theta, _: [curvature * theta[0]], optimizer="adamw", lr=1e-3)


def step(settings: Any) -> Callable[[Any], Any]:
    return lambda learner: make_rule(settings).step(learner).metrics


def diagnosed(settings: Any) -> Callable[[Any], Any]:
    def run(learner: Any) -> Any:
        rule: Any = make_rule(settings)
        rule.trajectory, _ = take_trajectory(learner, settings.k)
        return rule.step(learner).metrics

    return run


NEVER = {"mode": "never"}
CASES: dict[str, Callable[[Any], Any]] = {
    **{name: step(GxpoRule(predictor=name, gate=NEVER)) for name in ("gradient", "displacement", "replay")},
    "one probe": step(GxpoRule(predictor="replay", probes=1, gate=NEVER)),
    "sfpo": step(SfpoRule(gate=NEVER)),
    "gxpo, diagnosed": diagnosed(GxpoRule(gate=NEVER)),
    "sfpo, diagnosed": diagnosed(SfpoRule(gate=NEVER)),
    "ratio noise": lambda learner: ratio_noise(learner, make_rule(GxpoRule())),
    "update norm of a plain step": step(GrpoRule()),
    "gradient norm": lambda learner: {"norm": (learner.backward(), contract.norm(learner, learner.gradients()))[1]},
}


@pytest.mark.parametrize("name", CASES)
def test_every_reduction_works_on_chunks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = CASES[name](make_learner())
    monkeypatch.setattr(contract, "CPU_CHUNK", CHUNK)
    monkeypatch.setattr(contract, "DEVICE_CHUNK", CHUNK)
    learner = make_learner()
    with Sizes() as sizes:
        metrics = CASES[name](learner)
    assert sizes.largest
    assert {op: size for op, size in sizes.largest.items() if size > CHUNK} == {}
    assert metrics == pytest.approx(expected, rel=1e-9)  # only the order of summation differs


def test_slices_are_cache_sized_on_a_cpu_and_bounded_on_a_gpu() -> None:
    for device, size in (("cpu", 1 << 15), ("meta", 1 << 25)):
        shard = torch.empty(2 * size, device=device)
        assert [part.numel() for (part,) in contract.chunks([shard])] == [size, size]


def test_the_norm_of_shards_that_fit_a_chunk_is_that_of_whole_shards_to_the_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    shards = [torch.randn(size, generator=generator) for size in (300_000, 7, 65_536)]
    learner = ToyLearner(shards, lambda theta, _: theta)
    whole = torch.stack([torch.linalg.vector_norm(s, dtype=torch.float64).square() for s in shards]).sum()
    assert contract.norm(learner, shards) == float(whole) ** 0.5
