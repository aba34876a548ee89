"""Every view: no serious fault of axe-core's that an empty page of Streamlit lacks, and no control that is covered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from axe_core_python.selenium import Axe
from selenium import webdriver
from selenium.webdriver.common.keys import Keys
from support.browsing import Mode, Page, set_mode
from support.dashboard_process import DashboardProcess
from support.site import Site

from gxpo_dashboard.views.run import PARTS

EMPTY_PAGE = 'import streamlit as st\n\nst.set_page_config(page_title="Empty")\nst.title("Empty")\n'
SERIOUS = {"serious", "critical"}
POPOVER, OPENED = '[data-testid="stPopover"] button', '[data-testid="stPopoverBody"]'
CLOSED = "details:not([open])>summary"


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory, browser: webdriver.Chrome) -> Iterator[Counter[str]]:
    """Serious faults of a page of Streamlit with a title alone."""
    folder = tmp_path_factory.mktemp("empty")
    (folder / "page.py").write_text(EMPTY_PAGE, encoding="utf-8")
    with DashboardProcess(folder / "log", page=folder / "page.py").running() as process:
        page = Page(browser, process.url)
        page.open()
        yield Counter(rule for rule, _ in faults(page))


VIEWS = ("runs", "run", "compare", "benchmarks", "submit")
SECTIONS = [section for part in PARTS for section in PARTS[part] if section != "Overview"]
LIGHT: list[tuple[str, Mode]] = [*((view, "light") for view in VIEWS), *((f"run {name}", "light") for name in SECTIONS)]
CHARTS = {"run Look-ahead", "run Policy", "run System"}
# Of the others, what axe sees differs only in the charts, which are canvases to it.
PARTS_IN_DARK = [f"run {part}" for part in ("Metrics", "Samples", "Events", "Log", "Config", "Checkpoints")]
dark = pytest.mark.long("the same elements in other colours")
charts = pytest.mark.long("charts and headings, as in Gate and Metrics")
VISITS = [
    *(pytest.param(visit, marks=charts if visit[0] in CHARTS else ()) for visit in LIGHT),
    *(pytest.param((view, "dark"), marks=dark) for view in (*VIEWS, *PARTS_IN_DARK)),
]


def test_a_fault_is_named_where_there_is_one(page: Page) -> None:
    body = "<main><h1>A page</h1><button></button><button>Go</button><b style='position:fixed;inset:0'>lid</b></main>"
    page.driver.get(f"data:text/html,<html lang=en><title>A page</title>{body}")
    assert [rule for rule, _ in faults(page)] == ["button-name"]
    assert [top.endswith(">lid</b>") for _, top in page.covered(1280)] == [True, True]


@pytest.fixture(params=VISITS, ids=lambda visit: "-".join(visit).replace(" ", "-"))
def visited(site: Site, browser: webdriver.Chrome, request: pytest.FixtureRequest) -> Iterator[Page]:
    """A view with recorded runs."""
    both = list(site.recorded.values())
    queries: dict[str, dict[str, Any]] = {
        "run": {"run": site.recorded["demo"]},
        "compare": {"runs": both},
        "benchmarks": {"runs": both},
        "submit": {"sweep": "rules"},
    }
    view, mode = request.param
    name, _, part = view.partition(" ")
    page = Page(browser, site.dashboard.url, site.dashboard.cookie)
    set_mode(browser, mode)
    page.open(name, **queries.get(name, {}), **({"part": part} if part else {}))
    page.one(POPOVER)  # which neither an error page nor that of `baseline` has
    page.settle()
    yield page
    set_mode(browser, "light")


def test_no_view_has_a_serious_fault_of_its_own(visited: Page, baseline: Counter[str]) -> None:
    violations = faults(visited)
    own = Counter(rule for rule, _ in violations) - baseline
    assert not own, [fault for fault in violations if fault[0] in own]


def test_every_control_takes_a_click_on_its_centre(visited: Page) -> None:
    assert {width: covered for width in (1280, 1920) if (covered := visited.covered(width))} == {}


WITH_FORMS = ("runs", "run")
MORE = pytest.mark.long("popovers of the same kinds")


@pytest.mark.parametrize(
    "visited", [pytest.param((v, "light"), marks=() if v in WITH_FORMS else MORE) for v in VIEWS], indirect=True
)
def test_every_control_in_what_opens_takes_a_click_on_its_centre(visited: Page) -> None:
    dialogs = ["Search", *(["Edit…", "Delete…"] if visited.query.get("view") == ["run"] else [])]
    opened = [*((visited.press, name, "[role=dialog]") for name in dialogs)]
    opened += [(visited.click, button, OPENED) for button in visited.all(POPOVER) if button.is_displayed()]
    assert len(opened) > len(dialogs)
    for open_, control, body in opened:
        open_(control)
        visited.one(f"{body} button, {body} input")
        for width in (1280, 1920):
            assert visited.covered(width, body) == []
        visited.keys().send_keys(Keys.ESCAPE).perform()
        visited.wait(lambda body=body: not visited.all(body), f"the end of {control}")
    while drawers := [drawer for drawer in visited.all(CLOSED) if drawer.is_displayed()]:
        visited.click(drawers[0])
        visited.settle()
    assert visited.covered(1280) == []


def faults(page: Page) -> list[tuple[str, str]]:
    """Rule and element of each serious violation."""
    axe = Axe()
    page.script(axe.axe_script)
    answer = page.driver.execute_async_script(
        "const done = arguments[arguments.length - 1];"
        "axe.run(document, {resultTypes: ['violations']}).then(done, error => done({error: String(error)}));"
    )
    assert "error" not in answer, answer
    return [
        (violation["id"], f"{node['target']}: {node['html'][:200]}")
        for violation in answer["violations"]
        if violation["impact"] in SERIOUS
        for node in violation["nodes"]
    ]
