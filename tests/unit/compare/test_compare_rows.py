"""From rows to curves, from runs to groups with names, to tables and heat maps: numbers worked by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gxpo_trainer.compare.curves import EvaluationCurve, GateTrace, RunCurves
from gxpo_trainer.compare.evidence import weigh
from gxpo_trainer.compare.groups import (
    Reach,
    best_plateau,
    compare_groups,
    passes_per_step,
    payoff_of,
    sweep,
    time_speed_up,
)
from gxpo_trainer.compare.intervals import Interval
from gxpo_trainer.compare.rows import decode_evaluation, flatten, forward_passes, run_curves, sampling_share
from gxpo_trainer.compare.seeds import SeedGroup, config_key, group_by_config, group_labels
from gxpo_trainer.compare.text_tables import Table, all_tables, budget_table, markdown, ranking_table, reach_cell
from gxpo_trainer.errors import DataError


def config(seed: int = 0, name: str = "run", rate: float = 1e-5, **rule: Any) -> dict[str, Any]:
    return {
        "name": name,
        "seed": seed,
        "learner": {"rule": {"name": "gxpo", "k": 5, **rule}, "optimizer": {"learning_rate": rate}},
        "rollout": {"temperature": 1.0, "max_num_seqs": 512},
    }


def evaluation(step: int, value: float, benchmark: str = "easy", **members: Any) -> dict[str, Any]:
    return {"step": step, "benchmark": benchmark, "scores": {"pass@1": value}} | members


def series(**metrics: Mapping[int, float]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Names with __ for /."""
    return {
        name.replace("__", "/"): (np.array(list(values), dtype=float), np.array(list(values.values()), dtype=float))
        for name, values in metrics.items()
    }


def by_steps(name: str, accuracy: Sequence[float], passes: int = 1, **fields: Any) -> RunCurves:
    """Evaluated every ten steps, of six minutes each. shutoff: of the gate."""
    steps = np.arange(len(accuracy)) * 10.0
    unknown, shutoff = np.full(len(steps), np.nan), fields.pop("shutoff", None)
    made = EvaluationCurve(steps, passes * steps, steps / 10, 100 * steps, np.array(accuracy), unknown, unknown)
    return RunCurves(name, name, fields.pop("seed", 0), made, replace(GateTrace(), shutoff_step=shutoff), **fields)


def flat_run(accuracy: float, seed: int = 0) -> RunCurves:
    """The same accuracy at the start and at the end."""
    return by_steps("GRPO", (accuracy, accuracy), seed=seed)


def test_an_evaluation_states_its_costs_and_the_series_the_gate() -> None:
    rows = [
        evaluation(4, 0.3, backward_passes_total=12, training_s=1800.0, tokens_total=None, samples_per_prompt=1),
        evaluation(6, 0.4, training_s=3600.0, tokens_total=500, samples_per_prompt=16),
    ]
    metrics = series(gate__z={2: 0.1, 3: 0.7}, gate__threshold={1: 0.25, 2: 0.5}, gate__shutoff_step={3: 3})
    run = run_curves({"config": config()}, rows, metrics)
    np.testing.assert_array_equal(run.curve.steps, [4, 6])
    np.testing.assert_array_equal(run.curve.backward_passes, [12, np.nan])
    np.testing.assert_array_equal(run.curve.hours, [0.5, 1])
    np.testing.assert_array_equal(run.curve.tokens, [np.nan, 500])
    assert (run.gate.threshold, run.gate.shutoff_step) == (0.5, 3)
    np.testing.assert_array_equal(run.gate.z, [0.1, 0.7])
    assert run.conditions["eval.easy.samples_per_prompt"] == "16", "of the last record"


@pytest.mark.parametrize(("mode", "tau"), [("never", 0.5), ("permanent", math.inf)])
def test_a_gate_that_cannot_fire_has_no_threshold(mode: str, tau: float) -> None:
    metrics = series(gate__z={2: 0.1}, gate__threshold={2: tau})
    gate = run_curves({"config": config(gate={"mode": mode, "threshold": tau})}, [evaluation(4, 0.3)], metrics).gate
    assert (gate.threshold, gate.z.tolist()) == (None, [0.1])


def test_settings_are_told_apart_by_their_json() -> None:
    values = {"a": {"yes": True, "no": False, "one": 1, "real": 1.0, "none": None}, "word": "ä", "some": [1, None]}
    assert flatten(values) == {
        "a.yes": "true", "a.no": "false", "a.one": "1", "a.real": "1.0", "a.none": "null", "word": '"ä"',
        "some": "[1, null]",
    }  # fmt: skip


def test_a_value_that_is_not_finite_is_no_evaluation_and_no_cost() -> None:
    rows = [evaluation(0, 0.2), evaluation(5, math.nan), evaluation(9, 0.3, training_s=math.inf)]
    run = run_curves({"config": config()}, rows, series(gate__shutoff_step={9: math.nan}))
    np.testing.assert_array_equal(run.curve.steps, [0, 9])
    assert math.isnan(run.curve.hours[1])
    assert run.gate.shutoff_step is None


def test_named_benchmarks_are_averaged_at_the_steps_that_have_them_all() -> None:
    rows = [evaluation(s, v, b) for s, b, v in ((0, "a", 0.2), (0, "b", 0.6), (0, "c", 1.0), (5, "a", 0.4))]
    both = run_curves({"config": config()}, rows, {}, benchmarks=["a", "b"])
    assert both.curve.accuracy.tolist() == [pytest.approx(0.4)]
    assert run_curves({"config": config()}, rows, {}, benchmarks=["a"]).curve.accuracy.tolist() == [0.2, 0.4]
    with pytest.raises(DataError, match="no evaluation of d; it has a, b, c"):
        run_curves({"config": config()}, rows, {}, benchmarks=["a", "d"])
    with pytest.raises(DataError, match=r"no step has maj@4 of a and b and c$"):
        run_curves({"config": config()}, rows, {}, metric="maj@4")


def test_bounds_of_an_average_add_in_quadrature_and_its_problems_weigh_as_their_benchmarks() -> None:
    rows = [
        {"step": 0, "benchmark": name, "scores": {"pass@1": mean, "pass@1/ci_low": mean - 0.3, "pass@1/ci_high": high},
         "per_problem": scores, "problem_ids": [str(number) for number in range(len(scores))]}
        for name, mean, high, scores in (("a", 0.5, 0.53, [0.25, 0.75]), ("b", 0.75, 0.79, [1.0, 1.0, 0.5, 0.5]))
    ]  # fmt: skip
    curve = run_curves({"config": config()}, rows, {}).curve
    # (0.5 + 0.75)/2; √(0.03² + 0.04²)/2 above and √(0.3² + 0.3²)/2 below.
    assert (curve.accuracy[0], curve.ci_high[0]) == (0.625, pytest.approx(0.65))
    assert curve.ci_low[0] == pytest.approx(0.625 - 0.3 / 2**0.5)
    # Six problems: those of a count 6/(2 · 2) = 1.5 times, those of b 6/(2 · 4) = 0.75 times.
    assert curve.per_problem.tolist() == [[0.375, 1.125, 0.75, 0.75, 0.375, 0.375]]
    assert curve.problem_ids == ("a/0", "a/1", "b/0", "b/1", "b/2", "b/3")
    for lacking in ({"per_problem": []}, {"problem_ids": ["0"]}, {"per_problem": [math.nan, 1.0]}):
        assert run_curves({"config": config()}, [rows[0] | lacking, rows[1]], {}).curve.per_problem is None


def test_scores_per_problem_are_kept_for_pass_at_1() -> None:
    scores = {"pass@1": 0.5, "pass@4": 0.75, "maj@4": 1.0}
    rows = [{"step": 0, "benchmark": "a", "scores": scores, "per_problem": [0.25, 0.75], "problem_ids": ["p", "q"]}]
    assert run_curves({"config": config()}, rows, {}).curve.per_problem.tolist() == [[0.25, 0.75]]
    for others in (["a", "b"], ["x", "y"]):
        later = rows[0] | {"step": 1, "problem_ids": others}
        assert run_curves({"config": config()}, [*rows, later], {}).curve.per_problem is None
    for metric in ("pass@4", "maj@4"):
        assert run_curves({"config": config()}, rows, {}, metric=metric).curve.per_problem is None


def test_an_identity_that_states_little_still_gives_a_run() -> None:
    run = run_curves({"config": config(), "code": None, "packages": None}, [evaluation(0, 0.5)], {})
    assert run.conditions["policy_sha256"] == "None"
    assert (run.gate.steps.size, run.gate.z.size, run.gate.threshold) == (0, 0, None)
    assert "rollout.max_num_seqs" in run.hardware
    assert not any(name.startswith(("learner.rule", "seed", "name")) for name in run.conditions)


def test_what_is_tuned_with_the_rate_is_no_condition() -> None:
    learner = config()["learner"]
    optimizer = {**learner["optimizer"], "schedule": "linear", "warmup_steps": 3}
    tuned = config() | {"learner": {**learner, "mini_batches": 4, "optimizer": optimizer}}
    plain, other = (run_curves({"config": one}, [evaluation(0, 0.5)], {}).conditions for one in (config(), tuned))
    assert plain == other
    clipped = config() | {"learner": {**learner, "optimizer": {**optimizer, "max_grad_norm": 2.0}}}
    conditions = run_curves({"config": clipped}, [evaluation(0, 0.5)], {}).conditions
    assert conditions.keys() - plain.keys() == {"learner.optimizer.max_grad_norm"}


@pytest.mark.parametrize(
    "row",
    [
        {"step": 1, "scores": {}},
        {"step": 1, "benchmark": "a", "scores": [0.5]},
        {"step": 1, "benchmark": "a", "scores": {"pass@1": "high"}},
        {"step": 1, "benchmark": "a", "scores": {}, "per_problem": ["x"]},
        {"step": 1, "benchmark": "a", "scores": {}, "per_problem": [[0.5]]},
        {"step": 1, "benchmark": "a", "scores": {}, "training_s": [1]},
        {"step": None, "benchmark": "a", "scores": {}},
        {"step": 1, "benchmark": "a", "scores": {"pass@1": 10**400}},
    ],
)
def test_a_row_that_is_no_evaluation_is_rejected(row: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="a row is not an evaluation"):
        decode_evaluation(row)


@pytest.mark.parametrize(
    ("learner", "source", "passes"),
    [
        ({}, "sampled", 0),
        ({"loss": {"kl_beta": 0}, "mini_batches": 1}, "sampled", 0),
        ({"loss": {"kl_beta": 0.5}}, "sampled", 1),
        ({"mini_batches": 2}, "sampled", 1),
        ({"loss": {"kl_beta": 2.0}, "mini_batches": 4}, "sampled", 2),
        ({"mini_batches": 1}, "teacher", 1),
        ({"mini_batches": 2}, "teacher", 2),
        ({"mini_batches": 4}, "dataset", 0),
    ],
)
def test_forward_passes_are_those_of_a_reference_policy_and_of_mini_batches(
    learner: Any, source: str, passes: int
) -> None:
    assert forward_passes({"learner": learner, "rollout": {"source": source}}) == passes
    assert forward_passes({"learner": learner}) == passes or source != "sampled", "a run older than other sources"


@pytest.mark.parametrize(("depth", "proximal", "passes"), [(1, "sampler", 0), (1, "learner", 1), (0, "sampler", 1)])
def test_stale_samples_with_old_logprobs_of_the_sampler_need_no_forward_pass(
    depth: int, proximal: str, passes: int
) -> None:
    learner = {"mini_batches": 2, "loss": {"proximal": proximal}}
    assert forward_passes({"learner": learner, "rollout": {"async_depth": depth}}) == passes


def test_numbers_of_a_row_are_decoded() -> None:
    scores = {"pass@1": "NaN"}
    row = {"step": "3", "benchmark": "a", "scores": scores, "per_problem": ["NaN", 0.5], "training_s": "Infinity"}
    decoded = decode_evaluation(row)
    assert (decoded["step"], decoded["training_s"], decoded["problem_ids"]) == (3, math.inf, [])
    assert math.isnan(decoded["scores"]["pass@1"])
    np.testing.assert_array_equal(decoded["per_problem"], [math.nan, 0.5])


def test_runs_are_grouped_by_config_apart_from_name_and_seed() -> None:
    made = [config(0, "a"), config(1, "b"), config(0, alpha=0.9), config(1, alpha=0.9)]
    runs = [(flat_run(0.5, one["seed"]), one) for one in made]
    assert config_key(made[0]) == config_key(made[1])
    assert config_key(made[0]) != config_key(made[2])
    # A run of a version that did not have a setting yet is one with the default.
    later = {**made[0], "learner": {**made[0].get("learner", {}), "sequence_parallel": 1}}
    assert config_key(later) == config_key(made[0])
    watched = {**made[0], "logging": {"trackers": ["tensorboard"]}, "timeouts": {"updating_s": 7200.0}}
    assert config_key(watched) == config_key(made[0])
    plain, logged = (run_curves({"config": one}, [evaluation(0, 0.2)], {}).conditions for one in (made[0], watched))
    assert plain == logged, "trackers and deadlines change no accuracy"
    limits = {"workers": 2, "memory_mb": 512}
    limited = {**made[0], "verifier": limits, "environment": {**limits, "host": True}}
    run = run_curves({"config": limited}, [evaluation(0, 0.2)], {})
    assert run.conditions == plain
    assert run.hardware["verifier.workers"] == "2", "it affects times"
    cut = run_curves({"config": {**made[0], "environment": {"deadline_s": 2.0}}}, [evaluation(0, 0.2)], {}).conditions
    assert cut != plain, "what it ends has another reward"
    groups = group_by_config(runs)
    assert [[run.seed for run in group.runs] for group in groups] == [[0, 1], [0, 1]]
    with pytest.raises(DataError, match="same config and seed 1"):
        group_by_config([*runs, (flat_run(0.5, 1), config(1, "again"))])
    assert [run.seed for run in group_by_config(runs[1::-1])[0].runs] == [1, 0]


def test_group_names_become_unique() -> None:
    def labels(*configs: dict[str, Any]) -> list[str]:
        flat = {str(number): flatten(one) for number, one in enumerate(configs)}
        return list(group_labels(dict.fromkeys(flat, "GXPO K=5"), flat).values())

    grid = [config(alpha=a, tau=t, window=w) for a in (0.1, 0.5) for t in (1, 2) for w in (30, 40)]
    names = labels(*grid)
    assert names[0] == "GXPO K=5 alpha=0.1 tau=1 window=30"
    assert len(set(names)) == 8
    two_suffice = [config(alpha=a, tau=t, window=w) for a, t, w in ((0.1, 1, 30), (0.5, 2, 40), (0.1, 2, 40))]
    assert labels(*two_suffice)[0] == "GXPO K=5 alpha=0.1 tau=1"
    assert labels(config(alpha=0.1), config(alpha=0.5)) == ["GXPO K=5 alpha=0.1", "GXPO K=5 alpha=0.5"]
    assert labels(config(rate=1e-5), config(rate=2e-5)) == ["GXPO K=5 lr 1e-05", "GXPO K=5 lr 2e-05"]
    batches = labels(*({"learner": {"mini_batches": number}} for number in (1, 4)))
    assert batches == ["GXPO K=5 mini_batches=1", "GXPO K=5 mini_batches=4"]
    # Tuned with the rate: in the name of other rules too.
    tuned = {key: {"learner.mini_batches": key, "learner.optimizer.schedule": f'"{key}"'} for key in ("1", "4")}
    names = group_labels({"1": "GRPO", "4": "GXPO K=5"}, tuned)
    assert names["4"] == 'GXPO K=5 mini_batches=4 optimizer.schedule="4"'
    # Settings of the rule come first, wherever the config has them.
    outside = [{"batch": batch, **config(tau=tau)} for batch, tau in ((1, 1), (2, 2), (1, 2))]
    assert labels(*outside) == ["GXPO K=5 tau=1 batch=1", "GXPO K=5 tau=2 batch=2", "GXPO K=5 tau=2 batch=1"]
    long = labels(config(text="x" * 99), config(text="x" * 99 + "y"))
    assert [name[-3:] for name in long] == [" #1", " #2"]
    assert max(map(len, long)) < 80
    # Up to 40 characters of JSON are shown, quotes included; more are cut to 39 and an ellipsis.
    short, cut = labels(config(text="x" * 38), config(text="y" * 39))
    assert short == f'GXPO K=5 text="{"x" * 38}"'
    assert cut == f'GXPO K=5 text="{"y" * 38}…'


def test_the_band_is_the_t_interval_over_seeds() -> None:
    group = SeedGroup("g", (flat_run(0.4, 0), flat_run(0.6, 1)))
    low, high = group.mean.ci_low, group.mean.ci_high
    # Mean .5, s = .1414, t(1) = 12.706: half-width 12.706 · .1414 / √2 = 1.27, more than there is.
    assert (low[0], high[0]) == (0.0, 1.0)
    three = SeedGroup("g", (flat_run(0.49, 0), flat_run(0.5, 1), flat_run(0.51, 2)))
    assert three.mean.ci_high[0] - 0.5 == pytest.approx(4.3027 * 0.01 / math.sqrt(3), abs=1e-5)
    # Of a single seed it is the interval over problems.
    single = replace(flat_run(0.4).curve, ci_low=np.array([0.3, 0.2]), ci_high=np.array([0.5, 0.6]))
    alone = SeedGroup("g", (replace(flat_run(0.4), curve=single),)).mean
    assert np.array_equal([alone.ci_low, alone.ci_high], [[0.3, 0.2], [0.5, 0.6]])


def test_each_seed_is_compared_with_the_baselines_run_of_that_seed() -> None:
    curves = {"GRPO": [(0.1, 0.3, 0.5), (0.1, 0.2, 0.4)], "GXPO": [(0.1, 0.5, 0.6), (0.1, 0.2, 0.3), (0.1, 0.2, 0.9)]}
    groups = [
        SeedGroup(name, tuple(by_steps(name, values, seed=seed) for seed, values in enumerate(runs)))
        for name, runs in curves.items()
    ]
    arrived, late, alone = compare_groups(groups, "GRPO").group("GXPO").by_seed
    assert (arrived.target.accuracy, arrived.match.steps, arrived.speed_ups["steps"]) == (0.5, 10, 2.0)  # type: ignore[union-attr]
    assert (late.target.accuracy, late.match, late.speed_ups["steps"]) == (0.4, None, None)  # type: ignore[union-attr]
    assert (alone.target, alone.match, alone.peak.accuracy) == (None, None, 0.9)


def test_a_group_that_starts_after_a_budget_leaves_its_cells_open_and_the_next_ones_filled() -> None:
    late = SeedGroup("late", (flat_run(0.4),))
    late.runs[0].curve.steps[0] = 7
    groups = [SeedGroup("GRPO", (flat_run(0.5),)), late, SeedGroup("GXPO", (flat_run(0.6),))]
    table = budget_table(compare_groups(groups, "GRPO", budgets={"steps": (5,)}))
    assert table.rows == (
        ("5 steps", "GRPO", "50.0%", *["–"] * 3),
        ("", "late", *["–"] * 4),
        ("", "GXPO", "60.0%", "+10.0", *["–"] * 2),
    )
    assert table.title == "Accuracy at equal budgets (points; 95% intervals of the difference)"
    in_time = budget_table(compare_groups(groups[::2], "GRPO", budgets={"hours": (1.0,)}))
    assert in_time.rows[0][0] == "1 h 0 min"


@pytest.mark.parametrize(
    ("share", "synchronous", "asynchronous"),
    # At s = u = 0.5: 2 · 1 / (0.5 + 1.5) and 2 · 0.5 / 1.5; at s = 0.75: 2 / (0.75 + 0.75) and 2 · 0.75 / 0.75.
    [(0.0, 2 / 3, 2 / 3), (0.5, 1.0, 2 / 3), (0.75, 4 / 3, 2.0), (0.9, 2 / 1.2, 2.0)],
)
def test_speed_up_at_a_share(share, synchronous, asynchronous) -> None:
    # Half of the steps with three passes each.
    assert time_speed_up(2.0, 2 / 3, share) == pytest.approx(synchronous)
    assert time_speed_up(2.0, 2 / 3, share, asynchronous=True) == pytest.approx(asynchronous)


def test_the_measured_share_is_the_time_of_sampling_and_verifying_over_that_of_all_steps() -> None:
    times = {"rollout": {1: 1.0, 2: 3.0}, "verify": {1: 0.5, 2: 0.5}, "step": {1: 4.0, 2: 6.0}}
    assert sampling_share(series(**{f"time__{name}_s": values for name, values in times.items()})) == 0.5
    assert sampling_share({}) is None


def test_a_payoff_by_hand() -> None:
    # Half of the steps with 6/2 = 3 times the passes.
    epochs, grpo = by_steps("Epochs", (0.2, 0.5), 6, sampling_share=0.1), by_steps("GRPO", (0.2, 0.3, 0.5), 2)
    groups = [SeedGroup("Epochs", (epochs,)), SeedGroup("GRPO", (replace(grpo, sampling_share=0.8),))]
    comparison = compare_groups(groups, "GRPO")
    payoff = payoff_of(comparison.group("Epochs"), 0.8)
    assert (payoff.mean, payoff.low) == (pytest.approx(2 / 1.4), None), "one seed has no interval"
    # The same the other way round.
    reverse = compare_groups(groups, "Epochs")
    both = (comparison.group("Epochs"), reverse.group("GRPO"))
    assert [*map(passes_per_step, both)] == pytest.approx([3, 1 / 3])
    # Nor has a group one of whose seeds does not get there.
    arriving = [SeedGroup(n, (by_steps(n, ends), by_steps(n, (0.2, 0.4), seed=1))) for n, ends in (("A", (0.2, 0.5)),)]
    fast = [SeedGroup("GRPO", tuple(by_steps("GRPO", (0.2, 0.3, 0.5), seed=seed) for seed in (0, 1)))]
    late = compare_groups([*arriving, *fast], "GRPO")
    assert late.group("A").seed_speed_ups["steps"].num == 1
    assert payoff_of(late.group("A"), 0.5) is None
    table = next(table for table in all_tables(groups, comparison) if "pays" in table.title)
    assert table.title == "When it pays: sampling takes 80% of a step of GRPO (measured)"
    # In time 2/(0.8 + 0.6), asynchronously 2 · 0.8/max(0.8, 0.6).
    assert table.rows == (("Epochs", "2.0× fewer", "1.4× less", "2.0× less", "3.00"),)


def warm_started(name: str, every: int, warm_steps: int) -> SeedGroup:
    """Evaluated before the warm start, at its end, and twice after it, each time after 30 passes more."""
    settings = config() | ({"warm_start": {"steps": warm_steps}} if warm_steps else {})
    values = {0: (0.1, 0), warm_steps: (0.2, 0), warm_steps + every: (0.4, 30), warm_steps + 2 * every: (0.6, 60)}
    rows = [evaluation(step, value, backward_passes_total=cost) for step, (value, cost) in values.items()]
    metrics = series(gate__z={warm_steps + 3: 0.7}, gate__shutoff_step={warm_steps + 3: warm_steps + 3})
    return SeedGroup(name, (run_curves({"config": settings}, rows, metrics),))


@pytest.mark.parametrize("warm_steps", [0, 50])
def test_steps_of_a_warm_start_are_no_cost(warm_steps: int) -> None:
    """0.6 after 60 steps of one pass, and after 20 steps of three."""
    groups = [warm_started("GRPO", 30, warm_steps), warm_started("GXPO", 10, warm_steps)]
    (run,) = groups[1].runs
    assert (run.curve.steps.tolist(), run.curve.accuracy[0]) == ([0, 10, 20], 0.2), "what comes before is no run yet"
    assert (run.gate.steps.tolist(), run.gate.shutoff_step) == ([3], 3)
    comparison = compare_groups(groups, "GRPO")
    gxpo = comparison.group("GXPO")
    assert (gxpo.seed_speed_ups["steps"].mean, passes_per_step(gxpo)) == (pytest.approx(3), pytest.approx(3))


def test_a_run_that_is_still_in_its_warm_start_is_not_compared() -> None:
    settings = config() | {"warm_start": {"steps": 50}}
    with pytest.raises(DataError, match="no step has pass@1"):
        run_curves({"config": settings}, [evaluation(0, 0.1)], {})


@pytest.mark.parametrize("passes", [(90, 90, 90), (90, 92, 88)])
def test_seeds_that_end_after_different_steps_have_a_payoff(passes: tuple[int, ...]) -> None:
    """Evaluated at start and end; the gate ends the look-ahead of each seed at another step. In the first case they
    share the passes of their ends, in the second the initial policy alone."""

    def ends(name: str, last: Sequence[int], accuracy: float) -> SeedGroup:
        runs = [by_steps(name, (0.3, accuracy), seed=seed, sampling_share=0.5) for seed in range(3)]
        for run, step, cost in zip(runs, last, passes, strict=True):
            run.curve.steps[1], run.curve.backward_passes[1] = step, cost
        return SeedGroup(name, tuple(runs))

    groups = [ends("GRPO", (90, 90, 90), 0.5), ends("GXPO", (40, 45, 50), 0.6)]
    comparison = compare_groups(groups, "GRPO")
    gxpo = comparison.group("GXPO")
    assert (gxpo.num_reached, gxpo.num_paired) == (3, 3)
    # 90/40, 90/45 and 90/50: geometric mean (2.25 · 2 · 1.8)^(1/3); 270 passes in 135 steps against 270.
    assert (gxpo.seed_speed_ups["steps"].mean, passes_per_step(gxpo)) == (pytest.approx(8.1 ** (1 / 3)), 2.0)
    # At half: 1/(0.5/2.25 + 0.5), 1/(0.5/2 + 0.5) and 1/(0.5/1.8 + 0.5), with the logs' s = 0.0371 and t(2) = 4.303.
    payoff = payoff_of(gxpo, 0.5)
    assert (payoff.mean, payoff.num) == (pytest.approx((18 / 13 * 4 / 3 * 9 / 7) ** (1 / 3)), 3)
    assert payoff.low == pytest.approx(payoff.mean * math.exp(-4.3027 * 0.0371 / 3**0.5), abs=1e-3)
    _, convergence, _, table = all_tables(groups, comparison)
    assert table.rows[0][-1] == "2.00"
    if passes == (90, 90, 90):
        assert convergence.rows[1][3] == "45 (2.0× fewer)"
    else:
        assert convergence.rows[1][3:6] == ("–", "–", "–"), "all share the initial policy alone"
    missing = ("evaluations after equal steps or passes in all seeds of GXPO",) if passes != (90, 90, 90) else ()
    assert weigh(comparison).missing == missing


def test_a_sweep_of_targets_by_hand() -> None:
    # Two passes a step: 0.8 after 20 passes, one hour; the baseline's 0.6 after 20 passes, two hours.
    group, baseline = SeedGroup("G", (by_steps("G", (0.2, 0.8), 2),)), SeedGroup("B", (by_steps("B", (0.2, 0.4, 0.6)),))
    for axis, first, between, costs in (
        ("backward_passes", 1.0, 15 / 10, (20, 15)),
        ("hours", None, 1.5 / 0.5, (None, 1.5)),
    ):
        (reach,) = sweep(group, baseline, [0.5], {"backward_passes": np.array([0.0, 20.0])}, axis)
        assert (reach.first and reach.first.mean) == first
        assert (reach.interpolated.mean, reach.costs) == (pytest.approx(between), pytest.approx(costs))


@pytest.mark.parametrize(
    ("axis", "first", "between", "cell"),
    [
        ("backward_passes", (1.7, 1.6, 1.9), (1.5, 1.4, 1.6), "1.70 [1.60, 1.90]; 1.50 [1.40, 1.60]"),
        ("backward_passes", None, (1.5, None, None), "–; 1.50"),
        ("steps", (2.0, 2.0, 2.0), None, "2.00; –"),
        ("hours", None, (3.0, 2.5, 3.5), "3.00 [2.50, 3.50]"),
        ("steps", None, None, "–"),
    ],
)
def test_a_reach_in_words(axis: Any, first: Any, between: Any, cell: str) -> None:
    intervals = [values and Interval(*values, 5) for values in (first, between)]
    assert reach_cell(Reach(axis, 0.8, *intervals, 0.01, (None, None))) == cell


def test_a_table_in_markdown() -> None:
    made = markdown(Table("T", ("run", "x"), (("a", "1"), ("b|c", "2"))))
    assert made == "*T*\n\n| run | x |\n|---|---|\n| a | 1 |\n| b\\|c | 2 |"


def test_the_best_plateau_is_the_highest_mean_of_a_group_whose_seeds_all_have_one() -> None:
    # Of 20 passes the last 40% are from 12 on: the evaluation at 20.
    groups = [
        SeedGroup("a", (by_steps("a", (0.1, 0.2, 0.5), seed=0), by_steps("a", (0.1, 0.2, 0.7), seed=1))),
        SeedGroup("b", (by_steps("b", (0.1, 0.9, 0.4)),)),
        SeedGroup("short", (by_steps("short", (0.1, 0.95)),)),
    ]
    assert best_plateau(groups, 20) == pytest.approx(0.6)
    assert math.isnan(best_plateau(groups[2:], 20))


def test_tables_of_a_comparison_by_hand() -> None:
    at_a, at_b = ({"conditions": {"data": word}, "hardware": {"cpu": word.upper()}} for word in "ab")
    slow = [by_steps("Slow", (0.2, 0.3, 0.4), 3, seed=seed, shutoff=12 - 5 * seed, **at_b) for seed in (0, 1)]
    groups = [SeedGroup("GRPO", (by_steps("GRPO", (0.2, 0.4, 0.5), **at_a),)), SeedGroup("Slow", tuple(slow))]
    ranking, convergence, budgets, payoff, differences = all_tables(
        groups, compare_groups(groups, "GRPO", budgets={"steps": (10, 30)}), 0.8
    )
    # Within GRPO's 20 passes Slow was evaluated before its first step alone.
    assert ranking.rows == (("1. GRPO", "1", "50.0%", "–", "20 (1.00×)"), ("Slow", "2", "–", "–", "not reached"))
    assert convergence.title == "To match the best of GRPO: 50.0% at step 20; ratios at common evaluations"
    assert convergence.rows == (
        ("GRPO", "50.0%", "20", "20 (1.00×)", "20 (1.00×)", "2 h 0 min (1.00×)", "–"),
        ("Slow", "40.0%", "20", *["not reached"] * 3, "–"),
    )
    # The seed that both have: 0.3 − 0.4 and 0.4 − 0.5.
    assert budgets.rows == (
        ("10 steps", "GRPO", "40.0%", "–", "–", "–"), ("", "Slow", "30.0%", "−10.0", "–", "–"),
        ("30 steps", "GRPO", "50.0% (ended before)", "–", "–", "–"),
        ("", "Slow", "40.0% (ended before)", "−10.0", "–", "–"),
    )  # fmt: skip
    assert payoff.title == "When it pays: sampling takes 80% of a step of GRPO (as given)"
    assert payoff.rows == (("Slow", "0 of 1 seeds reach the peak", *["–"] * 3),)
    assert differences.header == ("setting", "GRPO", "Slow")
    assert differences.rows == (("data", "a", "b"), ("cpu (hardware)", "A", "B"))
    unmeasured = all_tables(groups, compare_groups(groups, "GRPO"))
    assert not any("pays" in table.title for table in unmeasured), "no share is measured"
    assert len(all_tables(groups[:1], compare_groups(groups[:1], "GRPO"), 0.8)) == 3, "nothing to pay against"


def test_configurations_are_ranked_at_the_most_passes_that_all_reached() -> None:
    def group(name: str, passes: int, *ends: Sequence[float]) -> SeedGroup:
        return SeedGroup(name, tuple(by_steps(name, (0.2, *end), passes, seed=seed) for seed, end in enumerate(ends)))

    # GRPO goes to 20 passes, SFPO on to 40: 20 count.
    groups = [
        group("GRPO", 1, (0.3, 0.5), (0.4, 0.5)),
        group("SFPO", 2, (0.6, 0.1), (0.8, 0.1)),
        group("Other", 2, (0.5, 0)),
    ]
    table = ranking_table(compare_groups(groups, "GRPO"))
    assert table.title == ("Ranking at 20 backward passes, the most that all runs reached (95% intervals over seeds)")
    # 10 and 30 points: mean 20, ± 12.706·√200/√2 = 127.1; one seed has no interval.
    assert table.rows == (
        ("1. SFPO", "2", "70.0% (0.0% to 100.0%)", "+20.0 (−107.1 to +147.1)", "20 (1.00×)"),
        ("2. GRPO", "2", "50.0% (50.0% to 50.0%)", "–", "20 (1.00×)"),
        ("3. Other", "1", "50.0%", "+0.0", "20 (1.00×)"),
    )
