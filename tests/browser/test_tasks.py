"""Tasks of a visitor, from the list of runs to the answer: at most half of the clicks that they took before.

A click is a press of the pointer. What is typed is not counted.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.browsing import Page
from support.site import Site

WHOLE = "view.scale('x').domain()"


def named(page: Page, name: str) -> None:
    """Open a run of the list by its name."""
    page.click(page.wait(lambda: next(e for e in page.all(".rows-table tbody a") if e.text == name), name))
    page.wait(lambda: page.query.get("view") == ["run"], "the run")


def best_run(site: Site, page: Page) -> None:
    page.press("Accuracy")
    page.wait(lambda: page.query.get("sort") == ["score"], "the order")
    page.settle()
    runs = site.http.get("/runs", params={"sort": "score", "order": "desc"}).json()["items"]
    assert page.one(".rows-table tbody a").text == runs[0]["name"]


def did_the_gate_fire(_: Site, page: Page) -> None:
    named(page, "fired")
    page.shows("The gate fired at step 20 (largest z")


def why_it_ended(_: Site, page: Page) -> None:
    named(page, "demo")
    page.shows("Finished at step 30 of 30: steps done.")


def equal_passes(_: Site, page: Page) -> None:
    for name in ("demo", "demo-grpo"):
        box = f"input[aria-label='Select {name}']"
        page.click(page.one(box))
    page.shows("GXPO K=5 is 0.7 points below GRPO after 30 backward passes")


def what_differs(_: Site, page: Page) -> None:
    for name in ("demo", "demo-grpo"):
        page.click(page.one(f"input[aria-label='Select {name}']"))
    page.shows("Settings that differ")
    page.shows("learner.rule.name")


def worst_sample(_: Site, page: Page) -> None:
    named(page, "demo")
    page.press("Samples")
    page.shows("Gold answer")
    assert page.text.index("✘ wrong") < page.text.index("✔ correct")


@pytest.mark.parametrize(
    ("task", "before"),
    [(best_run, 2), (did_the_gate_fire, 3), (why_it_ended, 3), (equal_passes, 4), (what_differs, 5), (worst_sample, 4)],
    ids=lambda part: getattr(part, "__name__", ""),
)
def test_a_task_takes_half_of_the_clicks(
    site: Site, page: Page, task: Callable[[Site, Page], None], before: int
) -> None:
    page.open("runs")
    page.one(".rows-table tbody a")
    page.script("window.clicks = 0; addEventListener('pointerdown', () => { clicks += 1; }, true)")
    task(site, page)
    assert 0 < page.script("return clicks") <= before / 2
