"""Lines of one update rule share a hue, which is that of the dashboard; all lines differ."""

from __future__ import annotations

import colorsys
from pathlib import Path

import pytest
from matplotlib.colors import to_rgb

from gxpo_dashboard.view_models import rules
from gxpo_trainer.config.rules import RULES
from gxpo_trainer.reporting.figures import DASHES, HUES, MARKERS, line_styles
from gxpo_trainer.studies import data as study_data
from gxpo_trainer.studies.report import rule_labels

ROOT = Path(__file__).parents[3]


def hue(color: str) -> float:
    return colorsys.rgb_to_hls(*to_rgb(color))[0]


def test_pictures_and_dashboard_give_a_rule_the_same_hue() -> None:
    assert HUES == rules.HUES
    assert [style.color for style in line_styles([rule.label for rule in RULES])] == list(HUES[: len(RULES)])


def test_arms_of_a_rule_differ_in_shade_marker_and_dash() -> None:
    styles = line_styles(["GXPO K=5", "GRPO", "GXPO K=10 replay", "GXPO K=3", "GXPO", "GXPO K=5 lr 1e-05"])
    of_gxpo = [style for number, style in enumerate(styles) if number != 1]
    assert [hue(style.color) for style in of_gxpo] == pytest.approx([hue(HUES[2])] * 5, abs=0.01)
    assert len({style.color for style in styles}) == 6
    assert len({(style.marker, str(style.dash)) for style in line_styles(["GXPO"] * 40)}) == 40
    assert (len(set(MARKERS)), len({str(dash) for dash in DASHES})) == (len(MARKERS), len(DASHES))


def test_an_unknown_rule_has_a_hue_of_its_own() -> None:
    known = {style.color for style in line_styles([rule.label for rule in RULES])}
    assert line_styles(["GRPOX"])[0].color not in known


def test_the_arms_of_the_reference_study_have_the_hue_of_their_rule() -> None:
    data = study_data.read(ROOT / "studies" / "reference")
    labels = rule_labels(data, list(data.study.arms))
    assert labels["grpo-longer-step"] == labels["grpo"] == "GRPO"
    assert labels["gxpo-grpo-rate"] == labels["displacement"] == "GXPO"
    assert labels["extragradient"] == "Extragradient"
