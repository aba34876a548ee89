"""From a base, a grid and seeds to configs: which runs, what they are called, what they cost, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from gxpo_services.api.errors import Invalid
from gxpo_services.settings import ServiceSettings
from gxpo_services.sweeps.grid import Planned, SweepRequest, _shape_errors, plan
from gxpo_services.sweeps.groups import validate_sweep
from gxpo_trainer.config.io import load_preset

SERVER = ServiceSettings()


def sweep(base: dict[str, Any] | None = None, **members: Any) -> list[Planned]:
    return plan(SweepRequest.model_validate({"name": "s", "base": base or {"preset": "demo"}, **members}), SERVER)


def errors_of(**members: Any) -> dict[str, str]:
    with pytest.raises(Invalid) as caught:
        sweep(**members)
    found = [(error.field, error.message) for error in caught.value.errors]
    assert len(set(found)) == len(found)
    return dict(found)


def test_the_grid_times_the_seeds_with_the_seeds_innermost() -> None:
    runs = sweep(grid={"learner.rule.k": [3, 10], "learner.rule.alpha": [0.1, 1.0]}, seeds=[0, 7])
    assert [tuple(run.values.values()) for run in runs] == [
        *((3, 0.1, 0), (3, 0.1, 7), (3, 1.0, 0), (3, 1.0, 7)),
        *((10, 0.1, 0), (10, 0.1, 7), (10, 1.0, 0), (10, 1.0, 7)),
    ]
    first = runs[0].config
    assert (first.learner.rule.k, first.learner.rule.alpha, first.seed) == (3, 0.1, 0)
    assert first.name == "s k=3 alpha=0.1 seed=0"
    assert first.rollout == load_preset("demo").rollout
    (run,) = sweep({"preset": "demo", "overrides": ["seed=5"]})
    assert run.config == load_preset("demo", ["seed=5"]).model_copy(update={"name": "s seed=5"})
    assert run.values == {"seed": 5}


@pytest.mark.parametrize("name", ["demo", "paper-3b", "paper-1.5b", "paper-7b-lora", "paper-llama-3b"])
def test_the_rules_of_a_preset_are_its_sibling_presets_and_its_control(name: str) -> None:
    """At the rate of the preset that is swept: those of the demo have one of their own for each rule."""
    runs = sweep({"preset": name}, preset="rules", seeds=[0])
    made = {run.config.sha256() for run in runs}
    siblings = [f"{name}-grpo", f"{name}-sfpo", name, f"{name}-grpo-lr-control"]
    rate, control = (load_preset(sibling).learner.optimizer.learning_rate for sibling in siblings[2:])
    assert [run.config.learner.optimizer.learning_rate for run in runs] == pytest.approx(
        [rate, rate, rate, control], rel=1e-12
    )
    for sibling in siblings[:3]:
        assert load_preset(sibling, [f"learner.optimizer.learning_rate={rate!r}"]).sha256() in made, sibling


def test_the_control_is_grpo_at_the_longer_step_once_a_product_of_alpha_and_k() -> None:
    grid = {"learner.rule.k": [5, 10], "learner.rule.alpha": [0.5, 1.0]}
    runs = sweep({"config": {"learner": {"optimizer": {"learning_rate": 1e-5}}}}, grid=grid, control=True, seeds=[0, 1])
    controls = [run for run in runs if run.config.learner.rule.name == "grpo"]
    # αK + 1: 3.5, 6, 6, 11
    rates = sorted({run.config.learner.optimizer.learning_rate for run in controls})
    assert rates == pytest.approx([3.5e-5, 6e-5, 11e-5], rel=1e-12)
    assert (len(runs), len(controls)) == (8 + 6, 6)
    assert controls[0].values.keys() == {"learner.rule.name", "learner.optimizer.learning_rate", "seed"}


def test_a_control_has_the_settings_of_the_sweep_that_are_not_of_the_rule() -> None:
    grid = {"rollout.samples_per_prompt": [4, 8], "learner.rule.alpha": [0.5]}
    runs = sweep({"config": {"learner": {"optimizer": {"learning_rate": 1e-5}}}}, grid=grid, control=True)
    # αK + 1 = 3.5
    rule = {"learner.rule.name": "grpo", "learner.optimizer.learning_rate": pytest.approx(3.5e-5, rel=1e-12)}
    assert [run.values for run in runs[2:]] == [
        {"rollout.samples_per_prompt": samples, **rule, "seed": 0} for samples in (4, 8)
    ]
    assert [run.config.rollout.samples_per_prompt for run in runs[2:]] == [4, 8]
    assert len({run.config.name for run in runs}) == 4


def test_the_rules_of_a_grid_have_each_config_once_with_the_settings_of_their_rule() -> None:
    runs = sweep(preset="rules", grid={"learner.rule.k": [3, 5]})
    # K = 3 with GRPO, SFPO and GXPO, K = 5 with the latter two, and two controls.
    assert [(run.config.learner.rule.name, run.values.get("learner.rule.k")) for run in runs] == [
        *(("grpo", None), ("sfpo", 3), ("gxpo", 3), ("sfpo", 5), ("gxpo", 5), ("grpo", None), ("grpo", None))
    ]
    assert "contains a duplicate" in errors_of(preset="rules", grid={"name": ["a", "b"]})["grid"]


def test_a_grid_may_hold_whole_rules_words_lists_and_nothing() -> None:
    grid = {"learner.rule.name": ["grpo", "sfpo"], "data.levels": [[3, 4], None], "data.split": ["a\n'\"b"]}
    runs = sweep(grid=grid)
    assert [(run.config.learner.rule.name, run.config.data.levels) for run in runs] == [
        *(("grpo", (3, 4)), ("grpo", None), ("sfpo", (3, 4)), ("sfpo", None))
    ]
    assert runs[0].config.data.split == "a\n'\"b"
    (run,) = sweep(grid={"environment.name": ["single_turn"], "learner.rule.gate.threshold": [0.7]})
    assert run.config.name == "s environment=single_turn gate.threshold=0.7 seed=0"


@pytest.mark.parametrize(
    ("preset", "values"),
    [
        ("alpha", [(k, alpha) for k in (3, 5, 10) for alpha in (0.1, 0.5, 1.0)]),
        ("k", [(3,), (5,), (10,)]),
        ("tau", [(5, 0.7), (5, 1.0), (5, 1.5), (5, 2.0)]),
    ],
)
def test_the_preset_grids_are_those_of_the_paper(preset: str, values: list[tuple[float, ...]]) -> None:
    assert [tuple(run.values.values())[:-1] for run in sweep(preset=preset)] == values


def test_every_bad_axis_and_setting_is_named_once() -> None:
    assert errors_of(grid={"learner.rule.kk": [1], "seed": [1], "learner.rule.k": [3, 3]}, seeds=[1, 1]).keys() == {
        "grid.seed",
        "grid.learner.rule.k",
        "seeds",
    }
    errors = errors_of(grid={"learner.rule.kk": [1, 2], "learner.rule.alpha": [0.5, 7]}, seeds=[0, 1])
    assert errors.keys() == {"grid.learner.rule.kk"}
    assert "did you mean learner.rule.k" in errors["grid.learner.rule.kk"]
    errors = errors_of(grid={"learner.rule.alpha": [0.5, 7], "placement.ray_address": ["x"]}, seeds=[0, 1])
    assert errors.keys() == {"grid.learner.rule.alpha", "grid.placement.ray_address"}
    assert errors_of(base={"preset": "nope"}).keys() == {"base.preset"}
    assert errors_of(base={"preset": "demo", "overrides": ["x"]}).keys() == {"base.overrides[0]"}
    assert "contains a duplicate" in errors_of(grid={"name": ["a", "b"]})["grid"]
    assert errors_of(grid={"x" * 200: [1]}).keys() == {f"grid.{'x' * 200}"}
    for path in ("", "x" * 201):
        with pytest.raises(ValidationError):
            sweep(grid={path: [1]})
    assert errors_of(base={"preset": "demo-grpo"}, preset="rules").keys() == {"config.learner.rule.name"}


def test_a_sweep_has_at_most_500_runs_control_included() -> None:
    errors = errors_of(grid={"learner.rule.alpha": [n / 100 for n in range(30)]}, seeds=list(range(10)), control=True)
    assert "makes 600 runs" in errors["grid"]
    # Refused before it is expanded, with everything else that is wrong.
    errors = errors_of(grid={f"data.a{n}": list(range(100)) for n in range(6)} | {"seed": [1]})
    assert errors["grid"].startswith(f"makes {100**6} runs")
    assert "grid.seed" in errors
    request = SweepRequest.model_validate({"name": "s", "base": {"preset": "demo"}})
    for seeds, sizes, message in (
        (5, (50, 2), ""),
        (6, (50, 2), "makes 600 runs including seeds; a sweep has at most 500"),
        (0, (25, 20), ""),
        (0, (167, 3), "makes 501 runs including seeds; a sweep has at most 500"),
    ):
        grid = {str(size): list(range(size)) for size in sizes}
        sized = request.model_copy(update={"seeds": list(range(seeds))})
        assert "".join(error.message for error in _shape_errors(sized, grid)) == message


def test_the_cost_comes_first_in_runs_and_passes() -> None:
    of_rules: dict[str, Any] = {"base": {"preset": "demo"}, "preset": "rules", "seeds": [0, 1]}
    unknown: dict[str, Any] = {"base": {"config": {"budget": {"hours": 1}}}}
    # 40 steps: GRPO 1, SFPO K=5 6, GXPO 3, control 1 pass a step, two seeds each.
    for body, costs, labels in (
        (of_rules, (8, 320, 2 * 40 * (1 + 6 + 3 + 1)), ["GRPO", "SFPO K=5", "GXPO K=5", "GRPO"]),
        (unknown, (1, None, None), ["GXPO K=5"]),
    ):
        planned = validate_sweep(SweepRequest.model_validate({"name": "s"} | body), None, SERVER)
        assert planned.cost is not None
        assert (planned.cost.runs, planned.cost.steps, planned.cost.backward_passes) == costs
        assert [run.rule_label for run in planned.runs[::2]] == labels
