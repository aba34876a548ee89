"""Who sees what: a visitor from elsewhere, and one whose token only reads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from selenium import webdriver
from support.browsing import Page, open_browser
from support.site import NOT_LOOPBACK, Site


@pytest.fixture
def elsewhere(site: Site) -> Iterator[Page]:
    """The same dashboard under a name that is not loopback's: this machine's token is not lent to who asks for it."""
    with open_browser(resolve=f"MAP {NOT_LOOPBACK} 127.0.0.1") as driver:
        yield Page(driver, f"http://{NOT_LOOPBACK}:{site.dashboard.port}")


def test_a_visitor_from_elsewhere_sees_the_sign_in_and_nothing_else(site: Site, elsewhere: Page, live_run: str) -> None:
    for address in ({}, {"view": "run", "run": live_run}, {"view": "compare", "runs": list(site.recorded.values())}):
        elsewhere.open(**address)
        elsewhere.shows("Access token")
        assert "live run" not in elsewhere.text
        assert [heading.text for heading in elsewhere.all("h1")] == ["Sign in"]
        assert [box.get_attribute("aria-label") for box in elsewhere.all("input, textarea")] == ["Access token"]
        assert not elsewhere.all("[data-testid=stDataFrame], [data-testid=stVegaLiteChart], [class*=st-key-nav]")


def test_a_viewer_sees_runs_and_cannot_cancel_them(site: Site, elsewhere: Page, live_run: str) -> None:
    elsewhere.open("run", run=live_run)
    elsewhere.fill("Access token", site.viewer_token)
    elsewhere.shows("▶ running")
    elsewhere.shows("live run")
    elsewhere.wait(lambda: elsewhere.all(".st-key-run-cancel button"), "the row of buttons")
    assert elsewhere.button("Cancel") is None, "it is there to be seen, and cannot be pressed"


def test_a_token_that_is_not_known_opens_nothing(elsewhere: Page) -> None:
    elsewhere.open()
    elsewhere.fill("Access token", "gxpo_nobody")
    elsewhere.shows("rejected this token")
    assert [heading.text for heading in elsewhere.all("h1")] == ["Sign in"]


def test_another_account_of_this_machine_sees_the_sign_in_and_the_link_opens_everything_once(
    site: Site, browser: webdriver.Chrome, live_run: str
) -> None:
    """Any account reaches loopback; only the link of `gxpo up` has the secret."""
    page = Page(browser, site.dashboard.url)
    for secret in ("", "wrong"):
        page.open("run", run=live_run, **({"secret": secret} if secret else {}))
        assert [heading.text for heading in page.all("h1")] == ["Sign in"]
        assert "live run" not in page.text
    page.open("run", run=live_run, secret=site.dashboard.secret)
    page.shows("live run")
    assert "secret" not in browser.current_url
    page.open("run", run=live_run)
    page.shows("live run")
    page.press("local")
    page.press("Sign out")
    page.shows("Access token")
    page.open("run", run=live_run)
    page.shows("Access token")
    assert "live run" not in page.text, "the sign-out outlasts the tab"
