"""The simulation of utilization (benchmarks/async_simulation.py), against cases worked by hand."""

from __future__ import annotations

import pytest

from benchmarks.async_simulation import Measured, Simulation

# Four prompts of two samples, ten tokens each, all at once: 10 · (0.01 + 8 · 0.01) = 0.9 s of sampling.
EQUAL = Measured(0.01, 0.01, 0.5, 0.1, [10], [0.0], prompts=4, samples=2, max_num_seqs=8)


def test_a_strict_step_is_the_sum_of_its_parts() -> None:
    result = Simulation(EQUAL, 3, 0).run(6)
    assert result.step_s == pytest.approx(0.9 + 0.5 + 0.1)
    assert result.engines == pytest.approx(0.9 / 1.5)
    assert result.learner == pytest.approx(0.6 / 1.5)
    assert result.staleness == 0


@pytest.mark.parametrize("in_flight", [False, True])
def test_one_step_ahead_a_step_is_the_longer_of_its_parts(in_flight: bool) -> None:
    result = Simulation(EQUAL, 3, 1, in_flight=in_flight).run(9)
    assert result.step_s == pytest.approx(0.9 + 0.1)
    assert result.engines == pytest.approx(0.9)
    assert result.staleness == 1


def test_in_flight_updates_hide_the_longest_responses() -> None:
    tailed = Measured(0.01, 0.0, 0.1, 0.01, [*[10] * 15, 100], [0.0], prompts=8, samples=2, max_num_seqs=16)
    strict, waiting, flying = (
        Simulation(tailed, 4, depth, in_flight=in_flight).run(40)
        for depth, in_flight in ((0, False), (2, False), (2, True))
    )
    assert flying.step_s < waiting.step_s < strict.step_s
