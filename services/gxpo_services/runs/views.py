"""Rows to API views. Pure."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, get_args

from gxpo_services.api.preconditions import etag
from gxpo_services.configs.checks import restored
from gxpo_services.configs.cost import expected_cost
from gxpo_services.db.tables.runs import RunDocument
from gxpo_services.run_states import TERMINAL, Action, IllegalTransition, RunState, requested_state
from gxpo_services.runs.schemas import PossibleAction, RunCost, RunDetail, RunPatch, RunView
from gxpo_trainer.jsonl import plain

RETRIED = frozenset({RunState.FAILED, RunState.CANCELLED})
"""States in which a run can be retried."""


_LISTED = tuple(name for name in RunView.model_fields if name not in ("metrics", "settings"))
# Fields that may be NaN or infinite, which JSON represents as strings.
_NUMBERS = ("score", "score_best", "reward")
_NUMBERS_OF_PROGRESS = ("backward_passes", "tokens", "training_s", "hours_budget")
_BUDGETS = ("step_budget", "backward_passes_budget", "tokens_budget", "hours_budget")

Shown = dict[str, Any]
"""A row of shown_repository.shown_rows."""


def view(run: Shown) -> RunView:
    """A run as shown in a list."""
    return RunView.model_validate(_members(run))


def listed(run: Shown, metrics: Mapping[str, float | None], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The same as plain JSON values, unvalidated: validation would take as long as the query.

    metrics, settings: additional values.
    """
    members = _members(run)
    found = {name: members[name] for name in _LISTED}
    for part, names in ((found, _NUMBERS), (found["progress"], _NUMBERS_OF_PROGRESS)):
        for name in names:
            part[name] = plain(part[name])
    found["settings"] = dict(settings)
    found["metrics"] = {name: plain(value) for name, value in metrics.items()}
    return found


def version(run: RunDetail) -> str:
    """Entity tag of what people edit of a run."""
    return etag(run.model_dump(mode="json", include=set(RunPatch.model_fields)))


def detail(run: Shown, document: RunDocument) -> RunDetail:
    cost = expected_cost(restored(document.config))
    more = {
        "config": document.config,
        "identity": document.identity,
        "cost": RunCost(backward_passes=cost.backward_passes, formula=cost.words),
    }
    return RunDetail.model_validate(_members(run) | more)


def _members(run: Shown) -> dict[str, Any]:
    return run | {"progress": _progress(run), "possible_actions": possible_actions(RunState(run["state"]))}


@functools.cache
def possible_actions(state: RunState) -> tuple[PossibleAction, ...]:
    """Actions that would have an effect in this state."""
    actions: list[PossibleAction] = []
    for action in get_args(Action):
        try:
            if requested_state(state, action) is not None:
                actions.append(action)
        except IllegalTransition:
            continue
    actions.append("clone")
    if state in RETRIED:
        actions.append("retry")
    if state in TERMINAL:
        actions.append("delete")
    return tuple(actions)


def _progress(run: Shown) -> dict[str, Any]:
    """Progress of a run; `fraction` is the largest share of any budget limit."""
    spent = {"steps": run["step"], **{name: run[name] for name in ("backward_passes", "tokens", "training_s")}}
    bounds = {name: run[name] for name in _BUDGETS}
    training_s = run["training_s"]
    used = (run["step"], run["backward_passes"], run["tokens"], training_s / 3600)
    shares = (min(1.0, done / bound) for done, bound in zip(used, bounds.values(), strict=True) if bound is not None)
    fraction = max(shares, default=0.0)
    if run["state"] == RunState.SUCCEEDED:
        fraction = 1.0
    left = None
    if run["state"] == RunState.RUNNING and 0.0 < fraction < 1.0 and training_s > 0:
        left = training_s * (1 - fraction) / fraction
    return spent | bounds | {"fraction": fraction, "seconds_left": left, "queue_position": run["queue_position"]}
