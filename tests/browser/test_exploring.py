"""The metric explorer, saved views, and what a run's records show and give away as files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.browsing import COVERED, TEXTS, Page, open_browser
from support.site import FORMULA, Site

from gxpo_client.formats import moment
from gxpo_dashboard.view_models.tables import worst_first

ROWS = "view.data('points').map(row => [row.series, row.x, row.y])"
SERIES = "[...new Set(view.data('points').map(row => row.series))].sort()"
NORM = "update/norm"


def test_any_metric_is_searched_for_smoothed_and_drawn_on_a_logarithmic_axis(site: Site, page: Page) -> None:
    page.open("run", run=site.recorded["demo"], part="Metrics", prefix="gate")
    page.wait(lambda: page.chart("gate-z", ROWS), "the metrics of the gate")
    page.fill("Search metrics", NORM)
    page.wait(lambda: page.chart("update-norm", ROWS), "the metric that was searched for")
    assert page.query["find"] == [NORM]
    raw = page.chart("update-norm", ROWS)
    page.press("Curves")
    page.choose("Smoothing", "average, weight 0.9")
    smooth = page.wait(lambda: (rows := page.chart("update-norm", ROWS)) != raw and rows, "the average")
    assert smooth[0] == raw[0]
    # Each value is 0.9 of the average so far and 0.1 of its own.
    assert smooth[1][2] == pytest.approx(0.9 * raw[0][2] + 0.1 * raw[1][2])
    assert page.chart("update-norm", "view.scale('y').type") == "linear"
    page.click(page.one(".st-key-in_logarithmic label"))
    page.wait(lambda: page.chart("update-norm", "view.scale('y').type") == "log", "the logarithmic axis")
    assert page.query["logarithmic"] == ["1"]
    assert page.query["smooth"] == ["0.9"]


def test_a_comparison_shows_gates_what_a_look_ahead_gains_and_one_run_by_a_press_in_the_legend(
    site: Site, page: Page
) -> None:
    page.open("compare", runs=list(site.recorded.values()), share="0.9", find=NORM)
    page.shows("When it pays: sampling takes 90% of a step")
    scores = page.wait(lambda: page.chart_of("Gates: z-scores", ROWS), "the z-scores")
    assert {step for _, step, _ in scores} >= {20, 30}
    names = page.wait(lambda: page.chart("update-norm", SERIES), "the metric of both runs")
    left, top, right, bottom = dict(page.chart("update-norm", TEXTS))[names[0]]
    page.point_at("update-norm", (left + right) / 2, (top + bottom) / 2, press=True)
    chosen = "view.data('chosen_store').map(row => row.values[0])"
    page.wait(lambda: page.chart("update-norm", chosen) == names[:1], "the choice")


X, Y = "view.scale('x').domain()", "view.scale('y').domain()"


def test_the_wheel_scrolls_the_page_and_dragging_zooms_all_charts_until_the_reset(site: Site, page: Page) -> None:
    page.open("run", run=site.recorded["demo"])
    whole = page.wait(lambda: page.chart("-reward", X), "the reward chart")
    page.wheel("-reward")
    page.wait(lambda: page.scrolled > 0, "the page to scroll")
    assert page.chart("-reward", X) == whole
    height = page.chart("-reward", Y)
    page.drag("-reward", 0.4, 0.6)
    page.wait(lambda: {"from", "to"} <= page.query.keys(), "the range in the address")
    page.settle()
    low, high = (float(page.query[end][0]) for end in ("from", "to"))
    for key in ("-reward", "gate-z", "budget"):
        steps = page.wait(lambda key=key: page.chart(key, ROWS), key)  # type: ignore[misc]
        assert all(low <= x <= high for _, x, _ in steps), key
    assert 1 < low < high < 30
    assert page.chart("-reward", Y) != height, "y fits to the visible range"
    page.driver.refresh()
    page.settle()
    page.press("Reset zoom")
    page.wait(lambda: page.chart("-reward", X) == whole, "the whole axis")
    assert not {"from", "to"} & page.query.keys()
    page.press("Curves")
    page.fill("Visible from", "20")
    page.fill("Visible to", "10")
    page.shows("Visible from and to are two numbers, the smaller one first.")
    page.fill("Visible from", "5")
    page.wait(
        lambda: {x for _, x, _ in page.chart("-reward", ROWS) or ()} == {*range(5, 11)}, "the range that was typed"
    )


def test_a_long_name_pushes_no_column_out_of_sight(site: Site, page: Page) -> None:
    run = site.recorded["demo"]
    site.http.patch(f"/runs/{run}", json={"name": "long name " * 20}).raise_for_status()
    try:
        with page.sized(1280):
            page.open("runs")
            page.one(f".rows-table tr[id='{run}'] a")
            width = "const table = document.querySelector('.rows-table'); return table.scrollWidth - table.clientWidth"
            assert page.script(width) == 0
    finally:
        site.http.patch(f"/runs/{run}", json={"name": "demo"}).raise_for_status()


def test_a_click_on_a_header_is_the_order_of_the_service_and_shown(site: Site, page: Page) -> None:
    sorted_by = "return document.querySelector('.rows-table [aria-sort]')?.textContent"
    page.open("runs", cols=["name", "step"], text="demo")
    page.wait(lambda: page.script(sorted_by) == "Created ↓", "the order in the header")
    listed = site.http.get("/runs", params={"text": "demo"}).json()["items"]
    titles = [age.get_attribute("title") for age in page.all(".rows-table time")]
    assert titles == [moment(run["created_at"]) for run in listed]
    page.press("Name")
    page.wait(lambda: page.query.get("sort") == ["name"], "the order in the address")
    page.wait(lambda: page.script(sorted_by) == "Name ↓", "the new order in the header")
    page.press("Name ↓")
    page.wait(lambda: page.query.get("order") == ["asc"], "the other direction")
    page.wait(lambda: page.script(sorted_by) == "Name ↑", "the direction in the header")


def test_a_narrow_page_cuts_no_legend_covers_no_control_and_does_not_scroll_sideways(
    site: Site, page: Page, live_run: str
) -> None:
    wider = "[document.documentElement, document.querySelector('[data-testid=stMain]')].map(e => e.scrollWidth)"
    with page.sized(390):
        page.open("run", run=site.fired)
        texts = page.wait(lambda: page.chart("budget", TEXTS), "the budget")
        width = page.chart("budget", "view.container().getBoundingClientRect().width")
        legend = [box for words, box in texts if "per step" in words]
        assert len(legend) == 2
        assert all(left >= 0 and right <= width for left, _, right, _ in legend)
        for view in ("runs", "run"):
            page.open(view, run=live_run)
            if view == "run":
                page.shows("Running: step")
                page.wait(lambda: page.chart("-reward", ROWS), "the live curve")
            assert max(page.script(f"return {wider}")) <= 390
            page.settle()
            assert page.script(COVERED) == []


def test_an_evaluation_is_seen_in_the_timeline_and_the_whole_log_is_downloaded(
    site: Site, page: Page, tmp_path: Path
) -> None:
    run = site.submit_short("with records")
    spans = [["learner", "updating", 0.0, 2.0], ["evaluation", "evaluating", 2.0, 5.0]]
    line = json.dumps({"attempt": 1, "step": 3, "begin": 5.0, "spans": spans})
    (site.home / "artifacts" / run / "timeline.jsonl").write_text(line, encoding="utf-8")
    page.open("run", run=run, part="System")
    drawn = "view.data('points').map(row => [row.process, row.series, row.x, row.x2])"
    assert page.wait(lambda: page.chart_of("Timeline", drawn), "the timeline") == spans
    page.open("run", run=run, part="Log")
    page.shows("lines of the last")
    where = {"behavior": "allow", "downloadPath": str(tmp_path)}
    page.driver.execute_cdp_cmd("Browser.setDownloadBehavior", where)
    page.press("Download log")
    file = tmp_path / f"{run}.log"
    page.wait(file.exists, "the file")
    assert file.read_bytes() == (site.home / "artifacts" / run / "train.log").read_bytes()


def test_notes_and_formulas_are_text_and_formulas_are_typeset_next_to_it(site: Site, page: Page) -> None:
    site.http.patch(f"/runs/{site.fired}", json={"notes": "<b>look</b> **here**"}).raise_for_status()
    page.open("run", run=site.fired, part="Samples")
    page.one("summary").click()
    page.shows("<b>look</b> **here**")
    listed = site.http.get(f"/runs/{site.fired}/samples", params={"step": 30, "limit": 500}).json()
    group = next(sample["group"] for sample in listed["items"] if sample["response"] == FORMULA)
    page.select_row([counts["group"] for counts in worst_first(listed["groups"])].index(group))
    page.shows(FORMULA)
    assert page.wait(lambda: page.all(".katex .mfrac"), "the fraction")
    assert page.all("img[src=x]") == []


# Two recorded trainings are compared, linked and exported.


FURTHEST = "Math.max(...view.data('points').map(row => row.x))"


def test_two_groups_are_compared_and_the_link_opens_the_same_in_another_browser(site: Site, page: Page) -> None:
    page.open("compare")
    page.press("Select runs")
    for group in ("recorded demo-grpo (1 run)", "recorded demo (1 run)"):
        page.choose("Groups", group)
    page.shows("Inconclusive: only one shared seed.")
    page.shows("Evidence")
    page.shows("Steps (unequal cost)")
    assert page.query["groups"] == [site.groups["demo-grpo"], site.groups["demo"]]
    # Thirty steps: only the passes of GXPO go further.
    page.wait(lambda: (page.chart("compare-accuracy", FURTHEST) or 0) > 30, "the curves over backward passes")
    page.settle()
    evidence, points = page.card("Evidence"), page.chart("compare-accuracy", ROWS)
    # GRPO takes one pass a step and GXPO three: 30 steps of evaluations every 10.
    assert {(x, name) for name, x, _ in points if x > 0} >= {(10, _grpo(points)), (20, _grpo(points))}

    with open_browser() as other:
        there = Page(other, site.dashboard.url, site.dashboard.cookie)
        other.get(page.driver.current_url)
        there.wait(lambda: there.chart("compare-accuracy", ROWS), "the same curves")
        there.settle()
        assert there.chart("compare-accuracy", ROWS) == points
        assert there.card("Evidence") == evidence
        assert there.query == page.query


def _grpo(points: list[list[object]]) -> str:
    return next(str(name) for name, *_ in points if "GRPO" in str(name).upper())


CROSSHAIR = """
return [...document.querySelectorAll('.crosshair')].map(group => {
  const [line] = group.children, texts = [...group.querySelectorAll('text')].map(text => text.textContent);
  return [group.closest('[class*="st-key-"]').className, +line.getAttribute('x1'), texts];
});
"""


def test_one_crosshair_marks_the_step_under_the_pointer_in_all_charts_of_the_view(site: Site, page: Page) -> None:
    page.open("run", run=site.recorded["demo"])
    keys = "-reward", "gate-z", "budget", "accuracy-pass"
    rows = {key: page.wait(lambda key=key: page.chart(key, ROWS), key) for key in keys}  # type: ignore[misc]
    evaluated = rows["accuracy-pass"][-1][1]
    page.point_at("-reward", page.chart("-reward", f"view.origin()[0] + view.scale('x')({evaluated})"), 140)
    drawn = page.wait(lambda: page.script(CROSSHAIR), "the crosshair")
    # Of charts of several scores the first one, as above.
    marked = {key: (x, texts) for key in keys for name, x, texts in reversed(drawn) if key in name}
    (step,) = {round(page.chart(key, f"view.scale('x').invert({x})"), 3) for key, (x, _) in marked.items()}
    assert step in {x for _, x, _ in rows["-reward"]}
    assert marked.keys() == set(keys)
    assert not marked["-reward"][1], "Vega's own points and tooltip"
    for key in keys[1:]:
        values = {y for _, x, y in rows[key] if x == step and y is not None}
        assert values
        unit, scale = ("%", 100) if key == "accuracy-pass" else ("", 1)
        texts = [text.removesuffix(unit).replace(",", "") for text in marked[key][1]]
        assert sorted(map(float, texts)) == pytest.approx(sorted(scale * y for y in values), rel=1e-3), key
    page.keys().move_to_element(page.one("h1")).perform()
    page.wait(lambda: not page.script(CROSSHAIR), "no crosshair away from the charts")


def test_a_selection_outlives_other_names_of_its_runs(site: Site, page: Page) -> None:
    """The browser sends labels, which change when a run is renamed or another one has its name."""
    first, second = (site.recorded[name] for name in ("demo-grpo", "demo"))
    page.open("compare", runs=[first, second], baseline=first)
    page.press("Select runs")
    try:
        site.http.patch(f"/runs/{first}", json={"name": "renamed"}).raise_for_status()
        for number, name in enumerate(("fired", "tools"), start=3):
            page.choose("Runs", name)
            page.wait(lambda number=number: len(page.query.get("runs", [])) == number, "one more run in the address")
        assert page.query["runs"] == [first, second, site.fired, site.tools]
        assert page.query["baseline"] == [first]
    finally:
        site.http.patch(f"/runs/{first}", json={"name": "demo-grpo"}).raise_for_status()
