"""What holds on every path through the state machine of runs; test_service_page.py compares it with its table."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gxpo_services.run_states import (
    EXECUTING,
    TERMINAL,
    TRANSITIONS,
    Action,
    IllegalTransition,
    RunState,
    check_transition,
    pending_request,
    requested_state,
)
from gxpo_services.runs.schemas import PossibleAction, possible_actions

STATES = st.sampled_from(list(RunState))
ACTIONS = st.sampled_from(get_args(Action))


def test_exactly_the_listed_transitions_are_legal() -> None:
    for old in RunState:
        for new in RunState:
            if new in TRANSITIONS[old]:
                check_transition(old, new)
            else:
                with pytest.raises(IllegalTransition, match=f"cannot become {new}"):
                    check_transition(old, new)


@given(st.lists(STATES, max_size=30))
def test_a_final_state_absorbs_and_is_the_only_place_to_end(attempts: list[RunState]) -> None:
    state = RunState.QUEUED
    for new in attempts:
        try:
            check_transition(state, new)
        except IllegalTransition:
            continue
        assert state not in TERMINAL
        state = new
    assert (not TRANSITIONS[state]) == (state in TERMINAL)
    assert {"succeeded", "failed", "cancelled"} == TERMINAL


def test_every_state_can_be_reached_and_left_for_a_final_one() -> None:
    reached = {RunState.QUEUED}
    for _ in RunState:
        reached |= {new for old in reached for new in TRANSITIONS[old]}
    assert reached == set(RunState)
    ending = set(TERMINAL)
    for _ in RunState:
        ending |= {old for old in RunState if TRANSITIONS[old] & ending}
    assert ending == set(RunState)


@given(STATES, ACTIONS)
def test_a_request_is_a_legal_transition_a_no_op_or_an_error_with_the_allowed_states(
    state: RunState, action: Action
) -> None:
    if action in possible_actions(state):
        wanted = requested_state(state, action)
        assert wanted is not None
        check_transition(state, wanted)
        assert requested_state(wanted, action) is None, "asking twice is asking once"
        return
    try:
        assert requested_state(state, action) is None
    except IllegalTransition as error:
        refusal = str(error)
    else:
        return
    assert f"a run that is {state} cannot {action}" in refusal


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


@given(STATES)
def test_a_trainer_is_told_to_stop_exactly_when_somebody_wants_it_to(state: RunState) -> None:
    requests = {RunState.PAUSING: "pause", RunState.CANCELLING: "cancel", RunState.CANCELLED: "cancel"}
    assert pending_request(state) == requests.get(state)


def test_only_states_with_a_job_execute() -> None:
    assert EXECUTING.isdisjoint(TERMINAL | {RunState.QUEUED, RunState.PAUSED})
    assert set(RunState) == EXECUTING | TERMINAL | {RunState.QUEUED, RunState.PAUSED}
