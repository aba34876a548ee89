"""Tasks of a visitor, from the list of runs to the answer: at most half of the clicks that they took before.

A click is a press of the pointer. What is typed is not counted.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from selenium.webdriver.common.keys import Keys
from support.browsing import Page
from support.site import Site

Task = Callable[[Site, Page], None]
FOCUSED = "return document.activeElement.ariaLabel"


def named(page: Page, name: str) -> None:
    """Open a run of the list by its name."""

    def clicked() -> bool:
        link = next((item for item in page.all(".rows-table tbody a") if item.text == name), None)
        if link:
            page.click(link)
        return link is not None

    page.wait(clicked, name)
    page.wait(lambda: page.query.get("view") == ["run"], "the run")


def best_run(site: Site, page: Page) -> None:
    best = site.http.get("/runs", params={"sort": "score", "order": "desc"}).json()["items"][0]
    page.shows(f"Most accurate on {' and '.join(best['benchmarks'])}: {best['name']}, {100 * best['score']:.1f}% ")


def zoomed_and_shared(_: Site, page: Page) -> None:
    named(page, "fired")
    page.drag("-reward", 0.4, 0.6)
    page.wait(lambda: {"from", "to"} <= page.query.keys(), "the range in the address, which others open")


def whether_the_gate_fired_and_why_it_ended(_: Site, page: Page) -> None:
    named(page, "fired")
    page.shows("The gate fired at step 20 (largest z")
    page.shows("Finished at step 30 of 30: steps done.")


def equal_passes_and_what_differs(_: Site, page: Page) -> None:
    for name in ("demo", "demo-grpo"):
        page.click(page.one(f"input[aria-label='Select {name}']"))
    page.shows("GXPO K=5 is 0.7 points below GRPO after 30 backward passes")
    page.shows("Settings that differ")
    page.shows("learner.rule.name")


def worst_sample(_: Site, page: Page) -> None:
    named(page, "demo")
    page.press("Samples")
    page.shows("Gold answer")
    assert page.text.index("✘ wrong") < page.text.index("✔ correct")


def sweep_of_three(site: Site, page: Page) -> None:
    page.press("Submit")
    page.shows("Valid. At most")
    page.fill("Optimizer learning rate", "1e-5, 2e-5, 4e-5")
    page.shows("3 settings × 1 seed = 3 runs, about ")
    submitted(site, page)


def sweep_by_keys(site: Site, page: Page) -> None:
    page.go_to("submit")
    page.wait(lambda: page.script(FOCUSED) == "Name", "the form to have the keys")
    page.tab_to("Optimizer learning rate", "1e-5, 2e-5, 4e-5")
    page.shows("3 settings × 1 seed = 3 runs, about ")
    submitted(site, page)


def clone_with_one_change(site: Site, page: Page) -> None:
    named(page, "fired")
    page.press("Clone")
    page.wait(lambda: page.script(FOCUSED) == "Name", "the form to have the keys")
    page.tab_to("Rule K", "7")
    submitted(site, page)


def cancel(site: Site, page: Page) -> None:
    named(page, "to cancel")
    page.press("Cancel")
    confirmed(site, page)


def confirmed(site: Site, page: Page) -> None:
    """Enter confirms that a run is cancelled: nothing of it is lost."""
    (run,) = page.query["run"]
    page.shows("A run stops at the end of its step")
    button = "return document.activeElement.closest('.st-key-confirm-cancel') !== null"
    page.wait(lambda: page.script(button), "the button to have the keys")
    page.keys().send_keys(Keys.ENTER).perform()
    page.wait(lambda: site.state(run) == "cancelled", "the end of the run")


def submitted(site: Site, page: Page) -> None:
    """Submit by a key, and cancel what came of it."""
    page.settle()
    page.shortcut(Keys.ENTER)
    if group := page.wait(lambda: page.query.get("view") != ["submit"] and page.query, "the end").get("group"):
        assert len(site.http.get(f"/groups/{group[0]}").json()["runs"]) == 3
        site.http.post(f"/groups/{group[0]}/cancel").raise_for_status()
    else:
        run = page.wait(lambda: page.query.get("run"), "the run")[0]
        made = site.http.get(f"/runs/{run}").json()
        assert (made["name"], made["parent_id"], made["parent_kind"]) == ("fired clone", site.fired, "clone")
        original = site.http.get(f"/runs/{site.fired}").json()["config"]
        original["learner"]["rule"]["k"] = 7
        assert made["config"] == original | {"name": "fired clone"}
        site.http.post(f"/runs/{run}/cancel").raise_for_status()


def prepare(site: Site, page: Page, task: Task) -> None:
    """The list of runs, from which each task begins; its clicks are counted."""
    if task is cancel:
        site.submit_live("to cancel")
    page.open("runs")
    page.one(".rows-table tbody a")
    page.script("window.clicks = 0; addEventListener('pointerdown', () => { clicks += 1; }, true)")


@pytest.mark.parametrize(
    ("task", "before"),
    [
        (best_run, 2), (whether_the_gate_fired_and_why_it_ended, 3), (equal_passes_and_what_differs, 4),
        (worst_sample, 4), (sweep_of_three, 6), (clone_with_one_change, 4), (cancel, 4),
    ],
    ids=lambda part: getattr(part, "__name__", ""),
)  # fmt: skip
def test_a_task_takes_half_of_the_clicks(site: Site, page: Page, task: Task, before: int) -> None:
    prepare(site, page, task)
    task(site, page)
    clicks = page.script("return clicks")
    assert (clicks == 0) == (task is best_run), "its name is on the page"
    assert clicks <= before / 2


@pytest.mark.long("the same tasks; keys of the list: test_reading.py")
def test_the_tasks_by_keys_alone(site: Site, page: Page) -> None:
    prepare(site, page, best_run)
    page.go_to("most accurate")
    page.wait(lambda: page.query.get("sort") == ["score_best"], "the best run")
    page.go_to("fired", "fired · ✔ succeeded")
    page.shows("The gate fired at step 20 (largest z")
    page.shows("Finished at step 30 of 30: steps done.")
    curves = "const at = document.activeElement; return at.matches('button') && at.innerText.includes('Curves')"
    while not page.script(curves):
        page.keys().send_keys(Keys.TAB).perform()
    page.keys().send_keys(Keys.ENTER).perform()
    page.tab_to("Visible from", "10")
    page.tab_to("Visible to", "20")
    page.wait(lambda: (page.query.get("from"), page.query.get("to")) == (["10"], ["20"]), "the range in the address")
    page.keys().send_keys(Keys.ESCAPE).perform()
    page.go_to("run samples")
    page.shows("Gold answer")
    page.go_to("details config")
    page.shows(" differ from preset demo.")
    page.go_to("run clone")
    page.shows("Settings of the run fired.")
    page.shows("Valid. At most")
    page.tab_to("Rule K", "7")
    submitted(site, page)
    sweep_by_keys(site, page)
    run = site.submit_live("by keys")
    page.go_to("by keys")
    page.wait(lambda: page.query.get("run") == [run], "the run")
    page.go_to("run cancel")
    confirmed(site, page)
    page.go_to("fired", "fired · ✔ succeeded")
    page.shows("The gate fired at step 20 (largest z")
    page.go_to("all runs")
    page.settle()
    page.one(".rows-table tbody a")
    page.keys().send_keys("jxjxc").perform()
    page.wait(lambda: len(page.query.get("runs", [])) == 2, "the comparison")
    assert page.script("return clicks") == 0
