"""From run folders to groups, pictures, tables and the HTML report."""

from __future__ import annotations

import colorsys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from gxpo_dashboard.view_models import rules
from gxpo_trainer import cli
from gxpo_trainer.compare.groups import compare_groups
from gxpo_trainer.compare.seeds import SeedGroup
from gxpo_trainer.config import EvaluationConfig, GrpoRule, GxpoRule, LearnerConfig, RunConfig
from gxpo_trainer.config.rules import RULES
from gxpo_trainer.errors import DataError
from gxpo_trainer.reporting import figures
from gxpo_trainer.reporting.identity import run_identity
from gxpo_trainer.reporting.reading import load_run
from gxpo_trainer.reporting.reporter import RunReporter

GRPO = GrpoRule()
GXPO = GxpoRule(k=5)


def config(rule: GrpoRule | GxpoRule, name: str) -> RunConfig:
    return RunConfig(name=name, learner=LearnerConfig(rule=rule), evaluation=EvaluationConfig(every_steps=10))


def write_run(
    folder: Path,
    made: RunConfig,
    per_problem: dict[int, list[float]],
    *,
    passes: int = 1,
    shutoff: int | None = None,
) -> Path:
    """A run whose evaluations hold the given scores; each step takes 6 s and `passes` passes."""
    with RunReporter(folder, clock=lambda: 1000.0) as reporter:
        reporter.write_identity(run_identity(made, policy_sha256="policy"))
        reporter.start_attempt(1, 0)
        for step in range(1, max(per_problem) + 1):
            row = {"reward/mean": 0.1, "update/backward_passes_total": step * passes, "time/training_s": 6.0 * step}
            if shutoff is not None and 3 <= step <= shutoff:
                row |= {"gate/z": 0.9 if step == shutoff else -0.1 * step, "gate/threshold": 0.5}
            if shutoff is not None and step >= shutoff:
                row["gate/shutoff_step"] = shutoff
            reporter.log_metrics(step, row)
        for step, scores in per_problem.items():
            mean = float(np.mean(scores))
            record = {
                "benchmark": "word_problems",
                "scores": {"pass@1": mean, "pass@1/ci_low": mean - 0.1, "pass@1/ci_high": mean + 0.1},
                "per_problem": scores,
                "problem_ids": [f"p{number}" for number in range(len(scores))],
                "backward_passes_total": step * passes,
                "training_s": 6.0 * step,
                "tokens_total": 100 * step,
            }
            reporter.log_evaluation(step, record)
    return folder


RISING = {0: [0.0, 0.5], 10: [0.25, 0.5], 20: [0.5, 0.75]}
FASTER = {0: [0.0, 0.5], 10: [0.5, 0.75], 20: [0.75, 1.0]}


@pytest.fixture
def two_runs(tmp_path: Path) -> list[Path]:
    first = write_run(tmp_path / "a", config(GRPO, name="grpo"), RISING)
    second = write_run(tmp_path / "b", config(GXPO, name="<script>alert(1)</script>"), FASTER, passes=3, shutoff=12)
    return [first, second]


def test_a_folder_becomes_a_curve(two_runs: list[Path]) -> None:
    run = load_run(two_runs[1])
    np.testing.assert_allclose(run.curve.steps, [0, 10, 20])
    np.testing.assert_allclose(run.curve.backward_passes, [0, 30, 60])
    np.testing.assert_allclose(run.curve.hours * 3600, [0, 60, 120])
    np.testing.assert_allclose(run.curve.accuracy, [0.25, 0.625, 0.875])
    np.testing.assert_allclose(run.curve.ci_high - run.curve.accuracy, 0.1)
    np.testing.assert_allclose(run.curve.per_problem[1], [0.5, 0.75])
    assert (run.rule, run.seed, run.gate.threshold, run.gate.shutoff_step) == ("GXPO K=5", 0, 0.5, 12)
    np.testing.assert_array_equal(run.gate.steps, range(3, 13))


def test_the_command_prints_tables_and_writes_a_picture_and_a_page_without_markup_of_others(
    two_runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert cli.main(["report", *map(str, two_runs), "--out", str(out), "--title", "two & <b>rules</b>"]) == 0
    printed = capsys.readouterr().out
    assert "62.5%" in printed
    assert "87.5%" in printed
    assert "Inconclusive: only one shared seed" in " ".join(printed.split())
    assert printed.endswith(f"Report: {out / 'report.md'}\nCurves: {out / 'curves.png'}\n")
    page = (out / "report.md").read_text(encoding="utf-8")
    assert page.startswith("# two &amp; &lt;b&gt;rules&lt;/b&gt;\n\n- ")
    assert "<" not in page
    assert "](curves.png)" in page
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_refuses_an_unknown_baseline_and_a_folder_without_a_run(
    two_runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "out")]
    assert cli.main(["report", *map(str, two_runs), *out, "--baseline", "SFPO"]) == 2
    assert "--baseline SFPO: choose one of GRPO, GXPO K=5" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert cli.main(["report", str(tmp_path), *out]) == 2
    assert str(tmp_path) in capsys.readouterr().err
    with pytest.raises(DataError, match=r"evaluations\.jsonl: no evaluation of 'amc23'; it has \['word_problems'\]"):
        load_run(two_runs[0], "amc23")


@pytest.mark.parametrize(("num_groups", "length"), [(1, 200), (3, 20), (3, 45), (9, 4), (9, 200)])
def test_text_stays_inside_the_picture_and_off_the_panels(two_runs: list[Path], num_groups: int, length: int) -> None:
    runs = (load_run(two_runs[1]),)
    groups = [SeedGroup(f"{'W' * (length - 1)}{number}", runs) for number in range(num_groups)]
    figure = figures.compose(
        groups, figures.line_styles(["GXPO"] * num_groups), compare_groups(groups, groups[0].name), title="Title"
    )
    figure.draw_without_rendering()
    legend = figure.legends[0].get_window_extent()
    for box in [legend, *(axes.get_tightbbox() for axes in figure.axes)]:
        assert min(box.x0, box.y0, figure.bbox.width - box.x1, figure.bbox.height - box.y1) >= 0
    assert not any(legend.overlaps(box) for axes in figure.axes if (box := axes.get_tightbbox()))


def hue(color: str) -> float:
    return colorsys.rgb_to_hls(*to_rgb(color))[0]


def test_pictures_and_dashboard_give_a_rule_the_same_hue() -> None:
    assert figures.HUES == rules.HUES
    colors = [style.color for style in figures.line_styles([rule.label for rule in RULES])]
    assert colors == list(figures.HUES[: len(RULES)])


def test_arms_of_a_rule_differ_in_shade_marker_and_dash() -> None:
    styles = figures.line_styles(["GXPO K=5", "GRPO", "GXPO K=10 replay", "GXPO K=3", "GXPO", "GXPO K=5 lr 1e-05"])
    of_gxpo = [style for number, style in enumerate(styles) if number != 1]
    assert [hue(style.color) for style in of_gxpo] == pytest.approx([hue(figures.HUES[2])] * 5, abs=0.01)
    assert len({style.color for style in styles}) == 6
    assert len({(style.marker, str(style.dash)) for style in figures.line_styles(["GXPO"] * 40)}) == 40
