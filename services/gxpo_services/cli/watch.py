"""`gxpo watch`: follow runs until they end, with live bars on a terminal and plain lines elsewhere."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from gxpo_client.client import Client, Json
from gxpo_client.errors import NotFound, ServiceUnavailable
from gxpo_client.formats import percent
from gxpo_services.cli import tables
from gxpo_services.cli.common import message_of, one_line, resolve, say
from gxpo_services.run_states import TERMINAL
from gxpo_trainer.errors import ConfigError

_PAUSE_EVERY_S = 1.0
_RETRY_S = 1.0
_RUNS_AT_ONCE = 500
"""Runs that one stream takes."""
_QUIET = {"submitted", "state", "checkpoint", "finished", "attempt"}
"""Events that the run's own line already shows."""


def watch(args: argparse.Namespace, client: Client) -> int:
    """Watch runs, those too that join the group meanwhile; exit code 0 if all succeeded, else 1. Ctrl-C does not affect
    the runs."""
    ids = resolve(client, args.runs)
    if args.group:
        ids = list(dict.fromkeys([*ids, *_members(client, args.group)]))
    if not ids:
        raise ConfigError("name runs to watch, or use --group")
    with nullcontext(JsonLines()) if args.json else Bars() as display:
        ended = follow(client, ids, display)
        while args.group and (more := _queued_since(client, args.group, ids)):
            ended += follow(client, more, display)
            ids += more
    return 0 if all(run["state"] == "succeeded" for run in ended) else 1


def _members(client: Client, group: str) -> list[str]:
    return [run["id"] for run in client.get("/groups", group)["runs"]]


def _queued_since(client: Client, group: str, known: Sequence[str]) -> list[str]:
    """Runs of a group that are not known, none once it is deleted; waits for those that a study queues next."""
    while True:
        with suppress(ServiceUnavailable):
            try:
                is_study = client.get("/groups", group)["kind"] == "study"
                # Before the members, which then include what is no longer due.
                due = client.get("/studies", group)["due"] if is_study else 0
                queued = [run_id for run_id in _members(client, group) if run_id not in known]
            except NotFound:
                return []
            if queued or not due:
                return queued
        time.sleep(_RETRY_S)


def follow(
    client: Client, ids: Sequence[str], display: Bars | JsonLines, *, pause: Callable[[], None] = lambda: None
) -> list[Json]:
    """Follow runs by the service's event stream until all have ended; returns their final views in the order of `ids`.

    pause: called every second or two, to wait or to raise what should end the waiting. While the service is
    unavailable, each attempt continues after the last event that was received. Of more than one stream takes, those
    that come first are followed first.
    """
    if len(ids) > _RUNS_AT_ONCE:
        parts = ids[:_RUNS_AT_ONCE], ids[_RUNS_AT_ONCE:]
        return [run for part in parts for run in follow(client, part, display, pause=pause)]
    seen: dict[str, Json] = {}
    newest = 0
    is_away = False
    pause_at = time.monotonic() + _PAUSE_EVERY_S
    while not all(run_id in seen and seen[run_id]["state"] in TERMINAL for run_id in ids):
        try:
            for change in client.changes(ids, newest):
                if is_away:
                    display.message("the service is available again")
                    is_away = False
                if change is not None:
                    newest = max(newest, _show(change, seen, display))
                if time.monotonic() >= pause_at:
                    pause()
                    pause_at = time.monotonic() + _PAUSE_EVERY_S
        except ServiceUnavailable as error:
            if not is_away:
                display.message(f"{one_line(message_of(error))}; retrying; Ctrl-C stops watching")
            is_away = True
            pause()
            time.sleep(_RETRY_S)
    return [seen[run_id] for run_id in ids]


def _show(change: tuple[str, Json], seen: dict[str, Json], display: Bars | JsonLines) -> int:
    """Show a change; returns the number of the event, or 0. Raises NotFound for a deleted run."""
    kind, data = change
    if kind == "deleted":
        raise NotFound(f"run {data['id']} was deleted")
    if kind == "run":
        seen[data["id"]] = data
        display.update(data)
        return 0
    if data["kind"] not in _QUIET:
        display.message(f"{one_line(seen[data['run']]['name'])}: {one_line(data['message'], 160)}")
    return int(data["number"])


class JsonLines:
    """Print a JSON line whenever a run changes."""

    def update(self, run: Json) -> None:
        print(json.dumps(run, ensure_ascii=False), flush=True)

    def message(self, text: str) -> None:
        say(f"gxpo: {text}")


class Bars:
    """A live bar per run where stderr is a terminal, otherwise a line whenever a run's state or step changes."""

    def __init__(self) -> None:
        self._tasks: dict[str, TaskID] = {}
        self._last: dict[str, tuple[object, ...]] = {}
        self._progress: Progress | None = None
        console = Console(stderr=True, highlight=False)
        if console.is_terminal and not console.is_dumb_terminal:
            self._progress = Progress(
                # Without a minimum a narrow terminal would show the whole line and no name.
                TextColumn("{task.description}", markup=False, table_column=Column(min_width=10)),
                BarColumn(bar_width=24 if console.width >= 120 else 10, table_column=Column(min_width=10)),
                TextColumn("{task.fields[line]}", markup=False),
                console=console,
                auto_refresh=False,
            )

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def update(self, run: Json) -> None:
        progress = run["progress"]
        key = (
            *(run[name] for name in ("state", "reason", "recoveries", "phase", "silent_s")),
            *(progress[name] for name in ("steps", "queue_position")),
        )
        name, line = one_line(run["name"], 40), describe(run)
        if self._progress is None:
            if self._last.get(run["id"]) != key:
                say(f"{name}: {line}")
        else:
            if run["id"] not in self._tasks:
                self._tasks[run["id"]] = self._progress.add_task(name, total=1.0, line=line)
            done = progress["fraction"] if run["state"] != "succeeded" else 1.0
            self._progress.update(self._tasks[run["id"]], completed=done, line=line, refresh=True)
        self._last[run["id"]] = key

    def message(self, text: str) -> None:
        if self._progress is None:
            say(text)
        else:
            self._progress.console.print(Text(text))


def describe(run: Json) -> str:
    """`running  step 12/30  reward 0.312  passes 36  accuracy 31.0%  left 3 min 12 s`, known values only."""
    progress = run["progress"]
    parts = [tables.state_text(run).plain]
    if progress["steps"] or run["state"] == "running":
        parts.append(f"step {tables.of_budget(progress['steps'], progress['step_budget'])}")
    if run["reward"] is not None:
        parts.append(f"reward {tables.number(run['reward'])}")
    if progress["backward_passes"]:
        parts.append(f"passes {tables.of_budget(progress['backward_passes'], progress['backward_passes_budget'])}")
    if run["score"] is not None:
        parts.append(f"accuracy {percent(run['score'])}")
    if run["recoveries"]:
        parts.append(f"recovered {run['recoveries']} times")
    if run["state"] == "running" and progress["seconds_left"] is not None:
        parts.append(f"left {tables.time_left(run)}")
    return "  ".join(parts)
