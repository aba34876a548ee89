"""Ten tasks of a visitor in the dashboard: clicks, and seconds of a practised visitor.

The tasks are those of tests/browser/test_tasks.py, from the list of runs to the answer, on the same site. Seconds are
what hands and decisions take by the keystroke-level model (Card, Moran and Newell 1980: 1.35 s to decide on a step,
1.1 s to point, 0.2 s for a click, 0.28 s for a key), plus all that passes while page and browser work. The second of
two tries counts. Before: the dashboard before its third edition, by the same model; two tasks were not timed.
Goal: half.

    python -m benchmarks.dashboard_tasks
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.remote.webelement import WebElement

from benchmarks.measure import Figure, save, single

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from browser import test_tasks as tasks
from support.browsing import Page, find_programs, open_browser
from support.site import Site, serving

DECIDE_S, POINT_S, CLICK_S, KEY_S = 1.35, 1.1, 0.2, 0.28
BEFORE: dict[str, tuple[tasks.Task, int, float | None]] = {
    "best run": (tasks.best_run, 2, 6.9),
    "did the gate fire, and why did it end": (tasks.whether_the_gate_fired_and_why_it_ended, 3, 9.9),
    "which is better at equal passes, and what differs": (tasks.equal_passes_and_what_differs, 4, None),
    "worst sample": (tasks.worst_sample, 4, 15.6),
    "zoom, and share it": (tasks.zoomed_and_shared, 3, 14.0),
    "a sweep of three": (tasks.sweep_of_three, 6, 25.1),
    "a sweep of three, by keys": (tasks.sweep_by_keys, 6, 25.1),
    "clone with one change": (tasks.clone_with_one_change, 5, 20.6),
    "cancel": (tasks.cancel, 4, 13.2),
}
"""Tasks with clicks and seconds before."""


class Keys(ActionChains):
    """Keys that take time: `send_keys` presses each by `key_down`."""

    def __init__(self, page: TimedPage) -> None:
        super().__init__(page.driver)
        self._page = page

    def key_down(self, value: str, element: WebElement | None = None) -> Keys:
        self._page.hands_s += KEY_S
        super().key_down(value, element)
        return self


class TimedPage(Page):
    """Adds up what hands and decisions take. What is typed into a box is decided on with the click into it."""

    hands_s = 0.0

    def keys(self) -> Keys:
        return Keys(self)

    def click(self, element: WebElement) -> None:
        self.hands_s += DECIDE_S + POINT_S + CLICK_S
        super().click(element)

    def press(self, label: str) -> None:
        self.hands_s += DECIDE_S + POINT_S + CLICK_S
        super().press(label)

    def drag(self, key: str, start: float, end: float) -> None:
        self.hands_s += DECIDE_S + 2 * POINT_S + CLICK_S
        super().drag(key, start, end)

    def tab_to(self, label: str, text: str) -> None:
        self.hands_s += DECIDE_S
        super().tab_to(label, text)

    def shortcut(self, key: str) -> None:
        self.hands_s += DECIDE_S if key != "a" else 0.0  # Ctrl+A belongs to what is typed
        super().shortcut(key)


def timed(site: Site, page: TimedPage, task: tasks.Task) -> tuple[int, float, float]:
    """Clicks, seconds of hands and decisions, and seconds of the page."""
    tasks.prepare(site, page, task)
    page.hands_s, begun = 0.0, time.monotonic()
    task(site, page)
    return int(page.script("return clicks")), page.hands_s, time.monotonic() - begun


def figures() -> list[Figure]:
    found = []
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gxpo-bench-"))) / "home"
        site, driver = stack.enter_context(serving(home)), stack.enter_context(open_browser())
        page = TimedPage(driver, site.dashboard.url, site.dashboard.cookie)
        for title, (task, before, seconds) in BEFORE.items():
            clicks, hands, waits = [timed(site, page, task) for _ in range(2)][-1]
            found.append(single(f"{title}: clicks", clicks, at_most=before / 2))
            words = f"{title}: seconds, {waits:.1f} of them the page's"
            found.append(single(words, hands + waits, "s", at_most=seconds and seconds / 2))
    return found


def main() -> None:
    if find_programs() is None:
        print("dashboard_tasks: chromium and chromedriver are not installed; nothing is measured")
        return
    save("dashboard_tasks", figures(), {})


if __name__ == "__main__":
    main()
