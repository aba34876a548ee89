"""When a look-ahead pays, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from gxpo_trainer.compare.curves import EvaluationCurve, RunCurves
from gxpo_trainer.compare.groups import Payoff, compare_groups, payoff_of
from gxpo_trainer.compare.intervals import Interval
from gxpo_trainer.compare.rows import sampling_share
from gxpo_trainer.compare.seeds import SeedGroup
from gxpo_trainer.compare.text_tables import all_tables

GXPO = Payoff(Interval(2.0, 1.5, 2.5, 5), passes=3.0)


@pytest.mark.parametrize(
    ("share", "synchronous", "asynchronous"),
    [
        (0.0, 2 / 3, 2 / 3),
        # s = u = 0.5: 2 · 1 / (0.5 + 1.5) and 2 · 0.5 / 1.5.
        (0.5, 1.0, 2 / 3),
        # s = 0.75, u = 0.25: 2 / (0.75 + 0.75) and 2 · 0.75 / max(0.75, 0.75).
        (0.75, 4 / 3, 2.0),
        (0.9, 2 / 1.2, 2.0),
    ],
)
def test_speed_up_at_a_share(share, synchronous, asynchronous) -> None:
    assert GXPO.speed_up(share).mean == pytest.approx(synchronous)
    assert GXPO.speed_up(share, asynchronous=True).mean == pytest.approx(asynchronous)


def test_the_interval_scales_with_the_estimate() -> None:
    found = GXPO.speed_up(0.5)
    assert (found.low, found.high, found.num) == (pytest.approx(0.75), pytest.approx(1.25), 5)


def test_break_even_is_where_the_speed_up_is_one() -> None:
    even = GXPO.break_even
    # (3 − 2)/2, bounds (3 − 2.5)/2 and (3 − 1.5)/2.
    assert (even.mean, even.low, even.high) == (0.5, 0.25, 0.75)
    assert GXPO.speed_up(even.mean).mean == pytest.approx(1.0)
    assert GXPO.speed_up(even.low).high == pytest.approx(1.0)


def test_an_arm_with_the_baselines_passes_has_none() -> None:
    with pytest.raises(ValueError, match="no break-even"):
        Payoff(Interval(2.0, None, None, 1), 1.0).break_even  # noqa: B018


@pytest.mark.parametrize("share", [-0.1, 1.0, 1.5])
def test_a_share_outside_of_0_to_1_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match=r"set it in \[0, 1\)"):
        GXPO.speed_up(share)


def test_one_seed_has_no_bounds() -> None:
    found = Payoff(Interval(2.0, None, None, 1), 3.0)
    assert (found.speed_up(0.5).low, found.break_even.high) == (None, None)


def test_the_measured_share_is_the_time_of_sampling_and_verifying_over_that_of_all_steps() -> None:
    steps = np.array([1.0, 2.0])
    series = {
        "time/rollout_s": (steps, np.array([1.0, 3.0])),
        "time/verify_s": (steps, np.array([0.5, 0.5])),
        "time/step_s": (steps, np.array([4.0, 6.0])),
    }
    assert sampling_share(series) == 0.5
    assert sampling_share({}) is None


def rising(name: str, last_step: int, passes: int, share: float) -> SeedGroup:
    """One run from 20% to 50% at its last step."""
    steps = np.array([0.0, last_step])
    unknown = np.full(2, np.nan)
    curve = EvaluationCurve(steps, passes * steps, steps / 10, steps, np.array([0.2, 0.5]), unknown, unknown)
    return SeedGroup(name, (RunCurves(name, name, 0, curve, sampling_share=share),))


def test_a_payoff_by_hand() -> None:
    # Half of the steps with 6/2 = 3 times the passes: as fast as the baseline at a share of (3 − 2)/2.
    groups = [rising("Epochs", 10, passes=6, share=0.1), rising("GRPO", 20, passes=2, share=0.8)]
    comparison = compare_groups(groups, "GRPO")
    payoff = payoff_of(comparison.group("Epochs"), comparison.group("GRPO"))
    assert payoff is not None
    assert (payoff.steps.mean, payoff.passes) == (pytest.approx(2.0), 3.0)
    table = next(table for table in all_tables(groups, comparison) if "pays" in table.title)
    assert table.title == "When it pays: sampling takes 80% of a step of GRPO (measured)"
    # In time 2/(0.8 + 0.6), asynchronously 2 · 0.8/max(0.8, 0.6).
    assert table.rows == (("Epochs", "2.0× fewer", "1.4× less", "2.0× less", "3.00", "50%"),)
