"""A study's data and report: docs/evidence.md is that of the shipped data, other cases are changes of it."""

from __future__ import annotations

import io
import json
import operator
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from gxpo_trainer.errors import ConfigError
from gxpo_trainer.studies import data as study_data
from gxpo_trainer.studies.data import StudyData
from gxpo_trainer.studies.definition import Analysis, Search, load_study
from gxpo_trainer.studies.findings import find
from gxpo_trainer.studies.report import compose, render_pictures, write_report

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "evidence.md"


@pytest.fixture(scope="module")
def data() -> StudyData:
    return study_data.read(ROOT / "studies" / "reference")


def changed(data: StudyData, arms: tuple[str, ...] = ("grpo", "gxpo"), **study: Any) -> StudyData:
    """Copies of the runs of these arms, in a study with changed fields."""
    return StudyData(
        data.study.model_copy(update=study),
        data.conditions,
        [dict(row) for row in data.runs if row["arm"] in arms],
        {key: run for key, run in data.curves.items() if key.arm in arms},
    )


def test_a_search_is_reported_with_its_space_and_the_points_that_went_furthest(data: StudyData) -> None:
    rates = [row["learning_rate"] for row in data.runs if row["arm"] == "grpo" and row["stage"] == "ladder"][:2]
    space = {"learner.optimizer.learning_rate": rates, "learner.mini_batches": [1, 4]}
    search = {"settings": space, "runs": 3, "seeds": [7, 8], "backward_passes": 3}
    searched = changed(data, ladder=None, search=Search.model_validate(search))
    tuned = [row for row in searched.runs if row["stage"] == "ladder" and row["learning_rate"] in rates]
    reported = [row for row in searched.runs if row["stage"] == "report"]
    for row in tuned:
        second = row["learning_rate"] == rates[1]
        row |= {"settings": f"learner.mini_batches={4 if second else 1}", "accuracy": 0.45 if second else 0.35}
    # The better of the two had the second seed too.
    again = [row | {"seed": 8, "accuracy": 0.25} for row in tuned if row["learning_rate"] == rates[1]]
    searched.runs[:] = [*tuned, *again, *reported]
    text = compose(searched)
    stated = "at most 3 runs for each arm: 2 → 1 points, a seed more each time. Space: learner.optimizer.learning_rate"
    assert stated in text
    low, high = (f"{rate:g}, mini_batches={count}" for rate, count in zip(rates, (1, 4), strict=True))
    label = data.study.arms["grpo"].label
    rows = (f"| {label} | 3 | {high} | 2 | 35.0 |", f"| {label} | 3 | {low} | 1 | 35.0 |")
    assert "\n".join(rows) in text.split("## Tuning")[1]
    assert "upwards until" not in text
    # An arm may lack the setting of the rows.
    for row in tuned[:1]:
        row["settings"] = ""
    # Two panels side by side, of 4.6 × 3.6 inches each.
    picture = render_pictures(searched)[f"{data.study.name}-ladder.png"]
    assert Image.open(io.BytesIO(picture)).size == (2 * 575, 450)


def test_only_the_named_comparisons_are_tested(data: StudyData) -> None:
    named = changed(data, analysis=Analysis(comparisons=("sfpo",)))
    (gxpo,) = find(named).candidates
    assert (gxpo.against.adjusted, gxpo.against.equivalence) == (None, None)
    text = compose(named)
    assert re.search(r"^\| GXPO.*\| not tested \|$", text, re.MULTILINE)
    summary, rest = text.split("## Question")
    assert "Plateaus against" not in summary
    assert "Arms against GRPO: 1, of which 0 tested, on 5 seeds not used for tuning.\n" in summary
    assert "fewer" not in summary
    assert "not shown equivalent |" not in rest
    assert len(re.findall(r"^\| GXPO K=5 \| −0\.2 \[−0\.9, \+0\.5\]: not tested \|", rest, re.MULTILINE)) == 3
    assert "\n- GXPO K=5: costs not tested; plateau −0.2 [−0.9, +0.5]: not tested.\n" in rest


def test_a_study_of_which_the_baseline_alone_has_run_finds_nothing(data: StudyData) -> None:
    text = compose(changed(data, arms=("grpo",)))
    assert "- Arms against GRPO: 0, " in text
    assert "shown for no arm" not in text


def test_collapse_and_divergence_are_outcomes_and_what_is_missing_is_told(data: StudyData) -> None:
    lost = changed(data)
    row = lost.reported("gxpo")[0]
    row |= {"peak": 0.9, "accuracy": 0.44, "diverged": True}
    (gxpo,) = find(lost).candidates
    assert (gxpo.collapsed, gxpo.diverged) == (1, 1)
    text = compose(lost)
    assert f"{gxpo.label} collapsed in 1 and diverged in 1 of 5 runs" in text
    assert f"Not complete yet, and so not compared: {data.study.arms['gxpo-grpo-rate'].label}, " in text


@pytest.mark.parametrize(("edge", "tried"), [("highest", operator.le), ("lowest", operator.ge), ("", operator.eq)])
def test_a_best_rate_at_an_end_of_its_ladder_is_told(data: StudyData, edge: str, tried: Any) -> None:
    """The only rate that was tried is no end."""
    ended = changed(data)
    chosen = {arm: ended.reported(arm)[0]["learning_rate"] for arm in ("grpo", "gxpo")}
    rows = [row for row in ended.runs if row["stage"] == "report" or tried(row["learning_rate"], chosen[row["arm"]])]
    ended.runs[:] = rows
    told = re.findall(r"The best rate is the (.*) that was tried, so a better one may exist: (.*)\.\n", compose(ended))
    assert told == ([(edge, "GRPO, GXPO K=5")] if edge else [])
    assert ("Learning rates were chosen on one tuning seed" in compose(ended)) == bool(edge)


def test_before_the_baseline_is_complete_there_is_no_result(data: StudyData) -> None:
    partial = changed(data, ("gxpo",))
    text = compose(partial)
    assert f"Incomplete: {len(partial.curves)} runs are done" in text
    assert "points" not in text


def test_data_survives_the_files_to_the_bit_and_the_report_has_its_pictures(data: StudyData, tmp_path: Path) -> None:
    two = changed(data)
    study_data.write(two, tmp_path)
    again = study_data.read(tmp_path)
    assert again.study == two.study
    write_report(again, tmp_path / "evidence.md")
    text = compose(two)
    assert (tmp_path / "evidence.md").read_text() == text
    pictures = re.findall(r"\]\((images/.*?)\)", text)
    assert len(pictures) == 2
    assert all(Image.open(tmp_path / picture).width >= 900 for picture in pictures)


def test_data_is_reported_without_the_packages_of_its_arms(data: StudyData, tmp_path: Path) -> None:
    two = changed(data)
    study_data.write(two, tmp_path)
    about = json.loads((tmp_path / "study.json").read_text())
    about["study"]["arms"]["gxpo"]["overrides"] = ["learner.rule.name=not_installed.rules:Rule"]
    (tmp_path / "study.json").write_text(json.dumps(about))
    again = study_data.read(tmp_path)
    assert compose(again) == compose(two)
    assert render_pictures(again) == render_pictures(two)
    # Data of the first versions has neither.
    for row in again.runs:
        del row["rule"], row["forward_passes"]
    study_data.write(again, tmp_path)
    with pytest.raises(ConfigError, match="install its package, or add its folder to PYTHONPATH"):
        study_data.read(tmp_path)


def test_the_page_is_what_the_report_command_writes_from_the_data(data: StudyData) -> None:
    assert PAGE.read_text(encoding="utf-8") == compose(data)
    pictures = re.findall(r"\]\((images/[^)]*)\)", PAGE.read_text(encoding="utf-8"))
    assert pictures
    assert all((PAGE.parent / picture).is_file() for picture in pictures)


def test_the_readme_quotes_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    quoted = re.findall(r"^> (- .*)$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(quoted) >= 2
    assert [line for line in quoted if line not in page.splitlines()] == []


@pytest.mark.parametrize("name", ["reference", "asynchronous-grpo", "asynchronous-gxpo", "tuned-words"])
def test_the_data_is_of_the_study_that_is_in_the_repository(name: str) -> None:
    assert study_data.read(ROOT / "studies" / name).study == load_study(ROOT / "studies" / f"{name}.toml")


def test_the_page_of_candidates_quotes_the_report_of_the_tuned_study() -> None:
    page = (ROOT / "docs" / "algorithms" / "candidates.md").read_text(encoding="utf-8")
    report = compose(study_data.read(ROOT / "studies" / "tuned-words"))
    quoted = re.findall(r"^> (- .*)$", page, re.MULTILINE)
    assert quoted
    assert [line for line in quoted if line not in report.splitlines()] == []
    passes = report.split("*Backward passes, ")[1].split("\n\n")[1]
    (row,) = (line for line in passes.splitlines() if line.startswith("| GRPO on surprising tokens |"))
    saved = re.findall(r"; (\d\.\d\d \[\d\.\d\d, \d\.\d\d\])", row)
    assert len(saved) == 6
    assert ", ".join(saved[:5]) in " ".join(page.split())
    assert f"and {saved[5]} ×" in page
