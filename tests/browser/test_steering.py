"""A run from its submission to its end, by hand, on the page."""

from __future__ import annotations

from support.browsing import Page
from support.service_processes import until
from support.site import LONG, Site

POINTS = "view.data('points').length"
CANCEL = ".st-key-run-cancel"


def test_a_run_is_submitted_watched_paused_resumed_and_cancelled_from_the_page(site: Site, page: Page) -> None:
    page.open("submit", preset="demo")
    page.fill("Name", "by hand")
    page.fill("Budget steps", str(LONG))
    page.shows(f"At most {3 * LONG:,} backward passes")
    page.press("Submit run")
    page.wait(lambda: page.query.get("view") == ["run"] and page.query.get("run"), "the new run's own view")
    run = page.query["run"][0]
    assert site.http.get(f"/runs/{run}").json()["name"] == "by hand"

    page.mark()
    seen = page.wait(lambda: page.chart("-reward", POINTS), "the first points of the reward")
    page.wait(lambda: page.chart("-reward", POINTS) > seen + 10, "more points")
    page.assert_marked()

    place = page.one(CANCEL).location["x"]
    page.press("Pause")
    page.shows("‖ paused")
    assert site.state(run) == "paused"
    assert page.one(CANCEL).location["x"] == place, "a button must not move under the pointer"
    paused_at = site.step(run)

    page.press("Resume")
    page.shows("▶ running")
    page.wait(lambda: page.chart("-reward", POINTS) > paused_at + 3, "steps after the pause")

    assert page.one(CANCEL).location["x"] == place
    page.press("Cancel")
    page.shows("cannot be resumed")
    page.press("Cancel run")
    page.shows("■ cancelled")
    assert site.state(run) == "cancelled"
    page.assert_marked()


def test_a_form_filled_in_without_waiting_is_complete_after_a_reload(page: Page) -> None:
    page.open("submit", preset="demo")
    typed = {"Name": "quick", "Rule K": "7", "Rule α": "0.4", "Budget steps": "12", "Rollout max new tokens": "24"}
    for label, text in typed.items():
        page.fill(label, text)
    page.wait(lambda: len(page.query.get("set", [])) == len(typed), "an address with all settings")
    page.driver.refresh()
    page.settle()
    page.shows("max_new_tokens = 24")
    assert {label: page.one(f'input[aria-label="{label}"]').get_attribute("value") for label in typed} == typed


# What a refresh leaves alone, and a page that outlives its service.


DOMAIN = "view.scale('x').domain()"
LAST = "Math.max(...view.data('points').map(row => row.x))"


def test_a_refresh_keeps_zoom_and_scroll(site: Site, page: Page, live_run: str) -> None:
    page.open("run", run=live_run)
    page.wait(lambda: page.chart("-reward", DOMAIN), "the reward chart")
    page.drag("-reward", 0.3, 0.6)
    page.wait(lambda: {"from", "to"} <= page.query.keys(), "the range in the address")
    page.settle()
    near = page.wait(lambda: page.chart("-reward", DOMAIN), "the zoomed chart")
    page.scroll_to(200)
    step = site.step(live_run)
    page.wait(lambda: site.step(live_run) > step + 20 and f"step {step:,} of" not in page.text, "some refreshes")
    assert page.chart("-reward", DOMAIN) == near
    assert page.scrolled == 200


def test_a_refresh_of_the_list_leaves_what_a_click_may_be_on(page: Page, live_run: str) -> None:
    page.open("runs")
    row = page.one(f".rows-table [id='{live_run}']")
    link, words = row.find_element("css selector", "a"), row.text
    page.wait(lambda: row.text != words, "a refresh")
    assert link.text == "live run", "it is the same element"


def test_a_page_and_its_open_dialog_outlive_the_service(site: Site, page: Page, live_run: str) -> None:
    page.open("run", run=live_run)
    page.wait(lambda: page.chart("-reward", LAST), "the reward chart")
    page.mark()
    page.press("Edit…")
    page.fill("Name", "half written")
    site.service.kill("api")
    page.shows("has not responded for")
    assert page.chart("-reward", LAST), "what was drawn stays"
    site.service.check()
    until(site.service.is_ready, "the API to be back")
    page.wait(lambda: "has not responded for" not in page.text, "the banner to go")
    page.settle()
    assert page.one('[role=dialog] input[aria-label="Name"]').get_attribute("value") == "half written"
    page.one("[role=dialog] [aria-label=Close]").click()
    page.wait(lambda: not page.all("[role=dialog]"), "the dialog to close")
    last = page.chart("-reward", LAST)
    page.wait(lambda: page.chart("-reward", LAST) > last + 5, "steps after the API came back")
    page.press("Cancel")
    page.wait(lambda: page.button("Cancel run"), "the other dialog")
    assert page.button("Save") is None
    page.assert_marked()
