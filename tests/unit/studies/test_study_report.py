"""A study's data and report on invented runs with figures known by hand; docs/evidence.md is the shipped data's."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gxpo_trainer.compare.curves import EvaluationCurve, RunCurves
from gxpo_trainer.errors import DataError
from gxpo_trainer.studies import data as study_data
from gxpo_trainer.studies.data import MEDIANS, StudyData
from gxpo_trainer.studies.definition import Extrapolation, RunKey, Study, load_study, run_config
from gxpo_trainer.studies.findings import find
from gxpo_trainer.studies.report import as_markdown, compose, write_report

STUDY = Study.model_validate(
    {
        "name": "small",
        "title": "Small <study>",
        "baseline": "grpo",
        "seeds": [0, 1, 2],
        "backward_passes": 6,
        "evaluate_every": 3,
        "ladder": {"learning_rates": [1e-5, 2e-5], "seeds": [7], "backward_passes": 3},
        "arms": {"grpo": {"label": "GRPO"}, "gxpo": {"label": "GXPO"}, "late": {"label": "Late"}},
    }
)
# Accuracy by seed at 3 and 6 passes. GRPO peaks at its last step, 6; GXPO reaches that at its step 2 or 1.
GRPO = {0: (0.40, 0.50), 1: (0.42, 0.52), 2: (0.38, 0.54)}
GXPO = {0: (0.45, 0.60), 1: (0.55, 0.60), 2: (0.50, 0.59)}


def curve(per_step: int, accuracies: tuple[float, float], seed: int) -> EvaluationCurve:
    passes = np.array([0.0, 3.0, 6.0])
    values = np.array([0.3, *accuracies])
    # Four problems; the last carries the fraction, so that means are the accuracies.
    problems = np.stack([np.array([value, value, value, value]) for value in values])
    return EvaluationCurve(
        steps=passes / per_step,
        backward_passes=passes,
        hours=passes / 3600,
        tokens=passes * 100,
        accuracy=values,
        ci_low=values - 0.1,
        ci_high=values + 0.1,
        per_problem=problems,
        problem_ids=tuple(f"p{seed}/{number}" for number in range(4)),
    )


def invented(arms: tuple[str, ...] = ("grpo", "gxpo"), **study: object) -> StudyData:
    """study: changed fields of STUDY."""
    curves, rows = {}, []
    for arm, per_step, table in (("grpo", 1, GRPO), ("gxpo", 3, GXPO)):
        if arm not in arms:
            continue
        runs = [("ladder", 1e-5, 7, (0.3, 0.35)), ("ladder", 2e-5, 7, (0.3, 0.45))]
        runs += [("report", 2e-5, seed, values) for seed, values in table.items()]
        for stage, rate, seed, values in runs:
            key = RunKey(stage, arm, rate, seed)
            curves[key] = RunCurves(key.folder, arm.upper(), seed, curve(per_step, values, seed))
            row = {"stage": stage, "arm": arm, "learning_rate": rate, "seed": seed, "accuracy": values[1]}
            row |= {"diverged": False, "peak": max(values), "steps": 6 // per_step, "backward_passes": 6.0}
            row |= {"training_s": 6.0, "rollout_s": 2.0, "verify_s": 1.0, "update_s": 3.0, "sync_s": 0.0}
            row |= {"diagnostic_passes": 0.0, "tokens": 600.0} | dict.fromkeys(MEDIANS)
            if arm == "gxpo":
                row["gxpo/retention_mean"] = 0.5 + seed / 100
            rows.append(row)
    return StudyData(STUDY.model_copy(update=study), {"packages": {"torch": "2"}, "unequal": []}, rows, curves)


def test_findings_by_hand() -> None:
    findings = find(invented())
    assert findings.missing == ("Late",)
    # (2 + 1)/6 of a GRPO step is sampling and verifying.
    assert findings.sampling_share == pytest.approx(0.5)
    (gxpo,) = findings.candidates
    # Differences at 6 passes: 0.10, 0.08, 0.05.
    (end,) = gxpo.passes
    assert end.cost == 6
    assert end.difference.mean == pytest.approx(0.23 / 3)
    # t = mean / (s/√3), s = 0.02517: 5.277; p of two sides with 2 degrees = 0.0341.
    assert end.p_value == pytest.approx(0.0341, abs=2e-4)
    assert end.adjusted == end.p_value
    # Common steps: GRPO has 0, 3, 6 and GXPO 0, 1, 2, so there is none above 0.
    assert gxpo.steps == ()
    # Seeds reach GRPO's peak at step 2, 1, 2 instead of 6: ratios 3, 6, 3.
    (peak,) = gxpo.matches
    assert (peak.accuracy, peak.reached) == (None, 3)
    assert peak.steps.mean == pytest.approx(54 ** (1 / 3))
    assert gxpo.payoff.passes == 3.0
    assert gxpo.medians["gxpo/retention_mean"] == pytest.approx(0.51)
    assert gxpo.ladder == ((1e-5, 0.35, False), (2e-5, 0.45, False))
    assert gxpo.at_end_of_ladder


def test_arms_are_compared_at_the_requested_costs_too_and_corrected_together() -> None:
    data = invented(compare_at=(3,))
    (gxpo,) = find(data).candidates
    half, end = gxpo.passes
    # Differences at 3 passes: 0.05, 0.13, 0.12: mean 0.1, s = 0.04359, t = 3.974, p = 0.0579. Holm: the smaller p
    # counts twice, and the larger at least as much.
    assert (half.cost, end.cost) == (3, 6)
    assert half.difference.mean == pytest.approx(0.1)
    assert half.p_value == pytest.approx(0.0579, abs=2e-4)
    assert end.adjusted == pytest.approx(2 * end.p_value)
    assert half.adjusted == pytest.approx(max(half.p_value, 2 * end.p_value))


def test_arms_are_timed_to_the_target_between_evaluations() -> None:
    data = invented(target=0.45)
    (gxpo,) = find(data).candidates
    target = gxpo.matches[1]
    # Steps of GRPO: 3 + 3·5/10, 3 + 3·3/10, 3 + 3·7/16; of GXPO: 1, 0.15/0.25 and 0.15/0.2.
    ratios = (4.5 / 1, 3.9 / 0.6, 4.3125 / 0.75)
    assert (target.accuracy, target.reached) == (0.45, 3)
    assert target.steps.mean == pytest.approx(math.prod(ratios) ** (1 / 3))
    assert target.passes.mean == pytest.approx(target.steps.mean / 3)
    assert gxpo.payoff.steps == target.steps
    # A seed that stays below leaves no payoff, whatever the peak says.
    data = invented(target=0.595)
    (gxpo,) = find(data).candidates
    assert (gxpo.matches[0].reached, gxpo.matches[1].reached, gxpo.payoff) == (3, 0, None)
    assert "has no speed-up stated: 0 of 3 seeds reached 59.5%" in as_markdown(compose(data))


def test_an_arm_that_needs_more_steps_and_more_passes_never_pays() -> None:
    data = invented(target=0.45)
    slow = {
        key: replace(run, curve=replace(run.curve, steps=10 * run.curve.steps)) if key.arm == "gxpo" else run
        for key, run in data.curves.items()
    }
    data = replace(data, curves=slow)
    page = as_markdown(compose(data))
    # Ratios 0.45, 0.65 and 0.575 with three passes a step: the break-even is above (3 - 1)/2 = 100%.
    assert "1.8× more steps to 45% (1.1 to 2.9) and saves time at no share of sampling" in page
    assert re.search(r"^\| GXPO \| 5\.4× more .*\| never \|$", page, re.MULTILINE)


def test_extrapolated_weights_are_held_against_both_ends() -> None:
    data = invented(extrapolation=Extrapolation(arm="grpo", step=3, factor=2.0))
    for seed, accuracy in ((0, 0.45), (1, 0.50), (2, 0.49)):
        row = {"stage": "extrapolation", "arm": "grpo", "learning_rate": 2e-5, "seed": seed}
        assert find(data).extrapolated is None
        data.runs.append({**row, "accuracy": accuracy, "diverged": False})
    extrapolated = find(data).extrapolated
    # GRPO has 0.40, 0.42, 0.38 at step 3 and 0.50, 0.52, 0.54 at step 6.
    assert (extrapolated.label, extrapolated.step, extrapolated.target) == ("GRPO", 3, 6)
    assert extrapolated.extrapolated.mean == pytest.approx(0.48)
    assert extrapolated.gained.mean == pytest.approx(0.08)
    assert extrapolated.missed.mean == pytest.approx(-0.04)
    assert "| GRPO | 40.0% [35.0, 45.0] | 48.0% [41.4, 54.6] |" in as_markdown(compose(data))


def test_a_seed_that_misses_the_peak_leaves_no_payoff() -> None:
    data = invented()
    key = RunKey("report", "gxpo", 2e-5, 1)
    data.curves[key] = RunCurves(key.folder, "GXPO", 1, curve(3, (0.4, 0.51), 1))
    (gxpo,) = find(data).candidates
    assert (gxpo.matches[0].reached, gxpo.payoff) == (2, None)
    assert "has no speed-up stated: 2 of 3 seeds reached the baseline's peak" in as_markdown(compose(data))


def test_collapse_and_divergence_are_outcomes() -> None:
    data = invented()
    row = data.reported("gxpo")[0]
    row |= {"peak": 0.9, "accuracy": 0.44, "diverged": True}
    (gxpo,) = find(data).candidates
    assert (gxpo.collapsed, gxpo.diverged) == (1, 1)
    assert "GXPO collapsed in 1 and diverged in 1 of 3 runs" in as_markdown(compose(data))


def test_the_page_claims_what_the_corrected_test_carries() -> None:
    text = as_markdown(compose(invented()))
    assert "\n- At 6 backward passes: higher: GXPO +7.7 points [+1.4, +13.9].\n" in text
    assert "\n- GXPO needs 3.8× fewer steps to the baseline's peak (" in text
    weaker = invented()
    key = RunKey("report", "gxpo", 2e-5, 2)
    weaker.curves[key] = RunCurves(key.folder, "GXPO", 2, curve(3, (0.5, 0.5), 2))
    assert re.search(
        r"At 6 backward passes: no difference shown after Holm's correction: GXPO \+\d.*\]\.",
        as_markdown(compose(weaker)),
    )
    assert "Not complete yet, and so not compared: Late." in text
    assert "The best rate is the highest that was tried" in text


def test_before_the_baseline_is_complete_there_is_no_result() -> None:
    text = as_markdown(compose(invented(("gxpo",))))
    assert "Incomplete: 5 runs are done" in text
    assert "points" not in text


def test_data_survives_the_files_to_the_bit(tmp_path) -> None:
    data = invented()
    study_data.write(data, tmp_path)
    again = study_data.read(tmp_path)
    assert again.study == data.study
    assert as_markdown(compose(again)) == as_markdown(compose(data))
    assert again.results == data.results


def test_the_report_has_its_pictures_and_escapes_text(tmp_path) -> None:
    write_report(invented(), tmp_path / "evidence.md", tmp_path / "evidence.html")
    text = (tmp_path / "evidence.md").read_text()
    pictures = re.findall(r"\]\((images/.*?)\)", text)
    assert len(pictures) == 3
    for picture in pictures:
        assert Image.open(tmp_path / picture).width >= 900
    page = (tmp_path / "evidence.html").read_text()
    assert "Small &lt;study&gt;" in page
    assert "<study>" not in page
    assert "<ul><li>After 6 backward passes GRPO, " in page


def test_a_folder_without_data_is_an_error(tmp_path) -> None:
    with pytest.raises(DataError, match="has no data of a study"):
        study_data.read(tmp_path)


ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "evidence.md"


@pytest.fixture(scope="module")
def data() -> study_data.StudyData:
    return study_data.read(ROOT / "studies" / "reference")


def test_the_page_is_what_the_report_command_writes_from_the_data(data: study_data.StudyData) -> None:
    assert PAGE.read_text(encoding="utf-8") == as_markdown(compose(data))
    pictures = re.findall(r"\]\((images/[^)]*)\)", PAGE.read_text(encoding="utf-8"))
    assert pictures
    assert all((PAGE.parent / picture).is_file() for picture in pictures)


def test_the_readme_quotes_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    quoted = re.findall(r"^> (- .*)$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(quoted) >= 2
    assert [line for line in quoted if line not in page.splitlines()] == []


@pytest.mark.parametrize("name", ["reference", "asynchronous-grpo", "asynchronous-gxpo"])
def test_the_data_is_of_the_study_that_is_in_the_repository(name: str) -> None:
    assert study_data.read(ROOT / "studies" / name).study == load_study(ROOT / "studies" / f"{name}.toml")


def test_every_run_of_a_reported_arm_is_there_and_its_accuracy_is_the_mean_over_problems(
    data: study_data.StudyData,
) -> None:
    baseline = data.reported(data.study.baseline)
    assert [row["seed"] for row in baseline] == list(data.study.seeds)
    for row in data.runs:
        if row["stage"] != "extrapolation":
            rule = run_config(data.study, study_data.key_of(row)).learner.rule
            assert row["backward_passes"] == row["steps"] * rule.passes_per_step(gate_open=True)
    for key, run in data.curves.items():
        for accuracy, scores in zip(run.curve.accuracy, run.curve.per_problem, strict=True):
            assert accuracy == pytest.approx(scores.mean()), key.folder
