"""What a visitor reads: contrast on the pixels, the place of the first chart, records, and columns of the table."""

from __future__ import annotations

import re
from itertools import combinations
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys
from support.browsing import CHART, TEXTS, Mode, Page, color, picture, set_mode, text_contrast
from support.contrast import contrast
from support.site import Site

FIRST_CHART = f"return document.querySelector('{CHART}').getBoundingClientRect().top"
SERIES_END = "view.data('points').reduce((most, row) => Math.max(most, row.x), 0)"
COLORS = "Object.fromEntries(view.scale('color').domain().map(name => [name, view.scale('color')(name)]))"


@pytest.mark.parametrize("mode", ["light", pytest.param("dark", marks=pytest.mark.long("the other colours"))])
def test_texts_and_phases_of_charts_are_readable_and_a_rule_has_one_hue(site: Site, page: Page, mode: Mode) -> None:
    both = list(site.recorded.values())
    phases = ["look-ahead on", "fallback to GRPO"]
    gate = [phases[0], "τ = 3", "shut off at step 20", "z-score", "training step"]
    visits: list[tuple[str, dict[str, Any], dict[str, list[str]]]] = [
        ("run", {"run": site.fired}, {"budget": [*phases, "budget 90", "training step"], "gate-z": gate}),
        ("compare", {"runs": both}, {"compare-accuracy": ["backward passes", "pass@1"]}),
        ("benchmarks", {"runs": both}, {"benchmark-": ["backward passes", "pass@1"]}),
    ]
    colors: dict[str, dict[str, str]] = {}
    set_mode(page.driver, mode)
    for view, query, expected in visits:
        page.open(view, **query)
        for key, labels in expected.items():
            page.wait(lambda key=key: page.chart(key, SERIES_END), key)  # type: ignore[misc]
            colors[key] = page.chart(key, COLORS)
            chart = picture(page, f'[class*="{key}"] {CHART}')
            boxes, left = dict(page.chart(key, TEXTS)), page.chart(key, "view.origin()[0]")
            assert set(labels) <= boxes.keys()
            places = {label: tuple(map(round, boxes[label])) for label in labels}
            places["y-axis"] = (0, chart.height // 3, 60, 2 * chart.height // 3)
            for (one, (left_x, top, right, bottom)), (other, (x, y, x2, y2)) in combinations(boxes.items(), 2):
                assert x >= right or x2 <= left_x or y >= bottom or y2 <= top, f"{key}: {one} and {other} overlap"
            measured = {label: text_contrast(chart.crop(place)) for label, place in places.items()}
            assert min(measured.values()) >= 4.5, (key, measured)
            if key == "gate-z":
                start, end = page.chart(key, "view.data('phases').map(row => [row.x, row.x2].map(view.scale('x')))[0]")
                row = int(page.chart(key, "view.origin()[1]")) + 4
                columns = int(left + (start + end) / 2), chart.width - 3
                inside, outside = (chart.getpixel((column, row)) for column in columns)
                assert contrast(color(inside), color(outside)) >= 1.15  # type: ignore[arg-type]
    budget, benchmark, accuracy = (colors[key] for key in ("budget", "benchmark-", "compare-accuracy"))
    look_ahead = {budget["look-ahead on"], benchmark["demo"], accuracy["GXPO K=5"]}
    grpo = {budget["GRPO (1 per step)"], benchmark["demo-grpo"], accuracy["GRPO"]}
    assert (len(look_ahead), len(grpo)) == (1, 1)
    for legend in colors.values():
        assert len(set(legend.values())) == len(legend)


def test_navigation_is_at_the_top_then_the_answer_then_a_chart(site: Site, page: Page) -> None:
    page.open("run", run=site.recorded["demo"])
    assert page.one("[class*=st-key-nav-] button").location["y"] < 20
    assert page.wait(lambda: page.script(FIRST_CHART), "a chart") < 350
    page.open("compare", runs=list(site.recorded.values()))
    first = page.wait(lambda: page.script(FIRST_CHART), "a chart")
    assert first < 550, "two configurations"
    headline, ranking = page.one("[data-testid=stAlert]"), page.one("[data-testid=stTable]")
    assert re.search(
        r"GXPO K=5 is .* GRPO after 30 backward passes.* Inconclusive: only one shared seed", headline.text
    )
    assert [line[:3] for line in ranking.text.splitlines() if line.startswith("●")] == ["● 1", "● 2"]
    ends = [page.script("return arguments[0].getBoundingClientRect().bottom", part) for part in (headline, ranking)]
    assert ends == sorted(ends)
    assert ends[-1] <= first, "the answer comes first"
    page.shows("60 (2.0× more)")
    assert not re.search(r"\b0\.\d+×", page.text), "a ratio below one is told as its inverse"
    page.open("benchmarks", runs=list(site.recorded.values()))
    page.shows("GXPO K=5 is 0.7 points below GRPO after 30 backward passes")
    assert page.wait(lambda: page.script(FIRST_CHART), "a chart") < 350
    page.open("benchmarks", runs=site.recorded["demo"])
    page.shows("Finished at step 30 of 30: steps done.")


def test_a_run_has_five_parts_and_a_link_may_name_a_section(site: Site, page: Page) -> None:
    sections = {"Gate": ("Training", "Gate: z-score"), "Checkpoints": ("Details", "No checkpoints")}
    for part, (present, words) in sections.items():
        page.open("run", run=site.recorded["demo"], part=part)
        page.shows(words)
        assert page.query["part"] == [present]
    page.press("Details")
    page.press("Events")
    page.wait(lambda: (page.query.get("part"), page.query.get("section")) == (["Details"], ["Events"]), "the address")


def test_the_back_button_goes_from_part_to_part(site: Site, page: Page) -> None:
    """Each control is one entry of the browser's history."""
    page.open("run", run=site.fired)
    visited = [page.query]
    for pressed in ("Training", "Policy", "Samples", "Details", "Config", "Overview", "The gate fired"):
        page.press(pressed)
        page.wait(lambda: page.query != visited[-1], "the address")
        page.settle()
        visited.append(page.query)
    for query in reversed(visited[:-1]):
        page.driver.back()
        page.wait(lambda query=query: page.query == query, f"the address {query}")
        page.settle()
        assert page.query == query, "it stays"


def test_the_name_of_a_run_is_a_link_that_a_key_opens_in_a_new_tab(site: Site, page: Page) -> None:
    page.open("runs", text="fired", cols=["name"])
    link = page.one(".rows-table tbody a")
    here, before = page.driver.current_window_handle, page.driver.window_handles
    page.keys().key_down(Keys.CONTROL).click(link).key_up(Keys.CONTROL).perform()
    (there,) = page.wait(lambda: set(page.driver.window_handles) - {*before}, "the new tab")
    page.driver.switch_to.window(there)
    try:
        page.wait(lambda: page.query.get("run") == [site.fired], "the run's own view")
    finally:
        page.driver.close()
        page.driver.switch_to.window(here)
    assert page.query["view"] == ["runs"]
    page.click(link)
    page.wait(lambda: page.query.get("view") == ["run"], "the run in the same tab")
    assert page.query["run"] == [site.fired]


def test_runs_are_selected_compared_and_opened_by_keyboard(site: Site, page: Page) -> None:
    page.open("runs", text="demo")
    page.one(".rows-table tbody a")
    page.keys().send_keys("jxjx").perform()
    page.shows("2 selected")
    page.keys().send_keys("k").perform()
    page.settle()
    assert page.script("return document.activeElement.getAttribute('aria-label')") == page.script(
        "return document.querySelector('.rows-table tbody input').getAttribute('aria-label')"
    ), "a refresh leaves the focus"
    button = "document.querySelector('[class*=st-key-nav-] button')"
    page.script(f"{button}.focus()")
    page.keys().send_keys("cjx").perform()
    page.settle()
    assert page.script(f"return document.activeElement === {button}"), "keys of another control are its own"
    assert page.query["view"] == ["runs"]
    for _ in range(2):  # by a click on a row, which has the focus then
        page.click(page.one(".rows-table tbody tr td.number"))
    page.shows("2 selected")
    page.keys().send_keys("c").perform()
    page.wait(lambda: page.query.get("view") == ["compare"], "the comparison")
    assert sorted(page.query["runs"]) == sorted(site.recorded.values())
    page.open("runs", text="demo")
    page.one(".rows-table tbody a")
    page.keys().send_keys("j", Keys.ENTER).perform()
    page.wait(lambda: page.query.get("view") == ["run"], "the run")


def test_eight_short_answers_are_read_without_scrolling_far_the_worst_first(site: Site, page: Page) -> None:
    page.open("run", run=site.recorded["demo"], part="Samples", step="20")
    page.shows("1 of 8 correct")
    assert page.text.index("✘ wrong") < page.text.index("✔ correct")
    assert re.search(r"\d× answer", page.text), "equal answers are merged"
    assert page.script("return document.querySelector('[data-testid=stMain]').scrollHeight") < 1300
    page.select_row(0)
    first = page.text
    page.keys().send_keys(Keys.ARROW_DOWN).perform()
    page.wait(lambda: page.text != first and "group" in page.text, "the next prompt, by an arrow")
    page.press("All steps")
    page.wait(lambda: page.query.get("prompt"), "the prompt in the address")


def test_a_run_with_an_environment_shows_turns_as_plain_text_and_charts_of_its_episodes(site: Site, page: Page) -> None:
    page.open("run", run=site.tools, part="Samples")
    page.shows("0 of 8 correct")
    page.select_row(1)
    for words in ("Policy, turn 1", "<calc>74/2</calc>", "Environment, turn 1", "37", "reward from the verifier"):
        page.shows(words)
    page.settle()  # until then drawers of the list before are on the page
    drawers = [drawer for drawer in page.all("summary") if "with this answer" in drawer.text]
    assert len(drawers) == 3, "the turns of all answers but the first are folded"
    drawers[1].click()
    page.shows("<img src=x onerror=alert(1)> **bold** [link](http://a.example)")
    page.shows("Environment, turn 1, reward −0.25")
    page.shows("reward from the environment")
    assert page.all("img[src=x]") == []
    assert page.all("a[href='http://a.example']") == []
    page.shows("9" * 1600)

    page.open("run", run=site.tools, part="Policy")
    page.shows("Environment: turns")
    page.shows("Environment: ends of episodes")


def test_ticks_of_small_shares_differ(site: Site, page: Page) -> None:
    page.open("run", run=site.recorded["demo"], part="Training", section="Policy")
    texts = page.wait(lambda: page.chart("clip", TEXTS), "the shares of clipped tokens")
    ticks = [words for words, _ in texts if words.endswith("%")]
    assert len(ticks) > 2
    assert len(set(ticks)) == len(ticks)


def test_a_first_load_is_at_most_two_mebibytes(page: Page) -> None:
    page.driver.execute_cdp_cmd("Network.clearBrowserCache", {})
    page.driver.get("about:blank")
    page.open("runs")
    loaded = page.script("return performance.getEntries().reduce((sum, entry) => sum + (entry.transferSize || 0), 0)")
    assert 2**18 < loaded < 2**21
