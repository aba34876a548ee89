"""The tutorials as a reader does them, as far as no engine is needed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.walkthrough import ROOT, Reader, tree_with_the_rule

from gxpo_dashboard.views.run import PARTS

CHARTS = ROOT / "dashboard" / "gxpo_dashboard" / "charts"


@pytest.mark.parametrize("page", ["tutorials/train-your-model", "tutorials/write-a-reward", "environments"])
def test_the_commands_of_the_page_print_what_it_says(page: str, tmp_path: Path) -> None:
    Reader(tmp_path).follow(f"{page}.md")


def test_the_rule_of_the_tutorial_passes_its_own_test_and_is_known_to_the_commands(tmp_path: Path) -> None:
    tree_with_the_rule(tmp_path)
    reader = Reader(tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT / 'tests'}")
    reader.follow("tutorials/write-a-rule.md")
    planned = reader.run("bash", ".venv/bin/gxpo plan lookahead.toml --gpu cpu")
    assert re.search(r"Lookahead K=5 \*.* 40 +200 ", planned), planned


def test_the_dashboard_has_every_part_and_chart_that_the_pages_name() -> None:
    pages = ["troubleshooting.md", "tutorials/train-your-model.md", "concepts/gate-and-budget.md"]
    text = "\n".join((ROOT / "docs" / page).read_text(encoding="utf-8") for page in pages)
    sources = "\n".join(path.read_text(encoding="utf-8") for path in CHARTS.glob("*.py"))
    titles = re.findall(r'"([A-Z][^"]+)"', sources)
    mentions = text.split("Run › ")[1:]
    assert len(mentions) > 20
    for mention in mentions:
        part = next((part for part in PARTS if mention.startswith(part)), None)
        assert part is not None, f"no part of the view: {mention[:40]}"
        if (chart := mention.removeprefix(part)).startswith(" › "):
            assert any(chart.removeprefix(" › ").startswith(title) for title in titles), f"no chart: {mention[:60]}"
