"""`gxpo report`: from run folders to tables, a picture and a page."""

from __future__ import annotations

from pathlib import Path

import pytest

from gxpo_trainer import cli
from gxpo_trainer.config import GrpoRule, GxpoRule, LearnerConfig, RunConfig
from gxpo_trainer.reporting.identity import run_identity
from gxpo_trainer.reporting.reporter import RunReporter


def write_run(folder: Path, rule: GrpoRule | GxpoRule, accuracy: float) -> Path:
    """One step of a run and an evaluation of two problems before and after it."""
    config = RunConfig(learner=LearnerConfig(rule=rule))
    with RunReporter(folder, clock=lambda: 1000.0) as reporter:
        reporter.write_identity(run_identity(config, policy_sha256="policy"))
        reporter.start_attempt(1, 0)
        reporter.log_metrics(
            1, {"update/backward_passes_total": 1.0, "time/training_s": 6.0, "rollout/tokens_total": 9}
        )
        for step, score in ((0, 0.0), (1, accuracy)):
            record = {"benchmark": "word_problems", "scores": {"pass@1": score}, "per_problem": [score, score]}
            reporter.log_evaluation(step, record | {"problem_ids": ["a", "b"]})
    return folder


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    runs = (("grpo", GrpoRule(), 0.25), ("gxpo", GxpoRule(k=5), 0.5))
    return [str(write_run(tmp_path / name, rule, accuracy)) for name, rule, accuracy in runs]


def test_a_report_has_tables_the_sentence_a_picture_and_a_page(
    folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert cli.main(["report", *folders, "--out", str(out), "--title", "two <rules>"]) == 0
    printed = capsys.readouterr().out
    assert "25.0%" in printed
    assert "50.0%" in printed
    assert "Inconclusive: only one shared seed" in printed
    assert printed.endswith(f"Report: {out / 'report.html'}\nCurves: {out / 'curves.png'}\n")
    assert "<title>two &lt;rules&gt;</title>" in (out / "report.html").read_text()
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_an_unknown_baseline_is_reported_with_the_known_ones(
    folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["report", *folders, "--out", str(tmp_path / "out"), "--baseline", "SFPO"]) == 2
    assert "--baseline SFPO: choose one of GRPO, GXPO K=5" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_without_a_run_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert str(tmp_path) in capsys.readouterr().err
