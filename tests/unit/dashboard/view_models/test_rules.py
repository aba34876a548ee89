"""One hue a rule, readable on both pages."""

from __future__ import annotations

import colorsys
import tomllib
from pathlib import Path

import pytest
from support.contrast import contrast

import gxpo_dashboard
from gxpo_dashboard.view_models.rules import HUES, luminance, rules_of, shade
from gxpo_trainer.config import RunConfig

PAGES = {"light": "#ffffff", "dark": "#11161d"}


def hue(color: str) -> float:
    return colorsys.rgb_to_hls(*(int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)))[0]


def test_the_contrast_of_wcag() -> None:
    assert contrast("#000000", "#ffffff") == 21.0
    # The published example of a grey that just passes.
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.005)
    assert luminance("#ff0000") == pytest.approx(0.2126)


@pytest.mark.parametrize("color", HUES)
def test_variants_of_a_rule_differ_and_are_seen_on_both_pages_and_three_keep_its_hue(color: str) -> None:
    variants = [shade(color, variant) for variant in range(20)]
    assert len(set(variants)) == 20
    for number, variant in enumerate(variants):
        assert min(contrast(variant, page) for page in PAGES.values()) >= (3 if number < 3 else 2.95)
        assert number >= 3 or hue(variant) == pytest.approx(hue(color), abs=0.02)


def test_red_is_that_of_failures_and_in_no_chart() -> None:
    file = Path(gxpo_dashboard.__file__).with_name(".streamlit") / "config.toml"
    theme = tomllib.loads(file.read_text(encoding="utf-8"))["theme"]
    for color in (*HUES, *(color for page in PAGES for color in theme[page]["chartCategoricalColors"])):
        assert min(hue(color), 1 - hue(color)) > 0.03, color


def test_variants_of_a_rule_are_shades_of_its_hue_and_rules_have_their_own() -> None:
    rules = rules_of(RunConfig.model_json_schema())
    colors = rules.colors({"GRPO": "grpo", "GRPO lr 6e-05": "grpo", "GXPO K=5": "gxpo", "GXPO K=10": "gxpo"})
    assert len(set(colors.values())) == 4
    assert colors["GRPO"] == rules.baseline.color == rules.of({"name": "grpo"}).color
    assert hue(colors["GXPO K=10"]) == pytest.approx(hue(colors["GXPO K=5"]), abs=0.02)
    assert abs(hue(colors["GXPO K=5"]) - hue(colors["GRPO"])) > 0.05
