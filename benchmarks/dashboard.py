"""The dashboard in a browser: 20 runs × 5,000 points compared, 500 refreshes, 10,000 runs in the table.

A real API process (`gxpo serve`, SQLite), the real dashboard and headless Chromium, all on this machine. The 20 runs
are a sweep of four configurations with five seeds; each reports one step per second while the page is open, so that
every refresh has something new to draw.

- first picture: from the moment that the browser asks for the view to the frame after the chart of accuracy is drawn.
  A new session each time: nothing is kept but the browser's cache. What comes before is Streamlit's own page
- both charts: the same to the frame after the chart of a training metric with its 20 lines is drawn, too
- whole: that from the start of the navigation; `empty page` is a page of Streamlit with nothing but a title
- refresh: from the browser's request for a part of the page to the last change of the page or frame that it leads to
- refresh, in the server: from a request to the end of its answer, by a client that draws nothing
- memory: resident memory of the dashboard's process over 500 refreshes of one session by that client, each with a new
  step of every run; the slope is that of a line through the second half
- fetched: bytes from the service to the dashboard while one visitor, or two, have the comparison open
- table of 10,000 runs: its first picture, as above; from a click on a name to the title of that run; a search, from
  Enter to the frame that shows its total; the next part of the list, from the press to its frame

    python -m benchmarks.dashboard [--loads 7] [--refreshes 500] [--watch-s 60] [--runs 10000]
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import numpy as np
import psutil
from selenium import webdriver

from benchmarks.measure import Figure, median, save, single
from benchmarks.service import Api
from benchmarks.service_data import add_runs
from benchmarks.visitors import Relay, Visitor, visiting

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support import reported_runs, reporting
from support.browsing import Page, find_programs, open_browser
from support.dashboard_process import DashboardProcess

from gxpo_dashboard.session.visitor import RETRY_S

SEEDS, STEPS, BATCH, EVALUATED = 5, 5_000, 1_000, 250
RULES: tuple[dict[str, Any], ...] = (
    {"name": "grpo"}, {"name": "sfpo", "k": 3}, {"name": "gxpo", "k": 3}, {"name": "gxpo", "k": 10},
)  # fmt: skip
EMPTY_PAGE = 'import streamlit as st\n\nst.title("Empty")\n'
DRAWN_BYTES = 10_000
"""Least size of an answer that holds curves of 20 runs or the comparison; the banner's is smaller."""
FETCH_ROUNDS, FETCH_PAUSE_S = 20, 2.0
FLAT_KIB = 4.0
"""A refresh may keep so much on average: 500 of them 2 MiB, which is less than the process itself varies."""

# Notes when the view was asked for, when a refresh was asked for and when its last change was seen.
HOOKS = """
window.gxpo = {asked: null, refreshes: []};
const note = () => { const all = gxpo.refreshes; if (all.length) all[all.length - 1].end = performance.now(); };
const send = WebSocket.prototype.send;
WebSocket.prototype.send = function (data) {
  gxpo.asked = gxpo.asked ?? performance.now();
  gxpo.refreshes.push({start: performance.now(), end: performance.now(), bytes: 0});
  return send.call(this, data);
};
const Real = WebSocket;
window.WebSocket = class extends Real {
  constructor(...given) {
    super(...given);
    this.addEventListener('message', event => {
      const all = gxpo.refreshes;
      if (all.length) all[all.length - 1].bytes += event.data.byteLength ?? event.data.size ?? 0;
      requestAnimationFrame(() => requestAnimationFrame(note));
    });
  }
};
new MutationObserver(note).observe(document, {subtree: true, childList: true, attributes: true, characterData: true});
for (const kind of ['keydown', 'pointerdown'])
  document.addEventListener(kind, event => { if (event.key === 'Enter' || !event.key) gxpo.acted = performance.now(); },
                            true);
gxpo.until = holds => {
  const look = () => holds() ? requestAnimationFrame(() => { gxpo.done = performance.now(); })
                             : requestAnimationFrame(look);
  gxpo.done = null;
  look();
};
"""
FIRST, BOTH = (
    f"() => {keys}.every(key => "
    "document.querySelector(`[class*='${key}'] [data-testid=stVegaLiteChart] :is(canvas, svg)`))"
    for keys in ("['compare-compare-accuracy']", "['compare-compare-accuracy', '-explorer']")
)


class Runs:
    """A sweep of twenty active runs of 5,000 steps; the look-ahead runs report gate values."""

    def __init__(self, api: Api) -> None:
        self._database = api.database
        self._random = random.Random(0)
        self.group = reported_runs.add_group(self._database)
        self._launched: list[str] = []
        self._gated: set[str] = set()
        for rule in RULES:
            for seed in range(SEEDS):
                config = reported_runs.config(rule, seed, f"{rule['name']} {rule.get('k', '')}".strip())
                run = reported_runs.add_run(self._database, config, group=self.group)
                self._launched.append(reporting.launch(self._database, run))
                self._gated |= {self._launched[-1]} if rule["name"] != "grpo" else set()
                self._report_past(self._launched[-1], config.model_dump(mode="json"))
        self._step, self._batch = STEPS, STEPS // BATCH

    def step(self) -> None:
        """One more step of every run."""
        self._step, self._batch = self._step + 1, self._batch + 1
        for launched in self._launched:
            body = reporting.body(
                self._batch, metrics=[self._row(launched, self._step)], offsets={"metrics": self._step - 1}
            )
            reporting.send(self._database, launched, body)

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Report one step per second during the block."""
        over = threading.Event()

        def report() -> None:
            while not over.wait(1.0):
                self.step()

        thread = threading.Thread(target=report)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _report_past(self, launched: str, config: dict[str, Any]) -> None:
        for number in range(STEPS // BATCH):
            first = number * BATCH
            steps = range(first + 1, first + BATCH + 1)
            reporting.send(
                self._database,
                launched,
                reporting.body(
                    number + 1,
                    metrics=[self._row(launched, step) for step in steps],
                    evaluations=[self._evaluation(step) for step in steps if step % EVALUATED == 0],
                    offsets={"metrics": first, "evaluations": first // EVALUATED},
                    identity={"config": config, "policy_sha256": "policy"} if number == 0 else None,
                ),
            )

    def _row(self, launched: str, step: int) -> dict[str, Any]:
        values: dict[str, Any] = {"reward/mean": self._random.random(), "update/backward_passes_total": 3.0 * step}
        values["time/training_s"] = 20.0 * step
        if launched in self._gated:  # none shuts off: each step of each is news for the comparison
            values |= {"gate/z": self._random.gauss(0.0, 1.0), "gate/threshold": 5.0}
        return reporting.metric_row(step, **values)

    def _evaluation(self, step: int) -> dict[str, Any]:
        scores = [float(self._random.random() < 0.3 + step / 20_000) for _ in range(256)]
        record: dict[str, Any] = {
            "scores": {"pass@1": sum(scores) / len(scores)}, "per_problem": scores,
            "problem_ids": [f"p{number}" for number in range(len(scores))], "num_problems": len(scores),
            "backward_passes_total": 3 * step, "training_s": 20.0 * step, "tokens_total": 100 * step,
        }  # fmt: skip
        return reporting.evaluation_row(step, **record)


# ---- measures --------------------------------------------------------------------------------------------------


def pictures(page: Page, query: str, loads: int, condition: str) -> tuple[list[float], list[float]]:
    """Milliseconds of each load until `condition` (JavaScript) holds: from its start, and from the view's request."""
    whole, view = [], []
    for number in range(loads + 1):
        page.driver.get("about:blank")
        page.driver.get(f"{page.url}/?{query}")
        page.script(f"gxpo.until({condition})")
        page.wait(lambda: page.script("return gxpo.done"), "the picture")
        asked, done = page.script("return [gxpo.asked, gxpo.done]")
        if number:  # the first load fills the browser's cache
            whole.append(done)
            view.append(done - asked)
    return whole, view


def refreshes(page: Page, seconds: float) -> list[float]:
    """Milliseconds of each refresh of the curves or of the comparison that no other one overlapped."""
    page.script("gxpo.refreshes = []")
    until = time.monotonic() + seconds
    page.wait(lambda: time.monotonic() > until, "the refreshes")
    times = page.script("return gxpo.refreshes")
    return [
        this["end"] - this["start"]
        for before, this, after in zip(times, times[1:], times[2:], strict=False)
        if this["bytes"] >= DRAWN_BYTES and this["start"] - before["end"] > 50 and after["start"] - this["end"] > 50
    ]


def after_action(page: Page, act: Callable[[], None], condition: str) -> float:
    """Milliseconds from the visitor's key or press to the frame after `condition` (JavaScript) holds."""
    page.script(f"gxpo.until({condition})")
    act()
    page.wait(lambda: page.script("return gxpo.done"), condition)
    acted, done = page.script("return [gxpo.acted, gxpo.done]")
    return float(done - acted)


def memory(dashboard: DashboardProcess, runs: Runs, query: str, count: int) -> tuple[list[float], list[float]]:
    """Resident MiB after each refresh, and the milliseconds of those that draw the comparison or its curves."""
    process = psutil.Process(dashboard.pid)
    resident, times = [], []
    with visiting(dashboard, query) as visitor:
        parts = drawn(visitor)
        for number in range(count):
            runs.step()
            times.append(visitor.refresh(parts[number % len(parts)]))
            resident.append(process.memory_info().rss / 2**20)
    return resident, times


def drawn(visitor: Visitor) -> list[str]:
    """Parts of a page that refresh; not the one that asks whether the service is there, which draws nothing."""
    return [part for part, interval in visitor.parts.items() if interval != RETRY_S]


def fetched(home: Path, environment: dict[str, str], runs: Runs, query: str, visitors: int, *, live: bool) -> float:
    """KiB that the dashboard fetches from the service, a second and visitor: `visitors` have the comparison open, whose
    parts refresh every two seconds, while every run reports a step a second, or none does (not `live`)."""
    with Relay(environment["GXPO_URL"]) as relay, ExitStack() as stack:
        process = DashboardProcess(home / "relayed.log", environment | {"GXPO_URL": relay.url})
        dashboard = stack.enter_context(process.running())
        pages = [stack.enter_context(visiting(dashboard, query)) for _ in range(visitors)]
        with runs.going_on() if live else nullcontext():
            begun, bytes_before = time.monotonic(), relay.num_bytes
            for _ in range(FETCH_ROUNDS):
                for page in pages:
                    for part in drawn(page):
                        page.refresh(part)
                time.sleep(FETCH_PAUSE_S)
            seconds = time.monotonic() - begun
        return (relay.num_bytes - bytes_before) / 2**10 / seconds / visitors


def slope(resident: list[float]) -> float:
    """KiB a refresh, of a line through the second half."""
    half = np.asarray(resident[len(resident) // 2 :])
    return float(1024 * np.polyfit(np.arange(len(half)), half, 1)[0])


# ---- all together ----------------------------------------------------------------------------------------------


def compared(
    page: Page, dashboard: DashboardProcess, api: Api, environment: dict[str, str], chosen: argparse.Namespace
) -> list[Figure]:
    runs = Runs(api)
    query = urlencode({"view": "compare", "groups": runs.group})
    _, first = pictures(page, query, chosen.loads, FIRST)
    whole, both = pictures(page, query, chosen.loads, BOTH)
    with runs.going_on():
        refreshed = refreshes(page, chosen.watch_s)
    page.driver.get("about:blank")
    resident, served = memory(dashboard, runs, query, chosen.refreshes)
    home = Path(environment["GXPO_TOKEN_FILE"]).parent
    shares = [(1, True), (2, True), (2, False)]
    alone, both_live, idle = (fetched(home, environment, runs, query, n, live=live) for n, live in shares)
    grown = resident[-1] - resident[len(resident) // 10]
    print(f"  resident MiB at each tenth: {[round(value) for value in resident[:: max(1, len(resident) // 10)]]}")
    return [
        median("compare 20 × 5,000: first picture", first, "ms", at_most=1000),
        median("compare 20 × 5,000: both charts", both, "ms"),
        median("compare 20 × 5,000: both charts, whole", whole, "ms"),
        median("compare 20 × 5,000: refresh of the curves or the comparison", refreshed, "ms", at_most=300),
        median("compare 20 × 5,000: refresh, in the server", served, "ms"),
        single(f"memory: slope over {len(resident)} refreshes", slope(resident), "KiB a refresh", at_most=FLAT_KIB),
        single("memory: growth after the first tenth", grown, "MiB"),
        single("fetched from the service, one visitor", alone, "KiB/s"),
        single("the same, a visitor of two", both_live, "KiB/s", at_most=alone / 2),
        single("the same, while no run reports", idle, "KiB/s"),
    ]


def listed(page: Page, api: Api, chosen: argparse.Namespace) -> list[Figure]:
    add_runs(api.database, chosen.runs, state=None)
    with httpx.Client(base_url=f"{api.url}/api/v1", headers=api.headers, trust_env=False, timeout=60) as http:
        totals = [http.get("/runs", params={"text": text}).json()["total"] for text in ("", "run 77", "run 5")]
    grid = "document.querySelector('.rows-table tbody a')"
    contains = "document.body.innerText.includes"
    whole, view = pictures(page, "view=runs", chosen.loads, f"() => {grid} && {contains}('of {totals[0]:,}')")
    page.driver.execute_cdp_cmd("Network.clearBrowserCache", {})
    page.driver.get("about:blank")
    page.driver.get(f"{page.url}/?view=runs")
    page.settle()
    fetched = "performance.getEntries().reduce((sum, entry) => sum + (entry.transferSize || 0), 0)"
    loaded = float(page.script(f"return {fetched}")) / 2**20
    searches, pages, opened = [], [], []
    for _ in range(chosen.loads):
        page.open("runs")
        link = page.one(".rows-table tbody a")
        title = f"document.querySelector('[data-testid=stMain] h1')?.innerText.startsWith({link.text!r})"
        opened.append(after_action(page, link.click, f"() => {title}"))
    page.open("runs")
    for number in range(chosen.loads):
        word, total = (("run 77", totals[1]), ("run 5", totals[2]))[number % 2]
        # Its total as the page writes it below the table.
        condition = f"() => /to \\d+ of {total:,}(\\s|$)/.test(document.body.innerText)"
        searches.append(after_action(page, partial(page.fill, "Search", word), condition))
        pages.append(after_action(page, lambda: page.press("Next"), "() => /Runs 51 to/.test(document.body.innerText)"))
    name = f"{chosen.runs:,} runs"
    return [
        median(f"{name}: whole", whole, "ms", at_most=3000),
        median(f"{name}: from a click on a name to its page", opened, "ms", at_most=300),
        single("bytes of a first load, without a cache", loaded, "MiB", at_most=2.0),
        median(f"{name}: first picture", view, "ms", at_most=1000),
        median(f"{name}: search", searches, "ms", at_most=1000),
        median(f"{name}: next part", pages, "ms", at_most=1000),
    ]


def empty(driver: webdriver.Chrome, folder: Path, loads: int) -> Figure:
    """Streamlit's page with a title alone."""
    (folder / "empty.py").write_text(EMPTY_PAGE, encoding="utf-8")
    with DashboardProcess(folder / "empty.log", page=folder / "empty.py").running() as process:
        heading = "() => document.querySelector('[data-testid=stMain] h1')"
        return median("empty page, whole", pictures(Page(driver, process.url), "", loads, heading)[0], "ms")


def figures(chosen: argparse.Namespace) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="gxpo-bench-") as name, open_browser() as driver:
        home = Path(name)
        api = Api(f"sqlite:///{home / 'gxpo.sqlite'}", home)
        (home / "token").write_text(api.headers["Authorization"].removeprefix("Bearer "), encoding="utf-8")
        environment = {"GXPO_URL": api.url, "GXPO_TOKEN_FILE": str(home / "token")}
        with closing(api), DashboardProcess(home / "dashboard.log", environment).running() as dashboard:
            driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": HOOKS})
            results = [empty(driver, home, chosen.loads)]
            page = Page(driver, dashboard.url, dashboard.cookie)
            results += compared(page, dashboard, api, environment, chosen)
            return results + listed(page, api, chosen)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", type=int, default=7)
    parser.add_argument("--refreshes", type=int, default=500)
    parser.add_argument("--watch-s", type=float, default=60.0)
    parser.add_argument("--runs", type=int, default=10_000)
    chosen = parser.parse_args([] if argv is None else argv)
    if find_programs() is None:
        print("dashboard: chromium and chromedriver are not installed; nothing is measured")
        return
    save("dashboard", figures(chosen), {"seeds": SEEDS, "steps": STEPS, **vars(chosen)})


if __name__ == "__main__":
    main(sys.argv[1:])
