"""The site that a browser visits, started once for the tests of this folder and ended with the last of them: it would
take a tenth of two cores from those of other folders."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from selenium import webdriver
from support.browsing import Page, find_programs, open_browser, set_mode
from support.site import Site, serving


@pytest.fixture(scope="package")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    if find_programs() is None:
        pytest.skip("chromium and chromedriver are not installed (packages chromium and chromium-driver)")
    with serving(tmp_path_factory.mktemp("browser") / "home") as site:
        yield site


@pytest.fixture(scope="module")
def live_run(site: Site) -> Iterator[str]:
    """A run that lasts as long as the tests of a file: a page takes longer with each hundred steps."""
    yield (run := site.submit_live("live run"))
    site.http.post(f"/runs/{run}/cancel").raise_for_status()


@pytest.fixture(scope="package")
def browser(site: Site) -> Iterator[webdriver.Chrome]:
    with open_browser() as driver:
        yield driver


@pytest.fixture
def page(site: Site, browser: webdriver.Chrome) -> Iterator[Page]:
    """The dashboard, signed in with this machine's token; each load is a session of its own."""
    yield Page(browser, site.dashboard.url, site.dashboard.cookie)
    set_mode(browser, "light")
    browser.get("about:blank")  # a live page would go on refreshing
