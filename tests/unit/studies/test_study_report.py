"""A study's data and report on invented runs with figures known by hand; docs/evidence.md is the shipped data's."""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gxpo_trainer.compare.curves import EvaluationCurve, RunCurves
from gxpo_trainer.studies import data as study_data
from gxpo_trainer.studies.data import MEDIANS, StudyData
from gxpo_trainer.studies.definition import Analysis, Point, RunKey, Search, Study, load_study
from gxpo_trainer.studies.findings import find
from gxpo_trainer.studies.report import compose, render_pictures, write_report

STUDY = Study.model_validate(
    {
        "name": "small",
        "title": "Small",
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
    (gxpo,) = findings.candidates
    # The plateau, from 3.6 passes on, is the evaluation at 6. Differences: 0.10, 0.08, 0.05.
    assert gxpo.against.difference.mean == pytest.approx(0.23 / 3)
    # t = mean / (s/√3), s = 0.02517: 5.277; p of two sides with 2 degrees = 0.0341.
    assert gxpo.against.p_value == gxpo.against.adjusted == pytest.approx(0.0341, abs=2e-4)
    # Problems have other names in each seed, but the same in both runs of one.
    assert (gxpo.against.verdict, gxpo.against.over_problems) == ("higher", None)
    assert gxpo.against.own == gxpo.plateau == gxpo.final
    # Common steps: GRPO has 0, 3, 6 and GXPO 0, 1, 2, so there is none above 0. Of 600 token-passes, two thirds of the
    # first evaluation's 900 for GXPO: 0.4, 0.4667 and 0.4333 against 0.50, 0.52, 0.54.
    assert list(gxpo.equal) == [("backward_passes", 6), ("token_passes", 600)]
    assert gxpo.equal["token_passes", 600].difference.mean == pytest.approx(-0.26 / 3)
    assert gxpo.medians["gxpo/retention_mean"] == pytest.approx(0.51)
    assert gxpo.tuning == ((Point(1e-5), 0.35, 1, False), (Point(2e-5), 0.45, 1, False))
    assert (gxpo.at_end, gxpo.tuning_runs) == (True, 2)


def test_a_search_is_reported_with_its_space_and_the_points_that_went_furthest() -> None:
    space = {"learner.optimizer.learning_rate": [1e-5, 2e-5], "learner.mini_batches": [1, 4]}
    search = {"settings": space, "runs": 3, "seeds": [7, 8], "backward_passes": 3}
    data = invented(ladder=None, search=Search.model_validate(search))
    for row in data.runs:
        if row["stage"] == "ladder":
            row["settings"] = "learner.mini_batches=4" if row["learning_rate"] == 2e-5 else "learner.mini_batches=1"
    # The better of the two had the second seed too.
    best = [row for row in data.runs if row.get("settings") == "learner.mini_batches=4"]
    data.runs.extend([row | {"seed": 8, "accuracy": 0.25} for row in best])
    text = compose(data)
    space = "at most 3 runs for each arm: 2 → 1 points, a seed more each time. Space: learner.optimizer.learning_rate"
    assert space in text
    rows = ("| GRPO | 3 | 2e-05, mini_batches=4 | 2 | 35.0 |", "| GRPO | 3 | 1e-05, mini_batches=1 | 1 | 35.0 |")
    assert "\n".join(rows) in text.split("## Tuning")[1]
    assert "upwards until" not in text
    # Two panels side by side, of 4.2 × 3.6 inches each.
    assert Image.open(io.BytesIO(render_pictures(data)["small-ladder.png"])).size == (2 * 525, 450)


def test_only_the_named_comparisons_are_tested() -> None:
    data = invented(("grpo", "gxpo"), analysis=Analysis(comparisons=("late",)))
    (gxpo,) = find(data).candidates
    assert (gxpo.against.adjusted, gxpo.against.equivalence) == (None, None)
    text = compose(data)
    assert re.search(r"^\| GXPO \|.*\| not tested \|$", text, re.MULTILINE)
    assert "Plateaus against" not in text.split("## Question")[0]


def test_collapse_and_divergence_are_outcomes() -> None:
    data = invented()
    row = data.reported("gxpo")[0]
    row |= {"peak": 0.9, "accuracy": 0.44, "diverged": True}
    (gxpo,) = find(data).candidates
    assert (gxpo.collapsed, gxpo.diverged) == (1, 1)
    assert "GXPO collapsed in 1 and diverged in 1 of 3 runs" in compose(data)


def test_the_page_claims_what_the_corrected_test_carries() -> None:
    text = compose(invented())
    assert "\n- Plateaus against GRPO, in points, with a margin of 1 point: higher: GXPO +7.7 [+1.4, +13.9].\n" in text
    weaker = invented()
    key = RunKey("report", "gxpo", 2e-5, 2)
    weaker.curves[key] = RunCurves(key.folder, "GXPO", 2, curve(3, (0.5, 0.5), 2))
    assert re.search(r"none is shown to be higher; not shown equivalent: GXPO \+\d.*\]\.", compose(weaker))
    assert "Not complete yet, and so not compared: Late." in text
    assert "The best rate is the highest that was tried" in text


def test_before_the_baseline_is_complete_there_is_no_result() -> None:
    text = compose(invented(("gxpo",)))
    assert "Incomplete: 5 runs are done" in text
    assert "points" not in text


def test_data_survives_the_files_to_the_bit_and_the_report_has_its_pictures(tmp_path) -> None:
    data = invented()
    study_data.write(data, tmp_path)
    again = study_data.read(tmp_path)
    assert again.study == data.study
    write_report(again, tmp_path / "evidence.md")
    assert (tmp_path / "evidence.md").read_text() == compose(data)
    pictures = re.findall(r"\]\((images/.*?)\)", compose(data))
    assert len(pictures) == 2
    assert all(Image.open(tmp_path / picture).width >= 900 for picture in pictures)


ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "evidence.md"


@pytest.fixture(scope="module")
def data() -> study_data.StudyData:
    return study_data.read(ROOT / "studies" / "reference")


def test_the_page_is_what_the_report_command_writes_from_the_data(data: study_data.StudyData) -> None:
    assert PAGE.read_text(encoding="utf-8") == compose(data)
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
