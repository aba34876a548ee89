"""Pictures of every view, light and dark, from real runs.

Of a home (`make demo`, then `make screenshots`), also while its service runs (`--url`: its runs are live then), or of
run folders: `--ended` for those of a study, `--live` for one that is shown as it was after a share of its steps
(`make screenshots FROM="--ended … --live …"`). Starts the API, unless it runs, and the dashboard, opens each view in
headless Chromium, waits until nothing is being drawn any more, and writes docs/images/<view>-<light|dark>.png of a
window of 1280 pixels, at twice the resolution and with at most 256 colours. Chromium and its driver come from the
system's packages.
"""

from __future__ import annotations

import argparse
import io
import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import structlog
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from support.browsing import Page, find_programs, open_browser  # noqa: E402
from support.dashboard_process import DashboardProcess  # noqa: E402
from support.replay import Recording, ReplayedService, ServedHome  # noqa: E402

from gxpo_client.client import Client, connect  # noqa: E402
from gxpo_services.local.ray_head import free_port  # noqa: E402

MODES: tuple[Literal["light"], Literal["dark"]] = ("light", "dark")
WIDTH = 1280
SCALE = 2
"""Pixels of a picture per pixel of the page."""
_MOST_COMPARED = 25


# Of the page, or of its part above the first card that does not fit, in all columns. Cards are 16 pixels apart.
_HEIGHT = """
const main = document.querySelector('[data-testid=stMain]');
if (!main || main.scrollHeight <= arguments[0]) return main ? main.scrollHeight : 1000;
const boxes = [...main.querySelectorAll('[data-testid=stVerticalBlock], [data-testid=stExpander]')]
  .filter(block => block.matches('[data-testid=stExpander]') || parseFloat(getComputedStyle(block).borderTopWidth) > 0)
  .map(block => block.getBoundingClientRect());
const ends = boxes.map(box => box.bottom)
  .filter(end => !boxes.some(box => box.top < end - 1 && box.bottom > end + 1))
  .map(end => end + main.scrollTop + 8);
if (!ends.length) return arguments[0];
return Math.max(...ends.filter(end => end <= arguments[0]), Math.min(...ends));
"""


# The card with this title, which has a chart with a title of its own.
_CARDS = """
const titles = [...document.querySelectorAll('[data-testid=stMain] h5')];
const first = titles.findIndex(title => title.innerText.includes(arguments[0]));
const boxes = titles.slice(first, first + 2)
  .map(title => title.closest('[data-testid=stVerticalBlock]').getBoundingClientRect());
return [boxes[0].left - 6, boxes[0].top - 6, boxes[0].right + 6, boxes[boxes.length - 1].bottom + 6];
"""
_WHOLE_PAGE, _MOST_PX = 8000, 1500
_LIVE_SHARE = 0.6
"""Share of the live run's steps that is reported."""


def shoot(page: Page, file: Path, query: dict[str, Any]) -> None:
    """A view from its top, as high as its content; a higher one ends below the last whole card. With a `card` in the
    query, that card alone."""
    card = query.get("card")
    page.open(**{name: value for name, value in query.items() if name != "card"})
    height = max(int(page.script(_HEIGHT, _WHOLE_PAGE if card else _MOST_PX)), 600)
    size = {"width": WIDTH, "height": height, "deviceScaleFactor": SCALE, "mobile": False}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    page.settle()
    picture = Image.open(io.BytesIO(page.driver.get_screenshot_as_png())).convert("RGB")
    if card:
        picture = picture.crop([round(SCALE * edge) for edge in page.script(_CARDS, card)])
    picture.quantize(256, dither=Image.Dither.NONE).save(file, optimize=True)
    page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def views(client: Client) -> dict[str, dict[str, Any]]:
    """Name of a picture → the view and its choices, from the runs that there are.

    The run shown is a live one, or the newest, that looked ahead; its gate where none has fired. Compared are the runs
    that have ended and were evaluated, of the names with the most seeds.
    """
    runs = [run for run in client.get("/runs", limit=200)["items"] if run["score"] is not None]
    if not runs:
        raise SystemExit("no run of this home has an evaluation yet; make some with `make demo`")
    ahead = [run for run in runs if run["rule"] == "gxpo"] or runs
    look_ahead = next((run["id"] for run in ahead if run["state"] == "running"), ahead[0]["id"])
    parts = {run["id"]: client.get("/runs", run["id"], "headline")["parts"] for run in ahead}
    fired = [run for run, said in parts.items() if any("The gate fired" in part["text"] for part in said)]
    by_label: dict[str, list[str]] = {}
    for run in runs:
        if run["state"] == "succeeded":
            by_label.setdefault(run["name"].rstrip("0123456789"), []).append(run["id"])
    most = max(map(len, by_label.values()), default=0)
    alike = [of_label for of_label in by_label.values() if len(of_label) == most]
    compared = [run for of_label in alike for run in of_label[: max(1, _MOST_COMPARED // len(alike))]]
    groups = [group["id"] for group in client.get("/groups", limit=200)["items"]]
    sweeps = [group for group in groups if client.heat_map(group) is not None]
    sweep = {"sweep": {"view": "compare", "groups": sweeps[:1], "card": "Sweep"}} if sweeps else {}
    return {
        **sweep,
        "runs": {"view": "runs"},
        "run": {"view": "run", "run": look_ahead},
        "gate": {"view": "run", "run": (fired or [look_ahead])[0], "part": "Gate"},
        "samples": {"view": "run", "run": look_ahead, "part": "Samples"},
        "compare": {"view": "compare", "runs": compared},
        "benchmarks": {"view": "benchmarks", "runs": [of_label[0] for of_label in alike]},
        "submit": {"view": "submit", "set": ["learner.optimizer.learning_rate=[0.00024,0.00048]", "seed=[0,1,2]"]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--home", type=Path, default=ROOT / "runs" / "demo", help="home of a service with ended runs")
    parser.add_argument("--url", default=None, help="with --home: of its service, which runs")
    parser.add_argument("--ended", type=Path, nargs="+", default=(), help="instead of a home: folders of ended runs")
    parser.add_argument("--live", type=Path, default=None, help="with --ended: folder of the run that is shown live")
    chosen = parser.parse_args()
    if find_programs() is None:
        raise SystemExit("chromium and chromedriver are missing; install the packages chromium and chromium-driver")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    with tempfile.TemporaryDirectory() as scratch:
        service: ServedHome | None = None
        if chosen.ended:
            service, token = replayed(Path(scratch) / "home", chosen.ended, chosen.live)
        else:
            if not (chosen.home / "token").is_file():
                raise SystemExit(
                    f"{chosen.home} is no home of a service: it has no token; run `make demo`, or name one"
                )
            token = (chosen.home / "token").read_text(encoding="utf-8").strip()
            service = None if chosen.url else ServedHome(chosen.home, free_port(8000))
        url = chosen.url if service is None else service.url
        token_file = Path(scratch) / "token"
        token_file.write_text(token, encoding="utf-8")
        environment = {"GXPO_URL": url, "GXPO_TOKEN_FILE": str(token_file)}
        with DashboardProcess(Path(scratch) / "dashboard.log", environment).running() as dashboard:
            pictures = views(Client(connect(url), token))
            for mode in MODES:
                with open_browser(width=WIDTH, mode=mode) as driver:
                    for name, query in pictures.items():
                        page = Page(driver, dashboard.url, dashboard.cookie)
                        shoot(page, ROOT / "docs" / "images" / f"{name}-{mode}.png", query)
        if service is not None:
            service.stop()


def replayed(home: Path, ended: Sequence[Path], live: Path | None) -> tuple[ServedHome, str]:
    """A service to which these runs have reported, and a token."""
    service = ReplayedService(home, free_port(8000))
    for folder in ended:
        service.replay(folder)
    if live is not None:
        service.launch(live).report(round(_LIVE_SHARE * Recording(live).last_step))
    return service, service.token("admin")


if __name__ == "__main__":
    main()
