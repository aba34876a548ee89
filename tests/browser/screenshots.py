"""Pictures of every view, from the runs of a dashboard that is up (`make screenshots`).

Opens each view in headless Chromium, light and dark, waits until nothing is being drawn any more, and writes
docs/images/<view>-<light|dark>.png. Chromium and its driver come from the system's packages.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode

from selenium import webdriver
from selenium.webdriver.common.by import By

from gxpo_dashboard.client import Client, connect

ROOT = Path(__file__).resolve().parents[2]
BUSY = "[data-testid=stSkeleton], [data-testid=stAppSkeleton], [data-testid=stStatusWidget], [data-stale=true]"
CALM_POLLS, POLL_S, WAIT_S = 5, 0.4, 90.0


@contextmanager
def browser(width: int, mode: str) -> Iterator[webdriver.Chrome]:
    """Headless Chromium in a colour scheme, `light` or `dark`."""
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        raise SystemExit("chromium and chromedriver are missing; install the packages chromium and chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    options.add_argument(f"--window-size={width},1000")
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        scheme = {"features": [{"name": "prefers-color-scheme", "value": mode}]}
        found.execute_cdp_cmd("Emulation.setEmulatedMedia", scheme)
        yield found
    finally:
        found.quit()


def settle(page: webdriver.Chrome) -> None:
    """Wait until the page has its title and nothing has been drawn for two seconds."""
    calm, deadline = 0, time.monotonic() + WAIT_S
    while calm < CALM_POLLS and time.monotonic() < deadline:
        drawn = page.find_elements(By.CSS_SELECTOR, "h1") and not page.find_elements(By.CSS_SELECTOR, BUSY)
        calm = calm + 1 if drawn else 0
        time.sleep(POLL_S)


def shoot(page: webdriver.Chrome, url: str, file: Path, width: int, most: int) -> None:
    """The view from its top, as high as its content, at most `most` pixels."""
    page.get(url)
    settle(page)
    height = page.execute_script(
        "const main = document.querySelector('[data-testid=stMain]'); return main ? main.scrollHeight : 1000"
    )
    size = {"width": width, "height": min(max(int(height), 700), most), "deviceScaleFactor": 1, "mobile": False}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    settle(page)
    page.save_screenshot(str(file))
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def views(client: Client) -> dict[str, str]:
    """Name of a picture → query of its view, from the runs that there are.

    The run shown is the newest that looked ahead; compared are the newest runs of each rule that were evaluated.
    """
    runs = [run for run in client.runs(limit=200)["items"] if run["score"] is not None]
    if not runs:
        raise SystemExit("no run has an evaluation yet; start some (`make demo`, then `make up` on its home)")
    shown = next((run for run in runs if run["rule"] != "grpo"), runs[0])
    compared = [run["id"] for rule in ("grpo", "sfpo", "gxpo") for run in runs if run["rule"] == rule][:9]
    queries = {
        "runs": {},
        "run": {"run": shown["id"]},
        "gate": {"view": "run", "run": shown["id"], "part": "Gate and budget"},
        "time": {"view": "run", "run": shown["id"], "part": "System"},
        "samples": {"view": "run", "run": shown["id"], "part": "Samples"},
        "compare": {"runs": compared},
        "benchmarks": {"runs": compared[:8]},
        "submit": {"sweep": "1"},
    }
    return {name: urlencode({"view": name, **query}, doseq=True) for name, query in queries.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dashboard", default="http://127.0.0.1:8501", help="where the dashboard is")
    parser.add_argument(
        "--service", default=os.environ.get("GXPO_URL", "http://127.0.0.1:8000"), help="where the API is"
    )
    parser.add_argument("--token-file", type=Path, default=Path("gxpo-home/token"), help="a token that may read")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images", help="folder of the pictures")
    parser.add_argument("--width", type=int, default=1280, help="of the window, in pixels")
    parser.add_argument("--height", type=int, default=1700, help="most pixels of a picture's height")
    parser.add_argument("--only", nargs="*", default=None, help="names of the pictures to take")
    chosen = parser.parse_args(arguments)
    token = chosen.token_file.read_text(encoding="utf-8").strip()
    found = views(Client(connect(chosen.service), token))
    chosen.out.mkdir(parents=True, exist_ok=True)
    for mode in ("light", "dark"):
        with browser(chosen.width, mode) as page:
            for name, query in found.items():
                if chosen.only and name not in chosen.only:
                    continue
                file = chosen.out / f"{name}-{mode}.png"
                shoot(page, f"{chosen.dashboard}/?{query}", file, chosen.width, chosen.height)
                sys.stdout.write(f"{file}\n")


if __name__ == "__main__":
    main()
