"""What a refresh leaves alone, and a page that outlives its service."""

from __future__ import annotations

from support.browsing import Page
from support.service_processes import until
from support.site import Site

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


def test_a_page_outlives_its_service(site: Site, page: Page, live_run: str) -> None:
    page.open("run", run=live_run)
    page.wait(lambda: page.chart("-reward", LAST), "the reward chart")
    page.mark()
    site.service.kill("api")
    page.shows("has not responded for")
    assert page.chart("-reward", LAST), "what was drawn stays"
    site.service.check()
    until(site.service.is_ready, "the API to be back")
    page.wait(lambda: "has not responded for" not in page.text, "the banner to go")
    last = page.chart("-reward", LAST)
    page.wait(lambda: page.chart("-reward", LAST) > last + 5, "steps after the API came back")
    page.assert_marked()


def test_a_dialog_outlives_an_outage_of_the_service_until_it_is_closed(site: Site, page: Page, live_run: str) -> None:
    page.open("run", run=live_run)
    page.press("Edit…")
    page.fill("Name", "half written")
    site.service.kill("api")
    page.shows("has not responded for")
    site.service.check()
    until(site.service.is_ready, "the API to be back")
    page.wait(lambda: "has not responded for" not in page.text, "the banner to go")
    page.settle()
    assert page.one('[role=dialog] input[aria-label="Name"]').get_attribute("value") == "half written"
    page.one("[role=dialog] [aria-label=Close]").click()
    page.wait(lambda: not page.all("[role=dialog]"), "the dialog to close")
    page.press("Cancel")
    page.wait(lambda: page.button("Cancel run"), "the other dialog")
    assert page.button("Save") is None
