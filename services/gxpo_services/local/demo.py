"""`gxpo demo`: train GRPO, SFPO and GXPO on the embedded task through the service and compare them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from gxpo_client.client import Client, Json
from gxpo_services.cli.client import connect
from gxpo_services.cli.common import say
from gxpo_services.cli.reading import print_comparison
from gxpo_services.cli.watch import Bars, follow
from gxpo_services.local.supervisor import Stopped
from gxpo_services.local.up import Stack, stop_on_signals
from gxpo_trainer.config.io import load_preset, to_toml
from gxpo_trainer.errors import TrainingError

PRESETS = ("demo-grpo", "demo-sfpo", "demo")
_POLL_S = 2.0
"""Polling interval; long, so that the runs get the CPU."""
TITLE = "gxpo demo: three update rules on the embedded task"


def demo_command(wanted: Path, steps: int, *, dashboard: bool, stack_of: type[Stack] = Stack) -> int:
    """Start a service in a new folder, run three trainings over REST, print their comparison and write a report.

    stack_of: for tests. Returns 0 when all three succeeded, otherwise raises. All processes are stopped in any case.
    """
    # Settings of another service, such as its database, must not apply.
    for name in [name for name in os.environ if name.startswith("GXPO_")]:
        del os.environ[name]
    home = free_folder(wanted)
    until = stop_on_signals()
    begun = time.monotonic()
    say(f"demo: three runs of {steps} steps, one after the other; database and results in {home}")
    with stack_of(home, lambda text: say(f"demo: {text}"), until, dashboard=dashboard) as stack:
        with connect(stack.url, stack.token_file) as client:
            ids = _submit(client, steps)
            if stack.dashboard_url is not None:
                say(f"demo: watch it live at {comparison_link(stack.dashboard_url, ids)}")
            runs = _watch(client, ids, stack, until)
            say(f"demo: trained in {time.monotonic() - begun:.0f} s, start-up included")
            _all_succeeded(runs)
            comparison = client.compare(runs=ids)
        _write_report([stack.artifacts / run_id for run_id in ids], home)
    print_comparison(comparison)
    print(f"\nReport: {home / 'report.html'}\nCurves: {home / 'curves.png'}")
    if stack.dashboard_url is not None:
        link = comparison_link(stack.dashboard_url, ids)
        print(f"Dashboard: gxpo up --home {home}\n           then {link}")
    return 0


def free_folder(wanted: Path) -> Path:
    """`wanted`, or the first empty one of wanted-2, wanted-3, …: a demo never overwrites an earlier one."""
    candidate, number = wanted, 1
    while candidate.exists() and (not candidate.is_dir() or any(candidate.iterdir())):
        number += 1
        candidate = wanted.with_name(f"{wanted.name}-{number}")
    return candidate


def comparison_link(dashboard_url: str, ids: list[str]) -> str:
    """The dashboard's comparison of these runs."""
    return f"{dashboard_url}/compare?" + "&".join(f"runs={run_id}" for run_id in ids)


def _submit(client: Client, steps: int) -> list[str]:
    """Submit the three runs as a group, in execution order."""
    group = client.post("/groups", {"name": "demo: GRPO, SFPO and GXPO"})["id"]
    ids = []
    for preset in PRESETS:
        config = load_preset(preset, [f"budget.steps={steps}"])
        body: Json = {"toml": to_toml(config), "name": config.name, "tags": ["demo"], "group": group}
        ids.append(client.submit(body)["id"])
    return ids


def _watch(client: Client, ids: list[str], stack: Stack, until: threading.Event) -> list[Json]:
    def pause() -> None:
        if until.wait(_POLL_S):
            raise Stopped("interrupted; completed runs are kept")
        stack.check()

    with Bars() as bars:
        return follow(client, ids, bars, pause=pause)


def _all_succeeded(runs: list[Json]) -> None:
    failed = [run for run in runs if run["state"] != "succeeded"]
    if failed:
        lines = [f"  {run['name']} ({run['id']}): {run['reason'] or run['state']}: {run['detail']}" for run in failed]
        raise TrainingError("\n".join([f"{len(failed)} of {len(runs)} runs did not succeed:", *lines]))


def _write_report(folders: list[Path], home: Path) -> None:
    """Write the report with the trainer's own command."""
    command = [sys.executable, "-m", "gxpo_trainer.cli", "report", *map(str, folders), "--out", str(home)]
    ended = subprocess.run([*command, "--title", TITLE], capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise TrainingError(f"cannot write the report:\n{ended.stderr.strip()}")
