"""Convergence, budgets, seeds and the evidence sentence on numbers worked by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from unittest import mock

import numpy as np
import pytest
from scipy import stats

from gxpo_trainer.compare import curves
from gxpo_trainer.compare.evidence import amount, ratio, ratio_interval, weigh
from gxpo_trainer.compare.groups import common_budgets, common_grids, compare_groups, default_baseline, sweep
from gxpo_trainer.compare.intervals import Interval
from gxpo_trainer.compare.published import gxpo_paper
from gxpo_trainer.compare.seeds import SeedGroup, find_differences
from gxpo_trainer.compare.text_tables import payoff_tables, ranking_table
from gxpo_trainer.config.rules import RULE_CHOICE, RULES
from gxpo_trainer.errors import DataError

STEPS = (0, 10, 20, 30)
BASELINE = ((0, 10, 20, 30), (0.0, 1.0, 2.0, 3.0), (0.2, 0.4, 0.5, 0.5))
CANDIDATE = ((0, 30, 60, 70), (0.0, 1.5, 3.0, 3.6), (0.2, 0.5, 0.45, 0.6))


def curve(
    passes: Sequence[float], hours: Sequence[float], accuracy: Sequence[float], steps: Sequence[float] = STEPS
) -> curves.EvaluationCurve:
    unknown = np.full(len(steps), np.nan)
    columns = [np.array(values, dtype=np.float64) for values in (steps, passes, hours)]
    return curves.EvaluationCurve(*columns, columns[0] * 100, np.array(accuracy, dtype=np.float64), unknown, unknown)


def run(made: curves.EvaluationCurve, seed: int = 0, **fields: object) -> curves.RunCurves:
    rule = fields.pop("rule", "rule")
    return curves.RunCurves(f"run-{seed}", rule, seed, made, **fields)  # type: ignore[arg-type]


def linear_run(seed: int, arrival: int, last: int = 10, **fields: object) -> curves.RunCurves:
    """Accuracy rises evenly to 0.5 at step `arrival` and then stays a hair below it."""
    steps = range(last + 1)
    accuracy = [0.5 * step / arrival if step <= arrival else 0.49 for step in steps]
    return run(curve(list(steps), [step / 10 for step in steps], accuracy, list(steps)), seed, **fields)


def test_no_speed_up_follows_from_an_unknown_time() -> None:
    for unknown in (math.nan, math.inf):
        timed = curve((0, 10), (0, unknown), (0.1, 0.4), (0, 10))
        for others in (timed, replace(timed, hours=np.array([0.0, 1.0]))):
            groups = [SeedGroup("a", (run(others),)), SeedGroup("b", (run(timed),))]
            for baseline, other in (("a", "b"), ("b", "a")):
                ratios = compare_groups(groups, baseline).group(other).speed_ups
                assert (ratios["hours"], ratios["steps"]) == (None, 1.0)


def test_no_speed_up_follows_from_a_policy_that_is_best_before_the_first_step() -> None:
    falls, rises = (SeedGroup(name, (run(curve((0, 10), (0, 1), accuracy, (0, 10))),))
                    for name, accuracy in (("falls", (0.4, 0.1)), ("rises", (0.1, 0.4))))  # fmt: skip
    for baseline, other in (("falls", "rises"), ("rises", "falls")):
        assert not any(compare_groups([falls, rises], baseline).group(other).speed_ups.values())


def test_costs_are_compared_where_all_runs_were_evaluated() -> None:
    """The same curve in steps, evaluated every 2 and every 6 steps: no difference is a speed-up."""
    fine, coarse = (range(0, 25, every) for every in (2, 6))
    rise = {step: min(0.8, 0.1 * step**0.7) for step in fine}
    often = curve([3 * s for s in fine], list(fine), [rise[s] for s in fine], list(fine))
    seldom = curve(list(coarse), list(coarse), [rise[s] for s in coarse], list(coarse))
    grid = curves.common_grid([often, seldom], "steps")
    assert grid.tolist() == [0, 6, 12, 18, 24]
    for target in (0.25, 0.4, 0.55, 0.7):
        on = [curves.on_grid(c, "steps", grid) for c in (often, seldom)]
        assert curves.crossing(often, target, "steps", on[0]) == curves.crossing(seldom, target, "steps", on[1])
        assert curves.interpolated(often, target, "steps", on[0]) == curves.interpolated(seldom, target, "steps", on[1])
        everywhere = curves.on_grid(often, "steps", None)
        assert curves.crossing(often, target, "steps", everywhere) <= curves.crossing(seldom, target, "steps", on[1])
    # Mean passes over seeds differ by rounding, and in no digit that counts.
    near, apart = (replace(seldom, backward_passes=seldom.backward_passes + by) for by in (1e-7, 2e-6))
    assert [curves.common_grid([seldom, c], "backward_passes").size for c in (near, apart)] == [5, 1], "its end"
    assert [curves.on_grid(c, "backward_passes", grid).sum() for c in (near, apart)] == [5, 0]
    # The look-ahead's passes go on after the baseline's end, where it alone is evaluated.
    assert curves.common_grid([often, seldom], "backward_passes").tolist() == [0, 6, 12, 18, 24, *range(30, 73, 6)]
    groups = [SeedGroup("GRPO", (run(seldom),)), SeedGroup("GXPO", (run(often),))]
    assert compare_groups(groups, "GRPO").group("GXPO").speed_ups["steps"] == 1.0
    # A run that ends at step 22, where the other one was not evaluated: the budget is step 18 for both.
    short = curve(*([3 * s for s in fine][:12], list(fine)[:12], [rise[s] for s in fine][:12], list(fine)[:12]))
    (budget,) = compare_groups([groups[0], SeedGroup("GXPO", (run(short),))], "GRPO").group("GXPO").budgets[:1]
    assert (budget.axis, budget.budget, budget.over_seeds.mean) == ("steps", 18, 0.0)


def rises(name: str, *points: Sequence[float], by: float = 0.0) -> SeedGroup:
    """A seed for each list of passes at which it was evaluated; 0.4% a pass, and `by` more after the start."""
    runs = []
    for seed, passes in enumerate(points):
        accuracy = [0.1 + 0.004 * cost + (by if cost else 0.0) for cost in passes]
        runs.append(run(curve(passes, [cost / 60 for cost in passes], accuracy, range(len(passes))), seed))
    return SeedGroup(name, tuple(runs))


def test_plateaus_are_compared_at_the_passes_of_both() -> None:
    """The same line over passes: of 18 to 30 passes GRPO was evaluated at 20 and 30, GXPO at 30 alone."""
    grpo, gxpo = rises("GRPO", *[(0, 10, 20, 30, 40)] * 5), rises("GXPO", *[(0, 30, 60, 90, 120)] * 5)
    made = compare_groups([grpo, gxpo], "GRPO")
    assert made.group("GXPO").plateau.difference.mean == 0.0
    assert made.schedule.startswith("GXPO was evaluated at other backward passes than GRPO:")
    # A third one that shares none of them changes nothing, and has no plateau.
    other = compare_groups([grpo, gxpo, rises("SFPO", *[(0, 7, 14, 21, 28, 35, 42)] * 5)], "GRPO")
    assert other.group("GXPO").plateau.difference.mean == 0.0
    assert other.group("SFPO").plateau is None


def test_an_early_point_that_all_share_by_chance_is_no_budget() -> None:
    """GXPO's look-ahead ends after 11, 12 and 13 steps: all seeds share 30 passes, and then none with GRPO."""
    gated = [(0, 30, *range(first, 107, 10)) for first in (42, 44, 46)]
    groups = [rises("GRPO", *[range(0, 101, 10)] * 3), rises("GXPO", *gated, by=0.02)]
    made = compare_groups(groups, "GRPO")
    assert common_budgets(groups)["backward_passes"] == (100,)
    # At 92, 94 and 96 of 100 passes: 2 points above the line less 3.2, 2.4 and 1.6.
    result = made.group("GXPO").at_equal_passes
    assert (result.over_seeds.mean, result.evaluated_from) == (pytest.approx(0.02 - 0.024), 92)
    evidence = weigh(made)
    assert ("set evaluation.every_backward_passes alike" in evidence.sentence, evidence.conclusive) == (True, False)
    title = "Ranking at {} backward passes, the {} (95% intervals over seeds)"
    assert ranking_table(made).title == title.format(100, "most that all runs reached")
    # 90 is within a tenth of 96, the last point of a run that has no evaluation at 100.
    near = [rises("GRPO", *[range(0, 101, 10)] * 3), rises("GXPO", *[(*range(0, 91, 30), 96, 102)] * 3)]
    assert ranking_table(compare_groups(near, "GRPO")).title == title.format(90, "last point that all runs share")


def test_time_counts_the_passes_up_to_the_match() -> None:
    """The gate ends three passes a step after step 20; GRPO's peak, at step 100, is reached after 42 passes."""
    steps = (0, 14, 20, 100)
    grpo, gxpo = (
        SeedGroup(name, tuple(run(curve(passes, steps, accuracy, steps), seed) for seed in range(3)))
        for name, passes, accuracy in (
            ("GRPO", steps, (0.1, 0.2, 0.3, 0.5)),
            ("GXPO", (0, 42, 60, 140), (0.1, 0.5, 0.5, 0.5)),
        )
    )
    compared = compare_groups([grpo, gxpo], "GRPO")
    # 100/42 in passes, 100/14 in steps; at half of each 1/(0.07 + 0.21), asynchronously 0.5/0.21.
    for share, cells in (
        (0.0, ("7.1× fewer", "2.4× less", "2.4× less", "3.00")),
        (0.5, ("7.1× fewer", "3.6× less", "2.4× less", "3.00")),
    ):
        (table,) = payoff_tables([grpo, gxpo], compared, share)
        assert table.rows == (("GXPO", *cells),)


@pytest.mark.parametrize(("passes", "num"), [(10 / 3, 1), (4 / 3, 2), (10 / 3, 9), (8 / 3, 6), (13 / 3, 6), (7 / 6, 6)])
def test_the_last_evaluation_counts_at_fractions_of_a_pass(passes: float, num: int) -> None:
    """Sums of thirds and sixths lie a hair below or above the numbers of a grid."""
    costs, steps, rise = np.cumsum([0, *[passes] * num]), range(num + 1), [0.1 + 0.05 * n for n in range(num + 1)]
    groups = [SeedGroup(name, (run(curve(costs, steps, rise, steps)),)) for name in ("GRPO", "GXPO")]
    for group in compare_groups(groups, "GRPO").groups:
        assert (group.at_equal_passes.accuracy.mean, group.at_equal_passes.all_reached) == (rise[-1], True)


def test_a_budget_is_reached_by_a_cost_that_differs_by_rounding() -> None:
    for cost, budget in ((7.000000000000001, 7), (25.999999999999996, 26)):
        point = curves.at_budget(curve((0, cost), (0, 1), (0.2, 0.5), (0, 6)), "backward_passes", budget)
        assert (point.accuracy, point.reached) == (0.5, True)


def test_the_monotone_curve_by_hand() -> None:
    # 0.5 and 0.3 pool to 0.4: 0.2, 0.4, 0.4, 0.6 at 0, 10, 20, 30.
    made = curve((0, 10, 20, 30), (0, 1, 2, 3), (0.2, 0.5, 0.3, 0.6))
    everywhere = curves.on_grid(made, "steps", None)
    assert curves.interpolated(made, 0.3, "steps", everywhere) == pytest.approx(5)
    assert curves.interpolated(made, 0.45, "steps", everywhere) == pytest.approx(22.5)
    assert curves.crossing(made, 0.45, "steps", everywhere) == 10
    assert curves.interpolated(made, 0.1, "steps", everywhere) == 0
    assert curves.interpolated(made, 0.7, "steps", everywhere) is None
    assert curves.crossing(made, 0.7, "steps", everywhere) is None


def test_token_passes_are_tokens_times_passes_and_a_third_for_a_forward_pass() -> None:
    # 1000 tokens at 3 passes a step, then 1000 at 1, for the gate has fired; each with two forward passes.
    made = curve((0, 30, 40), (0, 1, 2), (0.1, 0.2, 0.3), (0, 10, 20))
    assert made.token_passes.tolist() == [0, 3000, 4000]
    forward = replace(made, forward_passes=2.0)
    assert forward.token_passes == pytest.approx([0, 3000 + 2000 / 3, 4000 + 4000 / 3])
    assert curve((0, 3, 4), (0, 1, 2), (0.1, 0.2, 0.3), (0, 1, 2)).token_passes.tolist() == [0, 300, 400]


def test_the_plateau_is_the_last_share_of_a_budget() -> None:
    made = curve((0, 6, 12, 18, 20), (0, 1, 2, 3, 4), (0.1, 0.5, 0.7, 0.8, 0.9), range(5))
    assert curves.in_plateau(made, 20).tolist() == [False, False, True, True, True]
    assert curves.in_plateau(made, 18, 0.5).tolist() == [False, False, True, True, False]
    assert not curves.in_plateau(made, 0).any(), "the initial policy has no plateau"


def test_a_budget_selects_the_last_evaluation_within_it() -> None:
    point = curves.at_budget(curve(*CANDIDATE), "backward_passes", 65)
    assert (point.index, point.accuracy, point.spent, point.reached) == (2, 0.45, 60, True)
    exact = curves.at_budget(curve(*CANDIDATE), "hours", 3.6)
    assert exact.accuracy == 0.6
    after = curves.at_budget(curve(*CANDIDATE), "steps", 100)
    assert (after.accuracy, after.reached) == (0.6, False)
    late = curve((5, 10), (1, 2), (0.1, 0.2), (5, 10))
    assert curves.at_budget(late, "steps", 4) is None


def test_speed_ups_are_those_of_the_published_table_2() -> None:
    (rows,) = (table.rows for table in gxpo_paper().tables if table.number == 2)
    groups = [
        SeedGroup(str(number), (run(curve((0, r["backward_passes"]), (0, r["hours"]), (0, 0.5), (0, r["steps"]))),))
        for number, r in enumerate(rows)
    ]
    for row, group in zip(rows, compare_groups(groups, "0").groups, strict=True):
        for axis, name in (("steps", "step"), ("backward_passes", "bp"), ("hours", "time")):
            assert group.speed_ups[axis] == pytest.approx(row[f"{name}_speedup"], abs=0.0051)


def test_mean_curve_takes_the_steps_that_all_seeds_share() -> None:
    first = curve((0, 10, 20), (0, 1, 2), (0.2, 0.4, 0.6), (0, 10, 20))
    second = curve((0, 30), (0, 3), (0.4, 0.6), (0, 20))
    mean = curves.mean_curve([replace(one, forward_passes=2.0) for one in (first, second)])
    assert mean.forward_passes == 2.0, "else its token-passes are too few"
    np.testing.assert_array_equal(mean.steps, [0, 20])
    np.testing.assert_allclose(mean.accuracy, [0.3, 0.6])
    np.testing.assert_allclose(mean.backward_passes, [0, 25])
    assert curves.mean_curve([first]) is first
    with pytest.raises(ValueError, match="the seeds have no evaluation in common"):
        curves.mean_curve([curve((0,), (0,), (0.1,), (0,)), curve((5,), (1,), (0.2,), (5,))])


def test_mean_curve_of_gated_seeds_is_taken_at_the_passes_that_they_share() -> None:
    """Evaluated every 6 passes: three a step until the gate fires, after 2 steps in one seed and 4 in the other."""
    first = curve((0, 6, 12, 18), (0, 1, 2, 3), (0.2, 0.4, 0.6, 0.7), (0, 2, 8, 14))
    second = curve((0, 6, 12, 18), (0, 1, 2, 3), (0.2, 0.6, 0.6, 0.9), (0, 2, 4, 10))
    group = SeedGroup("GXPO", (run(first), run(second, 1)))
    np.testing.assert_array_equal(group.mean.backward_passes, [0, 6, 12, 18])
    np.testing.assert_array_equal(group.mean.steps, [0, 2, 6, 12])
    np.testing.assert_allclose(group.mean.accuracy, [0.2, 0.5, 0.6, 0.8])
    # 0.4 and 0.6: half-width 12.706 · 0.1414 / √2, more than there is; 0.6 twice has no spread.
    np.testing.assert_allclose([group.mean.ci_low, group.mean.ci_high], [[0.2, 0, 0.6, 0], [0.2, 1, 0.6, 1]])
    plain = SeedGroup("GRPO", (run(curve((0, 6, 12, 18), (0, 1, 2, 3), (0.2, 0.3, 0.4, 0.6), (0, 6, 12, 18))),))
    compared = compare_groups([plain, group], "GRPO").group("GXPO")
    assert (compared.match.backward_passes, compared.speed_ups["backward_passes"]) == (12, 1.5)


def test_a_comparison_of_two_runs_by_hand() -> None:
    gate = curves.GateTrace(np.array([5.0]), np.array([1.0]), 0.5, 20)
    groups = [SeedGroup("GRPO", (run(curve(*BASELINE)),)), SeedGroup("GXPO K=5", (run(curve(*CANDIDATE), gate=gate),))]
    comparison = compare_groups(groups, "GRPO")
    assert comparison.target == curves.Point(0.5, 20, 20, 2.0, 2000, 2000)
    row = comparison.group("GXPO K=5")
    assert row.shutoff_steps == (20,)
    assert row.match == curves.Point(0.5, 10, 30, 1.5, 1000, 3000)
    # Both were evaluated at 0 and 30 passes, where GRPO has spent 3 h and GXPO 1.5 h, and at 0, 10, 20 and 30 steps.
    assert row.speed_ups == {"steps": 2.0, "backward_passes": 1.0, "hours": 2.0, "tokens": 2.0, "token_passes": 1.0}
    # Plateau: from 18 to 30 passes, 0.5 at 30, where both were evaluated.
    assert (row.plateau.own.mean, row.plateau.difference.mean, row.plateau.p_value) == (0.5, 0.0, None)
    # Equal budgets by default: 30 steps (.6 against .5), 30 BP (.5 against .5), 3 h (.45 against .5).
    gaps = {budget.axis: budget.over_seeds.mean for budget in row.budgets if budget.over_seeds}
    axes = ("steps", "backward_passes", "hours")
    assert [gaps[axis] for axis in axes] == pytest.approx([0.1, 0.0, -0.05])
    assert comparison.group("GRPO").speed_ups["hours"] == 1.0
    assert json.loads(json.dumps(asdict(comparison)))["groups"][1]["match"]["steps"] == 10


def with_problems(*scores: Sequence[float], ids: str = "pqrs") -> SeedGroup:
    """A group of one run, named by its first score; scores of four problems every ten steps."""
    made = np.array(scores)
    steps, unknown = 10.0 * np.arange(len(made)), np.full(len(made), np.nan)
    curve = curves.EvaluationCurve(steps, steps, steps, steps, made.mean(axis=1), unknown, unknown, made, tuple(ids))
    return SeedGroup(str(made[0, 0]), (run(curve),))


def test_differences_over_problems_are_paired_by_problem() -> None:
    first, second = (with_problems((low, low, 1, 1), (low + 0.5, low + 0.5, 1, 1)) for low in (0.0, 0.5))
    budget = compare_groups([first, second], "0.0", budgets={"steps": (10,)}).group("0.5").budgets[0]
    # Per problem +.5, +.5, 0, 0: mean .25, s² = 1/12, t(3) = 3.1824: half-width 3.1824 · .2887 / 2 = .4594.
    assert (budget.over_problems.mean, budget.over_problems.num) == (0.25, 4)
    assert budget.over_problems.high == pytest.approx(0.25 + 0.4594, abs=1e-4)
    # Half a point on every problem says nothing about other problems, or all of them: not an interval without width.
    same = with_problems((0.5, 0.5, 0.5, 0.5))
    first_half = with_problems((0.25, 0.25, 0.25, 0.25))
    flat = compare_groups([first_half, same], "0.25", budgets={"steps": (10,)}).group("0.5").budgets[0].over_problems
    assert (flat.mean, flat.low, flat.high, flat.num) == (0.25, None, None, 4)
    other = with_problems((0.5, 0.5, 1, 1), ids="pqrx")
    unknown = SeedGroup("0.5", (run(replace(second.runs[0].curve, per_problem=None)),))
    for lacking in (other, unknown):
        assert compare_groups([first, lacking], "0.0").group("0.5").budgets[0].over_problems is None


def test_a_budget_is_compared_over_seeds_only_if_all_runs_were_evaluated_within_it() -> None:
    late = curve((10, 20), (1.0, 2.0), (0.1, 0.2), (10, 20))
    whole = SeedGroup("a", (run(curve(*CANDIDATE), 0), run(curve(*CANDIDATE), 1)))
    partly = SeedGroup("b", (run(curve(*BASELINE), 0), run(late, 1)))
    budget, full = compare_groups([whole, partly], "b", budgets={"steps": (5, 10)}).group("a").budgets
    assert budget.accuracy.mean == pytest.approx(0.2)
    assert budget.over_seeds is None
    # At step 10: 0.5 − 0.4 and 0.5 − 0.1.
    assert full.over_seeds.mean == pytest.approx(0.25)
    reverse = compare_groups([whole, partly], "a", budgets={"steps": (5, 10)}).group("b").budgets
    assert [budget.budget for budget in reverse] == [10]


def test_one_or_no_shared_seed_is_inconclusive() -> None:
    groups = [SeedGroup("GRPO", (run(curve(*BASELINE)),)), SeedGroup("GXPO", (run(curve(*CANDIDATE)),))]
    text = weigh(compare_groups(groups, "GRPO")).sentence
    assert "Inconclusive: only one shared seed" in text
    assert "seeds shared with the baseline (1 of at least 3)" in text
    assert "seeds reached" not in text, "one seed gives no interval over seeds"
    apart = compare_groups([three_seeds("GRPO", (10, 10)), SeedGroup("GXPO", (linear_run(2, 5),))], "GRPO")
    assert apart.group("GXPO").num_paired == 0
    assert weigh(apart).sentence.startswith("Inconclusive: no run shares a seed with the baseline.\nMissing: seeds")
    assert not weigh(apart).conclusive
    alone = weigh(compare_groups(groups[:1], "GRPO"))
    assert alone.sentence == "GRPO is the only configuration; add another run to compare it with."
    assert (alone.conclusive, alone.supported, alone.missing) == (False, {}, ("a second run",))


def three_seeds(name: str, arrivals: Sequence[int], **fields: object) -> SeedGroup:
    return SeedGroup(name, tuple(linear_run(seed, arrival, **fields) for seed, arrival in enumerate(arrivals)))


def test_an_advantage_in_every_seed_with_an_interval_above_one_is_supported() -> None:
    comparison = compare_groups([three_seeds("GRPO", (10, 10, 10)), three_seeds("GXPO", (5, 5, 4))], "GRPO")
    # Speed-ups 2, 2, 2.5: geometric mean 10^(1/3); logs .6931, .6931, .9163: s = .1288, half = .3200.
    interval = comparison.group("GXPO").seed_speed_ups["steps"]
    assert interval.mean == pytest.approx(10 ** (1 / 3))
    assert interval.low == pytest.approx(np.exp(0.7675 - 0.3200), abs=2e-3)
    evidence = weigh(comparison)
    assert evidence.supported == {"GXPO": ("steps", "backward_passes", "hours")}
    assert evidence.missing == ()
    assert "3 of 3 seeds reached" in evidence.sentence
    # At 10 passes GRPO is at its 50%, GXPO at 49% in every seed: no spread to test with. Plateau, from 6 to 10 of 10
    # passes: GRPO 0.4 on average, GXPO 0.49 in every seed.
    first, *_, last = evidence.sentence.splitlines()
    assert first == (
        "GXPO is 1.0 point below GRPO after 10 backward passes; with 3 shared seeds the 95% interval −1.0 to −1.0 "
        "excludes zero, but all seeds differ alike."
    )
    assert "steps 2.2× fewer (1.6× fewer to 3.0× fewer)" in last
    assert last.endswith(
        "supported: less steps and backward passes and time; its plateau differs by +9.0 points (+9.0 to +9.0): not "
        "shown equivalent."
    )
    assert not evidence.conclusive
    four = compare_groups([three_seeds("GRPO", (10,) * 4), three_seeds("GXPO", (5, 5, 4, 5))], "GRPO")
    assert weigh(four).supported == evidence.supported
    # Twice the cost in every seed is no advantage, however certain.
    slower = compare_groups([three_seeds("GRPO", (5, 5, 4)), three_seeds("GXPO", (10, 10, 10))], "GRPO")
    assert slower.group("GXPO").seed_speed_ups["steps"].mean == pytest.approx(10 ** (-1 / 3))
    assert weigh(slower).supported == {"GXPO": ()}


def test_a_candidate_that_never_gets_there_is_one_of_those_that_are_corrected_for() -> None:
    groups = [three_seeds("GRPO", (10, 10, 10)), three_seeds("GXPO", (5, 5, 4))]
    # t = 0.7675/(0.1288/√3) = 10.32, p = 1 − t/√(t² + 2) = 0.0093: times three costs 0.028, times six 0.056.
    assert weigh(compare_groups(groups, "GRPO")).supported["GXPO"] == ("steps", "backward_passes", "hours")
    assert weigh(compare_groups([*groups, three_seeds("SFPO", (25, 25, 25))], "GRPO")).supported["GXPO"] == ()


AFTER = "below GRPO after 10 backward passes"
OVER = f"{AFTER}; with 3 shared seeds the 95% interval"


@pytest.mark.parametrize(
    ("arrivals", "verdict", "missing"),
    # Differences of 0, −1 and −30 points, by how far a seed is from its 50%: ± t·s/√n.
    [
        # Equal speed-ups come from a coarse grid: no spread is known.
        ((5, 5, 5), f"1.0 point {OVER} −1.0 to −1.0 excludes zero, but all seeds differ alike.", ()),
        (
            (5, 5),
            f"1.0 point {AFTER} (−1.0 to −1.0 over seeds). Inconclusive: only 2 shared seeds. Run at least 3.",
            ("seeds shared with the baseline (2 of at least 3)",),
        ),
        ((5, 10, 9), f"0.7 points {OVER} −2.1 to +0.8 does not exclude zero.", ()),
        (
            (5, 5, 25),
            f"10.7 points {OVER} −52.3 to +30.9 does not exclude zero.",
            ("longer runs of GXPO (1 seed did not reach the target)",),
        ),
    ],
)
def test_what_supports_no_advantage_says_what_is_missing(
    arrivals: Sequence[int], verdict: str, missing: tuple[str, ...]
) -> None:
    grpo = three_seeds("GRPO", (10,) * len(arrivals))
    evidence = weigh(compare_groups([grpo, three_seeds("GXPO", arrivals)], "GRPO"))
    assert evidence.supported == {"GXPO": ()}
    assert evidence.sentence.splitlines()[0] == f"GXPO is {verdict}"
    assert (evidence.conclusive, evidence.missing) == (False, missing)
    assert f" of {len(arrivals)} seeds reached" in evidence.sentence
    # Where a seed did not get there, ratios of the others would be too good.
    assert ("intervals over seeds: steps" in evidence.sentence) == (25 not in arrivals)


def ends(name: str, *accuracies: float, passes: Sequence[float] = (0, 10), **fields: object) -> SeedGroup:
    """A seed for each accuracy after the second evaluation."""
    curves = [curve(passes, (0.0, 1.0), (0.2, accuracy), (0, 10)) for accuracy in accuracies]
    return SeedGroup(name, tuple(run(made, seed, **fields) for seed, made in enumerate(curves)))


def test_the_default_baseline_is_the_one_that_ends_best() -> None:
    falls = SeedGroup("GRPO lr 1", (run(curve((0, 10), (0, 1), (0.9, 0.5), (0, 10)), rule="GRPO"),))
    # Means 0.6 and 0.55: the best seed does not count, and neither do rules whose labels begin alike.
    groups = [
        *(ends(rule, 0.9, rule=rule) for rule in ("GXPO K=5", "GRPO-Momentum", "SFPO K=3")),
        *(falls, ends("GRPO lr 2", 0.6, 0.6, rule="GRPO"), ends("GRPO lr 3", 0.2, 0.9, rule="GRPO")),
    ]
    assert [default_baseline(groups), default_baseline(groups[:3])] == ["GRPO lr 2", "GXPO K=5"]
    mine = mock.Mock(label="GRPO Momentum", family="look-ahead")
    with mock.patch.object(RULE_CHOICE, "known", return_value=[*RULES, mine]):
        assert default_baseline([ends("mine", 0.9, rule="GRPO Momentum"), *groups[3:]]) == "GRPO lr 2"
    # Before and after it in the alphabet.
    compared = compare_groups(groups, "GRPO lr 2").groups
    assert [group.name for group in compared if group.plateau is None] == ["GRPO lr 2"]


def test_savings_at_a_target_by_hand() -> None:
    grpo, gxpo = three_seeds("GRPO", (10, 10, 10)), three_seeds("GXPO", (5, 4, 6))
    # Half of 50% on straight lines: after 5 steps against 2.5, 2 and 3; at whole steps 3, 2 and 3.
    (reach,) = sweep(gxpo, grpo, [0.25], common_grids([grpo, gxpo]), "steps")
    between, first = np.log([2, 2.5, 5 / 3]), np.log([5 / 3, 2.5, 5 / 3])
    assert (reach.interpolated.mean, reach.first.mean) == pytest.approx((np.exp(between.mean()), np.exp(first.mean())))
    assert reach.p_value == pytest.approx(stats.ttest_1samp(between, 0).pvalue)
    assert reach.costs == pytest.approx((5, 5))
    (hours,) = sweep(gxpo, grpo, [0.25], common_grids([grpo, gxpo]), "hours")
    assert (hours.first, hours.costs) == (None, (None, pytest.approx(0.5)))
    single = [SeedGroup("GRPO", (run(curve((0, 1), (0, 1), (0.1, 0.2), (0, 1))),))]
    assert [grid.tolist() for grid in common_grids(single).values()] == [[0, 1], [0, 1]]


def rising(name: str, every: int, last: int = 60) -> SeedGroup:
    """Accuracy 0.2 and a hundredth more each step of one pass, evaluated every few steps up to the last."""
    steps = list(range(0, last + 1, every))
    made = curve(steps, [step / 60 for step in steps], [0.2 + 0.01 * step for step in steps], steps)
    return SeedGroup(name, tuple(run(made, seed) for seed in range(3)))


def test_a_run_that_was_evaluated_at_its_start_alone_decides_nothing_about_the_others_and_is_named() -> None:
    grpo, gxpo, lost = rising("GRPO", 12), rising("GXPO", 2), rising("SFPO", 1, last=0)
    two, three = ([grpo, gxpo], [grpo, gxpo, lost])
    assert [grid.tolist() for grid in common_grids(three).values()] == [list(range(0, 61, 12))] * 2
    assert common_budgets(three) == common_budgets(two)
    for groups in (two, three):
        # 0.5 after 30 steps, where GXPO alone was evaluated; both at 36.
        (reach,) = sweep(gxpo, grpo, [0.5], common_grids(groups), "backward_passes")
        assert reach.first.mean == 1.0
    compared = compare_groups(three, "GRPO")
    assert replace(compared.group("GXPO"), plateau=None) == replace(
        compare_groups(two, "GRPO").group("GXPO"), plateau=None
    )
    # It is counted as one that did not get there.
    (reach,) = sweep(lost, grpo, [0.5], common_grids(three), "backward_passes")
    assert (reach.first, reach.interpolated) == (None, None)
    sfpo = compared.group("SFPO")
    assert (sfpo.num_reached, sfpo.num_paired, sfpo.at_equal_passes, sfpo.plateau) == (0, 3, None, None)
    assert weigh(compared).missing == (
        "longer runs of SFPO (3 seeds did not reach the target)",
        "evaluations after the start of SFPO (none with seed 0, 1, 2)",
    )
    # Where no run has a later one, the initial policies are all there is.
    assert common_budgets([lost])["backward_passes"] == (0.0,)


def test_a_baseline_whose_seed_ended_at_the_start_is_not_said_to_have_learned_nothing() -> None:
    grpo, sfpo = rising("GRPO", 30), rising("SFPO", 30)
    ended = replace(grpo.runs[2], curve=rising("GRPO", 1, last=0).runs[0].curve)
    evidence = weigh(compare_groups([SeedGroup("GRPO", (*grpo.runs[:2], ended)), sfpo], "GRPO"))
    assert "never exceeds" not in evidence.sentence
    assert "evaluations after the start of GRPO (none with seed 2)" in evidence.missing
    assert not evidence.supported["SFPO"]


def test_seeds_without_a_common_evaluation_are_named_in_one_line() -> None:
    apart = SeedGroup("GXPO", tuple(run(curve((s,), (1,), (0.5,), (s,)), s) for s in (90, 93)))
    with pytest.raises(DataError, match=r"^GXPO: the seeds have no evaluation in common; set the same"):
        compare_groups([rising("GRPO", 30), apart], "GRPO")


def headline(*groups: SeedGroup) -> tuple[str, bool]:
    evidence = weigh(compare_groups(groups, "GRPO"))
    return evidence.sentence.splitlines()[0], evidence.conclusive


def test_the_headline_is_about_the_best_candidate_at_equal_passes_and_says_what_its_interval_carries() -> None:
    grpo = ends("GRPO", 0.5, 0.5, 0.5)
    # 10, 11 and 12 points: s = 1, t = 19.1, ± 4.3027/√3 = 2.5; 4.5, 7 and 9.5: s = 2.5, ± 6.2, p = 0.04.
    clear, close = ends("GXPO", 0.6, 0.61, 0.62), ends("SFPO", 0.545, 0.57, 0.595)
    after = "after 10 backward passes; with 3 shared seeds the 95% interval"
    first = f"GXPO is 11.0 points above GRPO {after} +8.5 to +13.5 excludes zero."
    assert headline(grpo, clear) == (first, True)
    assert headline(grpo, close) == (f"SFPO is 7.0 points above GRPO {after} +0.8 to +13.2 excludes zero.", True)
    best = "SFPO, the best of 2 candidates,"
    corrected = "excludes zero, but not once corrected for 2 comparisons."
    text = f"{best} is 7.0 points above GRPO {after} +0.8 to +13.2 {corrected}"
    assert headline(grpo, ends("Epochs", 0.5, 0.41, 0.5), close) == (text, False)
    # As one of two that are compared, whatever became of the other: no spread, or no evaluation after the start.
    ended = ends("Epochs", 0.5, 0.5, 0.5)
    at_start = [replace(one, curve=curve((0,), (0,), (0.2,), (0,))) for one in ended.runs]
    for other in (ended, SeedGroup("Epochs", tuple(at_start))):
        assert headline(grpo, other, close) == (text, False)
    assert headline(grpo, clear, ends("Epochs", 0.4))[0] == first.replace("GXPO", "GXPO, the best of 2 candidates,")
    unequal = ends("GXPO", 0.6, 0.61, 0.62, conditions={"data": "b"})
    assert headline(grpo, unequal) == (f"{first} Conditions differ: data.", False)
    unmatched = "Not all runs were evaluated at equal backward passes after their first step; set evaluation"
    assert headline(grpo, ends("GXPO", 0.6, 0.61, 0.62, passes=(0, 30))) == (
        f"{unmatched}.every_backward_passes alike.",
        False,
    )
    assert headline(grpo, ends("GXPO", 0.5004, 0.5, 0.5))[0].startswith("GXPO is within 0.1 points of GRPO after 10")
    # On the way to the budget the baseline may have gained what seems to be a difference.
    inconclusive = " Inconclusive: not all were evaluated there; set evaluation.every_backward_passes alike."
    for passes, since, rest in ((10, "", ""), (9, ", evaluated from 9 on", inconclusive)):
        gains = [(0.2, last, 0.9) for last in (0.6, 0.61, 0.62)]
        curves = [curve((0, passes, 20), (0.0, 1.0, 2.0), gain, (0, 10, 20)) for gain in gains]
        text, conclusive = headline(grpo, SeedGroup("GXPO", tuple(run(one, seed) for seed, one in enumerate(curves))))
        assert text == first.replace("passes;", f"passes{since};") + rest
        assert conclusive == (not rest)
    # Over four problems 25, 0, 0 and 25 points: s = 14.4, ± 3.1824 · 14.4/2 = 23.0.
    scored = with_problems((0.0,) * 4, (0.75, 0.5, 1.0, 0.25)), with_problems((0.0,) * 4, (0.5, 0.5, 1.0, 0.0))
    text, conclusive = headline(*(replace(one, name=name) for one, name in zip(scored, ("GXPO", "GRPO"), strict=True)))
    assert text == (
        "GXPO is 12.5 points above GRPO after 10 backward passes (−10.5 to +35.5 over problems). Inconclusive: only "
        "one shared seed. Run at least 3."
    )
    assert not conclusive


def test_a_time_that_no_run_knows_is_neither_shown_nor_supported() -> None:
    def timeless(group: SeedGroup) -> SeedGroup:
        runs = [replace(one, curve=replace(one.curve, hours=one.curve.hours * np.nan)) for one in group.runs]
        return SeedGroup(group.name, tuple(runs))

    groups = [timeless(three_seeds("GRPO", (10, 10, 10))), timeless(three_seeds("GXPO", (5, 5, 4)))]
    evidence = weigh(compare_groups(groups, "GRPO"))
    assert evidence.supported == {"GXPO": ("steps", "backward_passes")}
    assert "time" not in evidence.sentence


def test_unequal_data_rules_out_support_and_unequal_hardware_that_of_time() -> None:
    base = three_seeds("GRPO", (10, 10, 10), conditions={"data": "a"}, hardware={"cpu": "x"})
    data = three_seeds("GXPO", (5, 5, 4), conditions={"data": "b"}, hardware={"cpu": "x"})
    evidence = weigh(compare_groups([base, data], "GRPO"))
    assert evidence.supported == {"GXPO": ()}
    assert any("equal conditions (these differ: data)" in item for item in evidence.missing)
    for count, named in ((6, "c0, c1, c2, c3, c4, c5)"), (7, "c0, c1, c2, c3, c4, c5 and 1 more)")):
        many = [three_seeds(n, (9, 9, 9), conditions={f"c{i}": n for i in range(count)}) for n in ("GRPO", "GXPO")]
        assert any(named in item for item in weigh(compare_groups(many, "GRPO")).missing)
    machine = three_seeds("GXPO", (5, 5, 4), conditions={"data": "a"}, hardware={"cpu": "y"})
    evidence = weigh(compare_groups([base, machine], "GRPO"))
    assert evidence.supported == {"GXPO": ("steps", "backward_passes")}
    assert evidence.missing == ("equal hardware for the times (these differ: cpu)",)
    both = three_seeds("GXPO", (5, 5, 4), conditions={"data": "b"}, hardware={"cpu": "y"})
    missing = weigh(compare_groups([base, both], "GRPO")).missing
    assert [item.rpartition(" differ: ")[2] for item in missing] == ["data)", "cpu)"]


def test_seed_dependent_conditions_are_not_differences() -> None:
    def group(name: str, values: dict[int, str]) -> SeedGroup:
        return SeedGroup(name, tuple(linear_run(s, 5, conditions={"data": v}) for s, v in values.items()))

    assert find_differences([group("a", {0: "x", 1: "y"}), group("b", {0: "x", 1: "y"})]) == []
    assert find_differences([group("a", {0: "x", 1: "y"}), group("b", {1: "y"})]) == []
    differences = find_differences([group("a", {0: "x", 1: "y"}), group("b", {0: "x", 1: "x"})])
    assert [difference.values for difference in differences] == [{"a": ("x", "y"), "b": ("x",)}]
    assert len(find_differences([group("a", {0: "x"}), group("b", {5: "z"})])) == 1
    # A setting that a run's version did not have yet counts as the default.
    new, old = (
        SeedGroup(name, (linear_run(0, 5, conditions=made),))
        for name, made in (
            (
                "new",
                {"learner.sequence_parallel": "1", "environment.max_turns": "4"}
                | {"rollout.temperature": "0.7", "policy_sha256": "x"},
            ),
            ("old", {}),
        )
    )
    assert [one.setting for one in find_differences([new, old])] == ["policy_sha256", "rollout.temperature"]
    # Each is compared with the first, not with one another.
    three = [group("a", {0: "x", 1: "y"}), group("b", {0: "x"}), group("c", {1: "y"})]
    assert [len(find_differences(three, baseline)) for baseline in (None, "b")] == [0, 1]


def test_schedules_of_evaluation_are_told_in_one_line_and_are_no_condition() -> None:
    def group(name: str, passes: Sequence[float], every: int) -> SeedGroup:
        made = curve(passes, (0.0, 1.0, 2.0, 3.0), (0.1, 0.2, 0.3, 0.4), [every * number for number in range(4)])
        return SeedGroup(name, (run(made, conditions={"evaluation.every_steps": str(every)}),))

    grpo, sfpo = group("GRPO", (0, 6, 12, 18), 6), group("SFPO", (0, 6, 12, 18), 1)
    compared = compare_groups([grpo, sfpo], "GRPO")
    assert compared.differences == ()
    assert compared.schedule == (
        "Evaluation schedules differ as the rules' steps do: all were evaluated at the same backward passes."
    )
    assert compared.schedule in weigh(compared).sentence.splitlines()
    assert not any("conditions" in part for part in weigh(compared).missing)
    assert compare_groups([grpo, sfpo, group("GXPO", (0, 6, 12, 18), 2)], "GRPO").schedule == compared.schedule
    # As far as both went: the baseline's evaluations after its rival's end are none of the rival's.
    assert "other" in compare_groups([grpo, group("SFPO", (0, 6, 12, 12.5), 1)], "GRPO").schedule
    assert compare_groups([group("GRPO", (0, 6, 12, 24), 6), group("SFPO", (0, 6, 12, 12), 1)], "GRPO").schedule

    thirds = [group(name, passes, every) for name, passes, every in
              (("GRPO", (0, 10 / 3, 20 / 3, 10), 2), ("SFPO", np.cumsum([0, *[10 / 3] * 3]) + 1e-15, 1))]  # fmt: skip
    assert compare_groups(thirds, "GRPO").schedule == compared.schedule
    apart = compare_groups([grpo, group("SFPO", (0, 5, 10, 15), 1)], "GRPO")
    assert not apart.differences
    assert apart.schedule == (
        "SFPO was evaluated at other backward passes than GRPO: at an equal budget the last evaluation within it "
        "counts, a target is reached at an evaluation of the common grid, and plateaus are those of shared "
        "evaluations; nothing is interpolated. To share more of them, set evaluation.every_backward_passes alike."
    )
    assert "other" in compare_groups([grpo, group("GXPO", (0, 18, 36, 54), 6)], "GRPO").schedule, "passes count"
    assert compare_groups([grpo, group("Other", (0, 6, 12, 18), 6)], "GRPO").schedule == ""


def test_a_baseline_that_never_learned_gives_no_speed_up() -> None:
    flat = SeedGroup("GRPO", (run(curve((0, 10, 20, 30), (0, 1, 2, 3), (0.4, 0.3, 0.3, 0.2))),))
    comparison = compare_groups([flat, SeedGroup("GXPO", (run(curve(*CANDIDATE)),))], "GRPO")
    assert set(comparison.group("GXPO").speed_ups.values()) == {None}
    assert "never exceeds its initial policy" in weigh(comparison).sentence


def test_the_bounds_of_a_ratio_follow_its_direction() -> None:
    assert (amount("hours", 4800), amount("steps", 4800)) == ("200 d 0 h", "4,800")
    assert (ratio(3.0, "steps"), ratio(0.625, "hours")) == ("3.0× fewer", "1.6× more")
    assert ratio(1.04, "hours") == ratio(1 / 1.04, "hours") == "equal"
    assert ratio_interval(Interval(2.0, 1.6, 3.0, 3), "steps") == "2.0× fewer (1.6× fewer to 3.0× fewer)"
    # 1 / 0.8 and 1 / 0.4.
    assert ratio_interval(Interval(0.5, 0.4, 0.8, 3), "backward_passes") == "2.0× more (2.5× more to 1.2× more)"
    assert ratio_interval(Interval(1.25, 0.5, 2.0, 3), "hours") == "1.2× less (2.0× more to 2.0× less)"
    assert ratio_interval(Interval(1.0, 1.0, 1.0, 3), "hours") == "equal"
    assert ratio_interval(Interval(0.5, None, None, 1), "hours") == "2.0× more"
