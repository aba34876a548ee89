"""The life cycle of a run as a pure state machine: states, transitions and user requests."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal


class RunState(StrEnum):
    """State of a run. `pausing` and `cancelling` are pending requests; they are stored, so they survive any crash."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    RECOVERING = "recovering"
    PAUSING = "pausing"
    PAUSED = "paused"
    CANCELLING = "cancelling"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


Action = Literal["cancel", "pause", "resume"]
SILENCE_S = 15.0
"""A trainer that reports sends a heartbeat every 4 s."""
_S = RunState

TRANSITIONS: dict[RunState, frozenset[RunState]] = {
    _S.QUEUED: frozenset({_S.STARTING, _S.CANCELLED}),
    _S.STARTING: frozenset({_S.RUNNING, _S.FAILED, _S.CANCELLING, _S.RECOVERING}),
    _S.RUNNING: frozenset({_S.SUCCEEDED, _S.FAILED, _S.PAUSING, _S.CANCELLING, _S.RECOVERING}),
    _S.RECOVERING: frozenset({_S.RUNNING, _S.FAILED, _S.CANCELLING}),
    _S.PAUSING: frozenset({_S.PAUSED, _S.SUCCEEDED, _S.FAILED, _S.CANCELLING}),
    _S.PAUSED: frozenset({_S.QUEUED, _S.CANCELLED}),
    _S.CANCELLING: frozenset({_S.CANCELLED, _S.SUCCEEDED, _S.FAILED}),
    _S.SUCCEEDED: frozenset(),
    _S.FAILED: frozenset(),
    _S.CANCELLED: frozenset(),
}
TERMINAL = frozenset(state for state, following in TRANSITIONS.items() if not following)
EXECUTING = frozenset({_S.STARTING, _S.RUNNING, _S.RECOVERING, _S.PAUSING, _S.CANCELLING})
"""States in which a job exists or may exist. These runs hold a lease and count against quotas."""

REQUESTED: dict[Action, dict[RunState, RunState]] = {
    "cancel": {
        **dict.fromkeys((_S.QUEUED, _S.PAUSED), _S.CANCELLED),
        **dict.fromkeys((_S.STARTING, _S.RUNNING, _S.RECOVERING, _S.PAUSING), _S.CANCELLING),
    },
    "pause": {_S.RUNNING: _S.PAUSING},
    "resume": {_S.PAUSED: _S.QUEUED},
}
"""Action → state in which it has an effect → the state that it leads to."""
_REPEATED: dict[Action, frozenset[RunState]] = {
    "cancel": frozenset({_S.CANCELLING, _S.CANCELLED}),
    "pause": frozenset({_S.PAUSING, _S.PAUSED}),
    "resume": frozenset({_S.QUEUED, _S.STARTING, _S.RUNNING}),
}


class IllegalTransition(ValueError):
    """The requested transition is not allowed from the run's state."""


def check_transition(old: RunState, new: RunState) -> None:
    """Raise IllegalTransition unless `new` may follow `old`; a state never follows itself."""
    if new not in TRANSITIONS[old]:
        allowed = ", ".join(sorted(TRANSITIONS[old])) or "nothing: it is final"
        raise IllegalTransition(f"a run that is {old} cannot become {new}; after {old} comes {allowed}")


def requested_state(state: RunState, action: Action) -> RunState | None:
    """The state that a user's action leads to; None when the run is already there or on its way.

    Raises IllegalTransition when the action makes no sense in this state, e.g. pausing a finished run.
    """
    if state in REQUESTED[action]:
        return REQUESTED[action][state]
    if state in _REPEATED[action]:
        return None
    possible = ", ".join(sorted(REQUESTED[action]))
    raise IllegalTransition(f"a run that is {state} cannot {action}; {action} applies to runs that are {possible}")


def silent_s(state: RunState | str, heartbeat_at: float | None, now: float) -> float | None:
    """Seconds without a heartbeat of a run whose trainer has reported, once they exceed SILENCE_S."""
    seconds = now - heartbeat_at if heartbeat_at is not None and state in EXECUTING else 0.0
    return seconds if seconds > SILENCE_S else None


def pending_request(state: RunState) -> Literal["pause", "cancel"] | None:
    """The pause or cancel request that the trainer gets in this state, if any."""
    if state is _S.PAUSING:
        return "pause"
    return "cancel" if state in (_S.CANCELLING, _S.CANCELLED) else None
