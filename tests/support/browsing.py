"""A page of the dashboard in headless Chromium, as its visitor sees it, and what Vega holds behind its charts."""

from __future__ import annotations

import io
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeVar
from urllib.parse import parse_qs, urlencode, urlsplit

from PIL import Image
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.actions.wheel_input import ScrollOrigin
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from support.contrast import contrast

T = TypeVar("T")
Mode = Literal["light", "dark"]
WAIT_S = 90.0
POLL_S = 0.15
_ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-proxy-server")
BUSY = "[data-testid=stSkeleton], [data-testid=stAppSkeleton], [data-testid=stStatusWidget], [data-stale=true]"

# Streamlit keeps the view of a chart in a hook of the chart's component; Vega has no other way to it.
_VIEW = """
const chart = document.querySelector(arguments[0] + ' [data-testid=stVegaLiteChart]');
if (!chart) return null;
const name = Object.keys(chart).find(key => key.startsWith('__reactFiber$'));
let view = null;
for (let fiber = chart[name], depth = 0; fiber && depth < 40 && !view; fiber = fiber.return, depth++) {
  for (let hook = fiber.memoizedState; hook && typeof hook === 'object' && !view; hook = hook.next) {
    const held = hook.memoizedState && hook.memoizedState.current;
    if (held && typeof held.getState === 'function' && typeof held.scale === 'function') view = held;
  }
}
if (!view) return null;
"""

# What takes a click on the centre of an element, when it is neither the element nor a part of its control.
_COVER = """
const cover = element => {
  element.scrollIntoView({block: 'center', behavior: 'instant'});
  const control = element.closest('label, [data-baseweb=select]') || element;
  const box = (element.matches('label *') ? control : element).getBoundingClientRect();
  const top = document.elementFromPoint((box.left + box.right) / 2, (box.top + box.bottom) / 2);
  return control.contains(top) ? null : top ? top.outerHTML.slice(0, 200) : 'nothing';
};
"""
COVERED = f"""{_COVER}
const boxes = 'summary, input:enabled, textarea:enabled, [data-testid=stDataFrame]';
const roots = arguments[0] ? [...document.querySelectorAll(arguments[0])] : [document];
return roots.flatMap(root => [...root.querySelectorAll(`a[href]:not([href^="#"]), button:enabled, ${{boxes}}`)])
  .filter(item => (item.closest('label') || item).checkVisibility({{opacityProperty: true, visibilityProperty: true}}))
  .map(item => [item.innerText || item.ariaLabel || item.outerHTML.slice(0, 200), cover(item)])
  .filter(([, top]) => top !== null);
"""

# Eight looks in a row, so that what a click begins has begun.
_AT_REST = """
const [busy, limit, done] = arguments, deadline = performance.now() + limit;
let calm = 0;
const look = () => {
  calm = document.querySelector('h1') && !document.querySelector(busy) ? calm + 1 : 0;
  if (calm >= 8 || performance.now() > deadline) done(calm >= 8);
  else setTimeout(look, 50);
};
look();
"""

TEXTS = """(() => {
  const texts = [];
  const walk = (mark, x, y) => (mark.items || []).forEach(item => {
    if (mark.marktype === 'group') (item.items || []).forEach(part => walk(part, x + (item.x || 0), y + (item.y || 0)));
    else if (mark.marktype === 'text' && item.text) {
      const box = item.bounds;
      texts.push([String(item.text), [x + box.x1, y + box.y1, x + box.x2, y + box.y2]]);
    }
  });
  walk(view.scenegraph().root, ...view.origin());
  return texts;
})()"""
"""Every text of a chart and its box in pixels from the chart's corner."""


def find_programs() -> tuple[str, str] | None:
    """Chromium and its driver, None when one is missing."""
    program, driver = shutil.which("chromium") or shutil.which("chromium-browser"), shutil.which("chromedriver")
    return (program, driver) if program and driver else None


@contextmanager
def open_browser(
    *, width: int = 1280, height: int = 1000, mode: Mode = "light", resolve: str = ""
) -> Iterator[webdriver.Chrome]:
    """A headless Chromium with a profile of its own.

    resolve: rules such as `MAP name 127.0.0.1` that stand for a name server. Raises RuntimeError when a program is
    missing.
    """
    programs = find_programs()
    if programs is None:
        raise RuntimeError("chromium and chromedriver are missing; install the packages chromium and chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = programs[0]
    for argument in (*_ARGUMENTS, f"--window-size={width},{height}"):
        options.add_argument(argument)
    if resolve:
        options.add_argument(f"--host-resolver-rules={resolve}")
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(programs[1]))
    try:
        driver.set_script_timeout(WAIT_S + 30)
        set_mode(driver, mode)
        yield driver
    finally:
        driver.quit()


def set_mode(driver: webdriver.Chrome, mode: Mode) -> None:
    """The colour scheme that the visitor's system asks for."""
    scheme = {"features": [{"name": "prefers-color-scheme", "value": mode}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", scheme)


class Page:
    """What a visitor does and sees. Every look waits for what it looks for; nothing sleeps for a fixed time."""

    def __init__(self, driver: webdriver.Chrome, url: str, cookie: Mapping[str, str] | None = None) -> None:
        """cookie: of a visitor who has signed in by link (DashboardProcess.cookie)."""
        self.driver, self.url = driver, url
        driver.execute_cdp_cmd("Network.clearBrowserCookies", {})
        if cookie is not None:
            driver.execute_cdp_cmd("Network.setCookie", dict(cookie))

    def open(self, view: str = "", **query: Any) -> None:
        """Load a view with its parameters."""
        words = {"view": view, **query} if view else query
        self.driver.get(f"{self.url}/?{urlencode(words, doseq=True)}")
        self.settle()

    def wait(self, what: Callable[[], T], description: str) -> T:
        """Wait until `what` returns a true value, and return it. Redrawn elements are located again."""
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                if value := what():
                    return value
            except StaleElementReferenceException:
                pass
            if time.monotonic() > deadline:
                raise self._missed(description)
            time.sleep(POLL_S)

    def _missed(self, description: str) -> AssertionError:
        shown = " ".join(self.text.split())[:2000]
        return AssertionError(f"waited {WAIT_S:g} s for {description}; the page shows:\n{shown}")

    def settle(self) -> None:
        """Until the page has its title and nothing is being drawn. The page looks itself: between two looks from here
        a page that refreshes itself may have begun again each time."""
        if not self.driver.execute_async_script(_AT_REST, BUSY, 1000 * WAIT_S):
            raise self._missed("the page to be drawn")

    @property
    def text(self) -> str:
        return str(self.driver.execute_script("return document.body.innerText"))

    def shows(self, words: str) -> None:
        self.wait(lambda: words in self.text, f"{words!r}")

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        return self.wait(lambda: next(iter(self.all(selector)), None), selector)  # type: ignore[return-value]

    def button(self, label: str) -> WebElement | None:
        """A button with these words, None while there is none that can be pressed."""
        buttons = self.driver.find_elements(By.XPATH, f"//button[contains(normalize-space(.), {label!r})]")
        return next((item for item in buttons if item.is_displayed() and item.is_enabled()), None)

    def press(self, label: str) -> None:
        def pressed() -> bool:
            button = self.button(label)
            if button is not None:
                button.click()
            return button is not None

        self.wait(pressed, f"the button {label!r}")

    def click(self, element: WebElement) -> None:
        """Click the centre of a control; fails where something else takes the click."""
        top = self.cover(element)
        assert top is None, f"the click is intercepted by {top}"
        self.keys().click(element).perform()

    def cover(self, element: WebElement) -> str | None:
        """What takes a click on the centre of a control in its place, if anything does."""
        return self.script(f"{_COVER} return cover(arguments[0]);", element)  # type: ignore[no-any-return]

    def covered(self, width: int, within: str | None = None) -> list[tuple[str, str]]:
        """Controls of the page, in a window of this width, whose centre is covered, each with what covers it. within:
        selector of the parts that are looked at."""
        with self.sized(width):
            self.settle()
            return [(control, top) for control, top in self.script(COVERED, within)]

    @contextmanager
    def sized(self, width: int) -> Iterator[None]:
        """In a window of this width."""
        size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        try:
            yield
        finally:
            self.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

    def script(self, source: str, *arguments: Any) -> Any:
        return self.driver.execute_script(source, *arguments)

    def chart(self, key: str, expression: str) -> Any:
        """A JavaScript expression of `view`, the Vega view of the chart with this key; None while it is not drawn."""
        return self.script(f"{_VIEW} return {expression};", f'[class*="st-key-"][class*="{key}"]')

    def chart_of(self, title: str, expression: str) -> Any:
        """The same of the chart in the card with this title: a chart that cannot be zoomed shows no key."""
        mark = """
        const head = [...document.querySelectorAll('h5')].find(item => item.innerText.includes(arguments[0]));
        if (head) head.closest('[data-testid=stVerticalBlock]').dataset.card = arguments[0];
        """
        self.script(mark, title)
        return self.script(f"{_VIEW} return {expression};", f'[data-card="{title}"]')

    @property
    def query(self) -> Mapping[str, list[str]]:
        """Of the address."""
        return parse_qs(urlsplit(self.driver.current_url).query)

    # What a visitor does

    def fill(self, label: str, text: str) -> None:
        """Type into the box with this label, and confirm."""
        named = f'input[aria-label="{label}"]'

        def has_focus() -> bool:
            # A redraw may take the focus away.
            self.click(self.one(named))
            return self.driver.switch_to.active_element == self.one(named)

        self.wait(has_focus, f"the box {label!r} to take the keys")
        self._replace(text)

    def _replace(self, text: str) -> None:
        self.shortcut("a")
        self.keys().send_keys(text).send_keys(Keys.ENTER).perform()

    def tab_to(self, label: str, text: str) -> None:
        """Go to the box with this label by Tab, and type."""
        for _ in range(100):
            if self.driver.switch_to.active_element.get_attribute("aria-label") == label:
                self._replace(text)
                return self.settle()
            self.keys().send_keys(Keys.TAB).perform()
        raise AssertionError(f"no Tab leads to {label!r}")

    def shortcut(self, key: str) -> None:
        """Ctrl and a key."""
        self.keys().key_down(Keys.CONTROL).send_keys(key).key_up(Keys.CONTROL).perform()

    def go_to(self, words: str, first: str = "") -> None:
        """Open what the search finds for these words, by keys alone: one match, or the first of several."""
        self.shortcut("k")
        box = "return document.activeElement.matches('[role=dialog] input')"
        self.wait(lambda: self.script(box), "the search to have the focus")
        self.keys().send_keys(words).perform()

        def found() -> bool:
            matches = self.all("[class*=st-key-palette-]")
            return matches[0].text.endswith(first) if first and matches else len(matches) == 1

        self.wait(found, f"the match of {words!r}")
        # A page that refreshes itself may never be at rest as a whole.
        self.wait(lambda: not self.all("[role=dialog] [data-stale=true]"), "the search to be drawn")
        self.keys().send_keys(Keys.TAB, Keys.ENTER).perform()
        self.wait(
            lambda: not any("Go to" in dialog.text for dialog in self.all("[role=dialog]")), "the search to close"
        )

    def choose(self, label: str, option: str) -> None:
        """An option of a select box, or one more of a box for several."""
        self.settle()
        named = f'input[aria-label*="{label}"][role=combobox]'

        def offered() -> WebElement | None:
            if self.one(named).get_attribute("aria-expanded") != "true":
                self.click(self.one(named))
            return next((item for item in self.all("[role=option]") if item.text == option), None)

        item = self.wait(offered, f"the option {option!r}")
        assert item is not None
        item.click()
        self.keys().send_keys(Keys.ESCAPE).perform()
        self.settle()

    def select_row(self, row: int) -> None:
        """Mark a row of the table by its box, once the table is at rest: an expander above it may still be opening."""
        places = [{"y": -1}]

        def rests() -> bool:
            places.append(self.all(".rows-table tbody input")[row].location)
            return places[-1] == places[-2]

        self.wait(lambda: len(self.all(".rows-table tbody input")) > row and rests(), "the row at rest")
        self.click(self.all(".rows-table tbody input")[row])

    def point_at(self, key: str, x: float, y: float, *, press: bool = False) -> None:
        """Move the pointer to these pixels of a chart, from its corner, and press there if asked."""
        chart = self._drawing(key)
        half = {side: chart.size[side] / 2 for side in ("width", "height")}
        self.keys().move_to_element_with_offset(chart, round(x - half["width"]), round(y - half["height"])).perform()
        if press:
            self.keys().click().perform()

    def _drawing(self, key: str) -> WebElement:
        chart = self.one(f'[class*="{key}"] [data-testid=stVegaLiteChart] canvas, [class*="{key}"] .marks')
        self.script("arguments[0].scrollIntoView({block: 'center'})", chart)
        return chart

    def wheel(self, key: str) -> None:
        """Turn the wheel over the middle of a chart, downwards."""
        chart = self._drawing(key)
        self.keys().scroll_from_origin(ScrollOrigin.from_element(chart), 0, 200).perform()

    def drag(self, key: str, start: float, end: float) -> None:
        """Drag over a chart between these shares of its width, with a pause before the button is released."""
        chart = self._drawing(key)
        places = [round((share - 0.5) * chart.size["width"]) for share in (start, (start + end) / 2, end)]
        keys = self.keys().move_to_element_with_offset(chart, places[0], 0).click_and_hold()
        for place in places[1:]:
            keys = keys.move_to_element_with_offset(chart, place, 0).pause(0.4)
        keys.release().perform()

    def scroll_to(self, top: int) -> None:
        self.script("document.querySelector('[data-testid=stMain]').scrollTop = arguments[0]", top)
        self.wait(lambda: self.scrolled == top, f"the page at {top} pixels")

    @property
    def scrolled(self) -> int:
        return int(self.script("return document.querySelector('[data-testid=stMain]').scrollTop"))

    def mark(self) -> None:
        """Leave a mark that any navigation or reload would wipe away."""
        self.script("window.gxpoMark = 1")

    def assert_marked(self) -> None:
        assert self.script("return window.gxpoMark") == 1, "the page was reloaded"

    def card(self, title: str) -> str:
        """The words of the card with this title."""
        cards = self.driver.find_elements(
            By.XPATH, f"//h5[contains(., {title!r})]/ancestor::*[@data-testid='stVerticalBlock'][1]"
        )
        return cards[0].text if cards else ""

    def keys(self) -> ActionChains:
        return ActionChains(self.driver)


# Pictures of charts as a visitor sees them, and the contrast of their pixels.


CHART = "[data-testid=stVegaLiteChart]"


def picture(page: Page, selector: str) -> Image.Image:
    chart = page.one(selector)
    page.script("arguments[0].scrollIntoView({block: 'center'})", chart)
    page.settle()
    return Image.open(io.BytesIO(chart.screenshot_as_png)).convert("RGB")


def text_contrast(words: Image.Image) -> float:
    """The highest contrast of a pixel of the words with their most frequent colour, the background."""
    counted = sorted(words.getcolors(1 << 20) or ())
    back = color(counted[-1][1])  # type: ignore[arg-type]
    return max(contrast(back, color(pixel)) for _, pixel in counted)  # type: ignore[arg-type]


def color(pixel: tuple[int, ...]) -> str:
    return "#{:02x}{:02x}{:02x}".format(*pixel)
