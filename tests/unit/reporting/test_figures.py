"""From run folders to groups, pictures, tables and the HTML report."""

from __future__ import annotations

import colorsys
import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from gxpo_dashboard.view_models import rules
from gxpo_trainer import cli
from gxpo_trainer.compare.groups import compare_groups
from gxpo_trainer.compare.seeds import SeedGroup
from gxpo_trainer.config.rules import RULES
from gxpo_trainer.errors import DataError
from gxpo_trainer.reporting import figures
from gxpo_trainer.reporting.reading import load_run

RECORDINGS = Path(__file__).parents[2] / "browser" / "recordings"


@pytest.fixture
def two_runs() -> list[Path]:
    """Runs of the demo, of GRPO and of GXPO, evaluated every ten steps on 256 problems."""
    return [RECORDINGS / "demo-grpo", RECORDINGS / "demo"]


def test_a_folder_becomes_a_curve(two_runs: list[Path]) -> None:
    run = load_run(two_runs[1])
    rows = [json.loads(line) for line in (two_runs[1] / "evaluations.jsonl").read_text().splitlines()]
    np.testing.assert_allclose(run.curve.steps, [0, 10, 20, 30])
    np.testing.assert_allclose(run.curve.backward_passes, [0, 30, 60, 90])
    np.testing.assert_allclose(run.curve.hours, [row["training_s"] / 3600 for row in rows])
    np.testing.assert_allclose(run.curve.accuracy, [row["scores"]["pass@1"] for row in rows])
    np.testing.assert_allclose(run.curve.per_problem, [row["per_problem"] for row in rows])
    assert (run.rule, run.seed, run.gate.threshold, run.gate.shutoff_step) == ("GXPO K=5", 0, 3.0, None)
    np.testing.assert_array_equal(run.gate.steps, range(11, 31))


def test_the_command_prints_tables_and_writes_a_picture_and_a_page_without_markup_of_others(
    two_runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert cli.main(["report", *map(str, two_runs), "--out", str(out), "--title", "two & <b>rules</b>"]) == 0
    printed = capsys.readouterr().out
    assert "31.0%" in printed
    assert "44.3%" in printed
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
    with pytest.raises(DataError, match=r"evaluations\.jsonl: no evaluation of amc23; it has word_problems"):
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


def test_pictures_and_dashboard_give_a_rule_the_same_hue() -> None:
    assert figures.HUES == rules.HUES
    colors = [style["color"] for style in figures.line_styles([rule.label for rule in RULES])]
    assert colors == list(figures.HUES[: len(RULES)])


def test_arms_of_a_rule_differ_in_shade_marker_and_dash() -> None:
    styles = figures.line_styles(["GXPO K=5", "GRPO", "GXPO K=10 replay", "GXPO K=3", "GXPO", "GXPO K=5 lr 1e-05"])
    of_gxpo = [style for number, style in enumerate(styles) if number != 1]
    first, *hues = (
        colorsys.rgb_to_hls(*to_rgb(color))[0] for color in (figures.HUES[2], *(s["color"] for s in of_gxpo))
    )
    assert hues == pytest.approx([first] * 5, abs=0.01)
    assert len({style["color"] for style in styles}) == 6
    assert len({(style["marker"], str(style["linestyle"])) for style in figures.line_styles(["GXPO"] * 40)}) == 40
