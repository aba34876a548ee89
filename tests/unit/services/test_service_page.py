"""docs/service.md lists every setting, state, reason and command, and nothing else."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from gxpo_services.cli import arguments
from gxpo_services.run_states import TRANSITIONS, RunState
from gxpo_services.settings import ServiceSettings
from gxpo_trainer.errors import REASONS

PAGE = (Path(__file__).parents[3] / "docs" / "service.md").read_text(encoding="utf-8")


def rows(header: str) -> dict[str, list[str]]:
    """First cell without its ticks → the other cells of the table below a header row."""
    lines = PAGE[PAGE.index(header) :].splitlines()[2:]
    cells = {}
    for line in lines:
        if not line.startswith("|"):
            break
        first, *rest = (cell.strip() for cell in line.strip("|").split(" | "))
        cells[first.strip("`")] = rest
    return cells


def shown(default: Any) -> str:
    if default is None or default == ():
        return "none"
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:g}" if isinstance(default, float) else str(default)


def test_every_setting_is_documented_with_its_default() -> None:
    expected = {
        f"GXPO_{name.upper()}": [shown(field.default), field.description]
        for name, field in ServiceSettings.model_fields.items()
    }
    assert rows("| variable | default |") == expected


def test_every_state_is_documented_with_what_may_follow() -> None:
    table = rows("| state | meaning |")
    following = {state: set(re.findall(r"[a-z]+", cells[1])) for state, cells in table.items()}
    assert following == {state.value: {new.value for new in TRANSITIONS[state]} for state in RunState}


def test_every_reason_is_documented() -> None:
    assert tuple(rows("| reason | what happened |")) == REASONS


def registered() -> dict[str, argparse.ArgumentParser]:
    subparsers = argparse.ArgumentParser().add_subparsers()
    arguments.register(subparsers)
    return subparsers.choices


def test_every_command_is_documented() -> None:
    named = set(re.findall(r"`(?:\.venv/bin/)?gxpo ([a-z]+)", PAGE)) | {"demo"}
    assert named == set(registered())
