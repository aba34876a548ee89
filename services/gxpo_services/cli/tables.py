"""Responses as tables. Text from runs is never interpreted as markup."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gxpo_client.client import Json
from gxpo_client.formats import NONE, by_reason, duration, percent, share_done
from gxpo_services.cli.common import one_line, plain

SCREEN = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
"""Has the terminal's width, or 200 columns for a pipe (rich's default is 80)."""
_COLOURS = {"succeeded": "green", "failed": "red", "cancelled": "yellow", "running": "cyan", "paused": "yellow"}


def table(header: Sequence[str], rows: Sequence[Sequence[str | Text]], *, title: str = "", left: int = 1) -> Table:
    """A table; the first `left` columns are left-aligned, the others right-aligned."""
    grid = Table(title=Text(title) if title else None, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for position, name in enumerate(header):
        grid.add_column(Text(name), justify="left" if position < left else "right", overflow="fold")
    for row in rows:
        grid.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    return grid


def print_headline(text: str) -> None:
    SCREEN.print(Text(one_line(text, 4000), style="bold"), soft_wrap=True)


RUN_HEADER = "id,name,state,rule,progress,steps,backward passes,accuracy,reward,left,age".split(",")


def run_row(run: Json) -> tuple[str | Text, ...]:
    progress = run["progress"]
    return (
        run["id"],
        one_line(run["name"], 40),
        state_text(run),
        run["rule_label"],
        share_done(progress["fraction"]),
        of_budget(progress["steps"], progress["step_budget"]),
        of_budget(progress["backward_passes"], progress["backward_passes_budget"]),
        percent(run["score"]),
        number(run["reward"]),
        time_left(run),
        duration(max(0.0, time.time() - run["created_at"])),
    )


def state_text(run: Json) -> Text:
    """The state, with the failure reason, the queue position, or the trainer's phase unless it is training."""
    words = run["state"]
    position = run["progress"]["queue_position"]
    if run["state"] == "queued" and position is not None:
        words += f" #{position}"
    if run["state"] == "failed" and run["reason"]:
        words += f" ({run['reason']})"
    if run["phase"] not in (None, "training"):
        words += f" ({one_line(run['phase'], 60)})"
    if run["silent_s"] is not None:
        words += f" (no heartbeat for {duration(run['silent_s'])})"
    return Text(words, style=_COLOURS.get(run["state"], ""))


def run_details(run: Json, headline: str, events: Sequence[Json]) -> list[Table | Text]:
    """Headline, settings, progress and latest events of a run."""
    about = dict(zip(RUN_HEADER, run_row(run), strict=True)) | {
        "name": one_line(run["name"]),
        "tokens": f"{run['progress']['tokens']:,.0f}",
        "training time": duration(run["progress"]["training_s"]),
        "model": one_line(run["model"]),
        "seed": str(run["seed"]),
        "tags": one_line(", ".join(run["tags"])) or NONE,
        "group": run["group"] or NONE,
        "created by": one_line(run["created_by"]),
        "actions": ", ".join(run["possible_actions"]) or NONE,
    }
    style = "bold red" if run["state"] == "failed" else "bold"
    rows = [(clock(event["time"]), event["actor"], one_line(event["message"])) for event in events]
    return [
        Text(f"{one_line(headline, 4000)}\n", style=style),
        table(("", ""), list(about.items()), left=2),
        table(("time", "actor", "event"), rows, left=3),
    ]


def print_comparison(comparison: Json) -> None:
    """Print the headline, the tables, the excluded runs and the rest of what the evidence supports."""
    headline, *evidence = plain(comparison["evidence"]).splitlines()
    print_headline(headline)
    for part in comparison["tables"]:
        rows = [[one_line(cell) for cell in row] for row in part["rows"]]
        SCREEN.print(table(part["header"], rows, title=one_line(part["title"])))
    left_out = [(f"{one_line(run['name'])} ({run['run']})", run["reason"]) for run in comparison["left_out"]]
    for name, reason in by_reason(left_out):
        SCREEN.print(Text(f"excluded: {name}: {one_line(reason)}"))
    SCREEN.print(Text("\n".join(evidence)))


def of_budget(used: float, budget: float | None) -> str:
    return f"{used:,.0f}" + ("" if budget is None else f"/{budget:,.0f}")


def number(value: Any) -> str:
    """A metric's value; the service sends NaN and the infinities as strings."""
    if isinstance(value, int | float):
        return f"{value:.3f}"
    return str(value) if value is not None else NONE


def time_left(run: Json) -> str:
    return duration(run["progress"]["seconds_left"]) if run["state"] != "queued" else NONE


def clock(moment: float | None) -> str:
    """Local time of seconds since 1970."""
    return NONE if moment is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
