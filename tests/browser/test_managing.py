"""Many runs at once: bulk actions, sweeps, a table whose order changes, and the search of a log."""

from __future__ import annotations

from selenium import webdriver
from support.browsing import CHART, TEXTS, Page, color, open_browser, picture, set_mode, text_contrast
from support.service_processes import until
from support.site import NOT_LOOPBACK, Site

LOG = "document.querySelector('.st-key-log')"
GRID = "document.querySelector('.rows-table')"


def test_several_runs_are_deleted_at_once_and_the_filter_stays(site: Site, page: Page) -> None:
    runs = [site.submit_short(f"to delete {number}") for number in range(3)]
    page.open("runs", text="to delete")
    page.select_row(0)
    page.shows("1 selected")
    page.select_row(2)
    page.shows("2 selected")
    page.press("Delete…")
    page.shows("are deleted permanently")
    page.press("Delete 2 runs")
    page.wait(lambda: "1 run " in " ".join(page.text.split()), "the list without them")
    page.shows("Select rows to act on them.")
    assert page.query["text"] == ["to delete"]
    # The newest is first, so the rows were those of the last and of the first.
    assert [site.http.get(f"/runs/{run}").status_code for run in runs] == [404, 200, 404]


def test_actions_are_above_the_table_whose_rows_stay_and_curves_of_the_selected_runs_beside_it(
    site: Site, page: Page
) -> None:
    page.open("runs", text="demo")
    top = page.one(".rows-table").location
    page.select_row(0)
    page.shows("1 selected")
    page.select_row(1)
    page.shows("2 selected")
    series = "[...new Set(view.data('points').map(row => row.series))].sort()"
    page.wait(lambda: page.chart_of("reward/mean", series) == ["demo", "demo-grpo"], "the curves of both")
    page.settle()  # a script that still runs leaves buttons of the last one
    assert page.one(".rows-table").location == top
    bar = page.one(".st-key-bar")
    assert bar.location["y"] + bar.size["height"] <= top["y"]
    buttons = page.all(".st-key-bar button:enabled")
    assert len(buttons) > 2
    assert [cover for button in buttons if (cover := page.cover(button)) is not None] == []


def test_a_sweep_has_a_heat_map_of_two_settings(site: Site, page: Page) -> None:
    body = {
        "name": "two settings",
        "base": {"preset": "demo", "overrides": ["budget.steps=5"]},
        "grid": {"learner.rule.k": [3, 5], "learner.optimizer.learning_rate": [1e-4, 2e-4]},
    }
    group = site.http.post("/sweeps", json=body).raise_for_status().json()["group"]["id"]

    def ended() -> bool:
        runs = site.http.get(f"/groups/{group}").raise_for_status().json()["runs"]
        return len(runs) == 4 and all(run["state"] == "succeeded" for run in runs)

    until(ended, "the end of the sweep")
    heat = "learner.optimizer.learning_rate × learner.rule.k"
    for mode in ("light", "dark"):
        set_mode(page.driver, mode)
        page.open("compare", groups=[group])
        page.wait(lambda: page.chart_of(heat, "view.data('points').length") == 4, "the four cells of the heat map")
        _assert_readable(page, heat, "learner.rule.k", "0.0001", "2.5%")


def _assert_readable(page: Page, title: str, *labels: str) -> None:
    """Contrast of these texts of a chart, and that its own background is that of the page around it."""
    chart = picture(page, f'[data-card="{title}"] {CHART}')  # which `chart_of` has marked
    boxes = dict(page.chart_of(title, TEXTS))
    measured = {label: text_contrast(chart.crop(tuple(map(round, boxes[label])))) for label in labels}
    assert min(measured.values()) >= 4.5, (title, measured)
    red, green, blue = chart.getpixel((2, 2))[:3]
    assert page.chart_of(title, "view.signal('background')") == color((red, green, blue))


def test_a_table_whose_order_changes_keeps_its_scroll_position_and_its_selection(site: Site, page: Page) -> None:
    base = {"preset": "demo", "overrides": ["budget.steps=3"]}
    body = {"name": "of many", "base": base, "seeds": list(range(24)), "control": False}
    group = site.http.post("/sweeps", json=body).raise_for_status().json()["group"]["id"]
    site.http.post(f"/groups/{group}/cancel").raise_for_status()
    page.open("runs", text="of many", cols=["name", "seed"])
    page.shows("24 runs")
    third = site.http.get("/runs", params={"text": "of many"}).json()["items"][2]
    page.select_row(2)
    page.shows(f"1 selected {third['name']}")
    assert page.script(f"{GRID}.scrollTop = 200; return {GRID}.scrollTop") == 200
    run = site.http.post("/runs", json={**base, "name": "one of many"}).raise_for_status().json()["id"]
    site.http.post(f"/runs/{run}/cancel").raise_for_status()
    page.shows("25 runs")
    page.settle()
    assert page.script(f"return {GRID}.scrollTop") in (200, 236), "a row above may be made up for by the browser"
    page.shows(f"1 selected {third['name']}")
    page.press("Open")
    page.wait(lambda: page.query.get("run") == [third["id"]], "the view of the selected run")


def test_a_log_is_searched(site: Site, page: Page, live_run: str) -> None:
    page.open("run", run=live_run, part="Log")
    page.shows("step 3 done")
    assert page.text.index("step 2 done") < page.text.index("step 3 done"), "the oldest line is first"
    lines = page.script(f"return {LOG}.innerText").count("\n")
    page.wait(lambda: page.script(f"return {LOG}.innerText").count("\n") > lines + 10, "more lines")
    page.wait(lambda: page.script(f"return {LOG}.scrollHeight - {LOG}.clientHeight - {LOG}.scrollTop") < 60, "the end")
    page.fill("Search log", "STEP 3 done")
    page.wait(lambda: "1 matching line in " in page.text and "step 9 done" not in page.text, "the match alone")
    shown = page.script(f"return {LOG}.innerText")
    assert [line[:1] for line in shown.splitlines() if "step 3 done" in line] == ["▸"]
    assert "step 4 done" in shown, "the lines around it"
    assert page.query["log"] == ["STEP 3 done"]


# Who sees what: a visitor from elsewhere, and one whose token only reads.


def test_a_visitor_from_elsewhere_signs_in_and_a_viewer_cannot_cancel_runs(site: Site, live_run: str) -> None:
    """Under a name that is not loopback's: this machine's token is not lent to who asks for it."""
    with open_browser(resolve=f"MAP {NOT_LOOPBACK} 127.0.0.1") as driver:
        page = Page(driver, f"http://{NOT_LOOPBACK}:{site.dashboard.port}")
        both = {"view": "compare", "runs": list(site.recorded.values())}
        for address in ({}, both, {"view": "run", "run": live_run}):
            page.open(**address)
            page.shows("Access token")
            assert "live run" not in page.text
            assert [heading.text for heading in page.all("h1")] == ["Sign in"]
            assert [box.get_attribute("aria-label") for box in page.all("input, textarea")] == ["Access token"]
            assert not page.all("[data-testid=stDataFrame], [data-testid=stVegaLiteChart], [class*=st-key-nav]")
        page.fill("Access token", "gxpo_nobody")
        page.shows("rejected this token")
        page.fill("Access token", site.viewer_token)
        page.shows("▶ running")
        page.shows("live run")
        page.wait(lambda: page.all(".st-key-run-cancel button"), "the row of buttons")
        assert page.button("Cancel") is None, "it is there to be seen, and cannot be pressed"


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
