"""What holds on every path through the state machine of runs."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any, get_args

import pytest

from gxpo_services.cli import arguments
from gxpo_services.run_states import (
    EXECUTING,
    TERMINAL,
    TRANSITIONS,
    IllegalTransition,
    RunState,
    check_transition,
    pending_request,
    requested_state,
    silent_s,
)
from gxpo_services.runs.schemas import PossibleAction, possible_actions
from gxpo_services.settings import ServiceSettings
from gxpo_trainer.errors import REASONS


def test_a_run_is_silent_once_its_trainer_has_not_reported_for_15_seconds() -> None:
    assert [silent_s(RunState.RUNNING, at, 100.0) for at in (84.9, 85.0, None)] == [pytest.approx(15.1), None, None]
    assert silent_s(RunState.FAILED, 0.0, 100.0) is None


def test_exactly_the_listed_transitions_are_legal() -> None:
    for old in RunState:
        for new in RunState:
            if new in TRANSITIONS[old]:
                check_transition(old, new)
            else:
                with pytest.raises(IllegalTransition, match=f"cannot become {new}"):
                    check_transition(old, new)


EXPECTED = {
    # state: (cancel, pause, resume) → the state after it; None: refused
    "queued": ("cancelled", None, "queued"),
    "starting": ("cancelling", None, "starting"),
    "running": ("cancelling", "pausing", "running"),
    "recovering": ("cancelling", None, None),
    "pausing": ("cancelling", "pausing", None),
    "paused": ("cancelled", "paused", "queued"),
    "cancelling": ("cancelling", None, None),
    "succeeded": (None, None, None),
    "failed": (None, None, None),
    "cancelled": ("cancelled", None, None),
}


@pytest.mark.parametrize("state", EXPECTED)
def test_requests_by_state(state: str) -> None:
    for action, expected in zip(("cancel", "pause", "resume"), EXPECTED[state], strict=True):
        if expected is None:
            with pytest.raises(IllegalTransition, match=f"a run that is {state} cannot {action}"):
                requested_state(RunState(state), action)
        else:
            assert (requested_state(RunState(state), action) or state) == expected


def test_what_people_may_ask_by_state() -> None:
    table = {
        "queued": "cancel clone",
        "starting": "cancel clone",
        "running": "cancel pause clone",
        "recovering": "cancel clone",
        "pausing": "cancel clone",
        "paused": "cancel resume clone",
        "cancelling": "clone",
        "succeeded": "clone delete",
        "failed": "clone retry delete",
        "cancelled": "clone retry delete",
    }
    assert {state.value: " ".join(possible_actions(state)) for state in RunState} == table
    assert {word for words in table.values() for word in words.split()} == set(get_args(PossibleAction))


def test_a_trainer_is_told_to_stop_exactly_when_somebody_wants_it_to_and_only_states_with_a_job_execute() -> None:
    requests = {state.value: request for state in RunState if (request := pending_request(state)) is not None}
    assert requests == {"pausing": "pause", "cancelling": "cancel", "cancelled": "cancel"}
    assert EXECUTING.isdisjoint(TERMINAL | {RunState.QUEUED, RunState.PAUSED})
    assert set(RunState) == EXECUTING | TERMINAL | {RunState.QUEUED, RunState.PAUSED}


# docs/service.md lists every setting, state, reason and command, and nothing else.


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


def test_every_reason_and_command_is_documented() -> None:
    assert tuple(rows("| reason | what happened |")) == REASONS
    subparsers = argparse.ArgumentParser().add_subparsers()
    arguments.register(subparsers)
    assert set(re.findall(r"`(?:\.venv/bin/)?gxpo ([a-z]+)", PAGE)) | {"demo"} == set(subparsers.choices)
