"""What holds on every path through the state machine of runs; test_service_page.py compares it with its table."""

from __future__ import annotations

from typing import get_args

import pytest

from gxpo_services.run_states import (
    EXECUTING,
    TERMINAL,
    TRANSITIONS,
    IllegalTransition,
    RunState,
    check_transition,
    pending_request,
    requested_state,
)
from gxpo_services.runs.schemas import PossibleAction, possible_actions


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


def test_a_trainer_is_told_to_stop_exactly_when_somebody_wants_it_to() -> None:
    requests = {state.value: request for state in RunState if (request := pending_request(state)) is not None}
    assert requests == {"pausing": "pause", "cancelling": "cancel", "cancelled": "cancel"}


def test_only_states_with_a_job_execute() -> None:
    assert EXECUTING.isdisjoint(TERMINAL | {RunState.QUEUED, RunState.PAUSED})
    assert set(RunState) == EXECUTING | TERMINAL | {RunState.QUEUED, RunState.PAUSED}
