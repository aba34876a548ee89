"""`gxpo demo`: rules on an embedded task through the service, compared at equal backward passes."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from gxpo_client.client import Client, Json
from gxpo_services.cli.common import connect, say
from gxpo_services.cli.tables import print_comparison
from gxpo_services.cli.watch import Bars, follow
from gxpo_services.local.supervisor import Stopped
from gxpo_services.local.up import Stack, stop_on_signals
from gxpo_trainer.config.io import load_preset, to_toml
from gxpo_trainer.errors import TrainingError
from gxpo_trainer.planner.devices import usable_cores

_EVALUATIONS = 6
"""Of each run after its first, or one a step: all runs are evaluated at step 5, where SFPO's 30 passes end."""
_AT_ONCE = 2
"""Runs at a time: starting a run leaves a core idle, and a race is seen best side by side."""
_POLL_S = 2.0
"""Polling interval; long, so that the runs get the CPU."""


@dataclass(frozen=True, slots=True)
class Task:
    """What the demo trains on an embedded task: presets in execution order, and backward passes of each run. study: the
    file of a study on several seeds that answers the same question."""

    presets: tuple[str, ...]
    passes: int
    title: str
    study: Path | None = None


TASKS = {
    "word_problems": Task(
        ("demo-grpo", "demo-grpo-lr-control", "demo-sfpo", "demo"),
        30,
        "gxpo demo: three update rules and a control, at equal backward passes",
        Path(__file__).parents[3] / "studies" / "reference.toml",
    ),
    "arithmetic_skill": Task(
        ("skill-grpo", "skill-gxpo"),
        60,
        "gxpo demo: GRPO and GXPO on arithmetic skill, at equal backward passes",
    ),
}


def demo(args: argparse.Namespace, stack_of: type[Stack] = Stack) -> int:
    """Start a service in a new folder, run the trainings over REST, print their comparison and write a report.

    stack_of: for tests. Raises unless all succeeded. All processes are stopped in any case.
    """
    # Settings of another service, such as its database, must not apply.
    for name in [name for name in os.environ if name.startswith("GXPO_")]:
        del os.environ[name]
    os.environ["GXPO_MAX_CONCURRENT_RUNS"] = str(_AT_ONCE)
    task = TASKS[args.task]
    passes = args.passes or task.passes
    home = free_folder(args.out)
    until = stop_on_signals()
    begun = time.monotonic()
    say(f"demo: {len(task.presets)} runs of {passes} backward passes, {_AT_ONCE} at a time; results in {home}")
    dashboard_port = None if args.no_dashboard else 8501
    with stack_of(home, lambda text: say(f"demo: {text}"), until, dashboard_port=dashboard_port) as stack:
        with connect(stack.url, stack.settings.local_token_file) as client:
            ids = _submit(client, task, passes)
            if stack.dashboard_url is not None:
                secret = urlsplit(stack.link or "").query
                say(f"demo: watch it live at {comparison_link(stack.dashboard_url, ids)}&{secret}")
            runs = _watch(client, ids, stack, until)
            say(f"demo: trained in {time.monotonic() - begun:.0f} s, start-up included")
            if failed := [run for run in runs if run["state"] != "succeeded"]:
                lines = [f"{r['name']} ({r['id']}): {r['reason'] or r['state']}: {r['detail']}" for r in failed]
                raise TrainingError("\n  ".join([f"{len(failed)} of {len(runs)} runs did not succeed:", *lines]))
            comparison = client.get("/compare", runs=ids)
        folders = [stack.settings.artifacts / run_id for run_id in ids]
        _trainer("cannot write the report", "report", *folders, "--out", home, "--title", task.title)
    print_comparison(comparison)
    # The same question on several seeds: what one seed cannot say.
    if task.study is not None and task.study.with_suffix("").is_dir():
        answer = _trainer("cannot read the reference study", "study", "answer", task.study)
        print(f"\nThe reference study, on several seeds (docs/evidence.md):\n{answer.rstrip()}")
    print(f"\nReport: {home / 'report.md'}\nCurves: {home / 'curves.png'}")
    if stack.dashboard_url is not None:
        link = comparison_link(stack.dashboard_url, ids)
        print(f"Dashboard: gxpo up --home {home}\n           open the link that it prints, then {link}")
    return 0


def free_folder(wanted: Path) -> Path:
    """`wanted`, or the first empty one of wanted-2, wanted-3, …: a demo never overwrites an earlier one."""
    candidate, number = wanted, 1
    while candidate.exists() and (not candidate.is_dir() or any(candidate.iterdir())):
        number += 1
        candidate = Path(f"{wanted.resolve()}-{number}")  # `.` and `/` have no name
    return candidate


def comparison_link(dashboard_url: str, ids: list[str]) -> str:
    """The dashboard's comparison of these runs over backward passes, their common budget."""
    return f"{dashboard_url}/compare?" + "&".join(f"runs={run_id}" for run_id in ids)


def _submit(client: Client, task: Task, passes: int) -> list[str]:
    """Submit the runs as a group, in execution order."""
    group = client.post("/groups", body={"name": task.title})["id"]
    share = _share_of_cores(usable_cores())
    ids = []
    for preset in task.presets:
        per_step = load_preset(preset).learner.rule.passes_per_step(gate_open=True)
        every = max(1, passes // (_EVALUATIONS * per_step))
        budget = ["budget.steps=none", f"budget.backward_passes={passes}", f"evaluation.every_steps={every}"]
        config = load_preset(preset, [*budget, *share])
        body: Json = {"toml": to_toml(config), "name": config.name, "tags": ["demo"], "group": group}
        ids.append(client.submit(body)["id"])
    return ids


def _share_of_cores(cores: int) -> list[str]:
    """Placement with which `_AT_ONCE` runs fit the machine, whose threads do not wait for those of another run."""
    cpus = {"learner_cpus": 0.5, "sampler_cpus": 0.375, "verifier_cpus": 0.125}
    threads = max(1, cores // _AT_ONCE)
    return [
        *(f"placement.{name}={part * cores / _AT_ONCE}" for name, part in cpus.items()),
        *(f"placement.{name}_threads={threads}" for name in ("learner", "sampler")),
    ]


def _watch(client: Client, ids: list[str], stack: Stack, until: threading.Event) -> list[Json]:
    def pause() -> None:
        if until.wait(_POLL_S):
            raise Stopped("interrupted; completed runs are kept")
        stack.check()

    with Bars() as bars:
        return follow(client, ids, bars, pause=pause)


def _trainer(failure: str, *words: object) -> str:
    """Output of a command of the trainer. Raises TrainingError that begins with `failure`."""
    command = [sys.executable, "-m", "gxpo_trainer.cli", *map(str, words)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise TrainingError(f"{failure}:\n{ended.stderr.strip()}")
    return ended.stdout
