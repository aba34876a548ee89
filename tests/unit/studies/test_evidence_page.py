"""docs/evidence.md says what the shipped data of the reference study says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gxpo_trainer.studies import data as study_data
from gxpo_trainer.studies.definition import load_study, run_config
from gxpo_trainer.studies.report import as_markdown, compose

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


def test_the_readme_claims_no_advantage_at_equal_passes_that_the_page_does_not_show() -> None:
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert "At 60 backward passes no arm is shown to be above GRPO." in readme
    (line,) = re.findall(r"^- At 60 backward passes: .*$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert "higher:" not in line


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
