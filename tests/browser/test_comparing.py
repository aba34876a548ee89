"""Two recorded trainings are compared, linked and exported."""

from __future__ import annotations

import csv
import io
import zipfile
from pathlib import Path

from support.browsing import Page, open_browser
from support.site import RECORDINGS, Site

from gxpo_services.local.demo import comparison_link

SERIES = "[...new Set(view.data('points').map(row => row.series))].sort()"
FURTHEST = "Math.max(...view.data('points').map(row => row.x))"
AT = "view.data('points').map(row => [row.series, row.x, row.y])"


def test_two_groups_are_compared_and_the_link_opens_the_same_in_another_browser(site: Site, page: Page) -> None:
    page.open("compare")
    for group in ("recorded demo-grpo (1 run)", "recorded demo (1 run)"):
        page.press("Select runs")
        page.choose("Groups", group)
    page.shows("Inconclusive: only one shared seed.")
    page.shows("Evidence")
    page.shows("Steps (unequal cost)")
    assert page.query["groups"] == [site.groups["demo-grpo"], site.groups["demo"]]
    # Thirty steps: only the passes of GXPO go further.
    page.wait(lambda: (page.chart("compare-accuracy", FURTHEST) or 0) > 30, "the curves over backward passes")
    page.settle()
    evidence, points = page.card("Evidence"), page.chart("compare-accuracy", AT)
    # GRPO takes one pass a step and GXPO three: 30 steps of evaluations every 10.
    assert {(x, name) for name, x, _ in points if x > 0} >= {(10, _grpo(points)), (20, _grpo(points))}

    with open_browser() as other:
        there = Page(other, site.dashboard.url, site.dashboard.cookie)
        other.get(page.driver.current_url)
        there.wait(lambda: there.chart("compare-accuracy", AT), "the same curves")
        there.settle()
        assert there.chart("compare-accuracy", AT) == points
        assert there.card("Evidence") == evidence
        assert there.query == page.query


def _grpo(points: list[list[object]]) -> str:
    return next(str(name) for name, *_ in points if "GRPO" in str(name).upper())


def test_the_link_that_the_demo_prints_opens_the_comparison_of_its_runs(site: Site, page: Page) -> None:
    page.driver.get(comparison_link(site.dashboard.url, list(site.recorded.values())))
    page.settle()
    assert page.one("h1").text == "Compare"
    assert len(page.wait(lambda: page.chart("compare-accuracy", SERIES), "the curves")) == 2


def test_metrics_and_evaluations_are_exported_as_csv(site: Site, page: Page, tmp_path: Path) -> None:
    page.open("compare", runs=list(site.recorded.values()))
    page.download_to(tmp_path)
    page.press("Download metrics and evaluations (CSV)")
    file = tmp_path / "gxpo-csv.zip"
    page.wait(file.exists, "the file")
    with zipfile.ZipFile(file) as parts:
        rows = list(csv.DictReader(io.StringIO(parts.read("metrics.csv").decode())))
    for name, run in site.recorded.items():
        rewards = {row["step"]: row["value"] for row in rows if row["run"] == run and row["metric"] == "reward/mean"}
        assert len(rewards) == 30, f"one reward a step of {RECORDINGS / name}"
