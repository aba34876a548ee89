"""Learning rates worked by hand at η = 0.8."""

from __future__ import annotations

from typing import Any

import pytest

from gxpo_trainer.algo.batch import learning_rate
from gxpo_trainer.config import OptimizerConfig


def rates(steps: list[int], total: int | None = None, **settings: Any) -> list[float]:
    chosen = OptimizerConfig(learning_rate=0.8, **settings)
    return [learning_rate(chosen, step, total) for step in steps]


def test_warm_up_rises_evenly_and_reaches_the_rate_at_its_last_step() -> None:
    assert rates([1, 2, 3, 4, 5, 900], warmup_steps=4) == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])
    assert rates([1], warmup_steps=0) == [0.8]


def test_linear_decay_starts_after_the_warm_up_and_ends_after_the_last_step() -> None:
    # Four steps of decay: 0, 1/4, 1/2, 3/4 of it are done at steps 3 to 6.
    found = rates([1, 2, 3, 4, 5, 6, 7, 8], total=6, schedule="linear", warmup_steps=2)
    assert found == pytest.approx([0.4, 0.8, 0.8, 0.6, 0.4, 0.2, 0.0, 0.0])


def test_cosine_decay_by_hand() -> None:
    # (1 + cos(π/4))/2 = 0.853553 after a quarter, 1/2 after half, (1 − cos(π/4))/2 = 0.146447 after three quarters.
    found = rates([1, 2, 3, 4, 5, 6], total=4, schedule="cosine")
    assert found == pytest.approx([0.8, 0.6828427, 0.4, 0.1171573, 0.0, 0.0], abs=1e-7)


def test_a_warm_up_as_long_as_the_run_never_decays_within_it() -> None:
    assert rates([4, 5, 6], total=4, schedule="linear", warmup_steps=4) == pytest.approx([0.8, 0.8, 0.0])


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_decay_needs_the_number_of_steps_once_the_warm_up_is_over(schedule: str) -> None:
    assert rates([2], schedule=schedule, warmup_steps=2) == [0.8]
    with pytest.raises(ValueError, match=rf'schedule = "{schedule}" needs budget.steps'):
        rates([3], schedule=schedule, warmup_steps=2)
