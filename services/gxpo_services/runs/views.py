"""From rows to what the API shows. Pure."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, get_args

from gxpo_services.fields import JsonNumber
from gxpo_services.runs.configs import restored
from gxpo_services.runs.cost import expected_cost
from gxpo_services.runs.models import Run
from gxpo_services.runs.schemas import PossibleAction, Progress, RunCost, RunDetail, RunView
from gxpo_services.runs.states import TERMINAL, Action, IllegalTransition, RunState, wanted_state
from gxpo_trainer.compare import rule_label
from gxpo_trainer.jsonl import decode_number, plain

REWARD = "reward/mean"
RETRIED = frozenset({RunState.FAILED, RunState.CANCELLED})
"""States of which a run can be tried again."""


def view(
    run: Run,
    *,
    queue_position: int | None = None,
    reward: float | None = None,
    metrics: Mapping[str, float | None] | None = None,
) -> RunView:
    """A run in a list. metrics: values that come along."""
    return RunView.model_validate(_members(run, queue_position, reward) | {"metrics": dict(metrics or {})})


def detail(run: Run, *, queue_position: int | None = None, reward: float | None = None) -> RunDetail:
    cost = expected_cost(restored(run.config))
    more = {
        "config": run.config,
        "identity": run.identity,
        "cost": RunCost(backward_passes=cost.backward_passes, formula=cost.words),
    }
    return RunDetail.model_validate(_members(run, queue_position, reward) | more)


def json_number(value: float | None) -> JsonNumber | None:
    """A number as JSON has it."""
    number: JsonNumber | None = plain(value)
    return number


_SAME = frozenset(RunView.model_fields) - {
    *("tags", "group", "rule_label", "progress", "reward", "metrics", "possible_actions"),
}
"""Members that are columns of the same name."""


def _members(run: Run, queue_position: int | None, reward: float | None) -> dict[str, Any]:
    return {name: getattr(run, name) for name in _SAME} | {
        "tags": sorted(tag.tag for tag in run.tags),
        "group": run.group.id if run.group else None,
        "rule_label": rule_label(run.config),
        "progress": progress(run, queue_position),
        "reward": reward,
        "possible_actions": possible_actions(RunState(run.state)),
    }


@functools.cache
def possible_actions(state: RunState) -> tuple[PossibleAction, ...]:
    """What a person can do now that changes something."""
    actions: list[PossibleAction] = []
    for action in get_args(Action):
        try:
            if wanted_state(state, action) is not None:
                actions.append(action)
        except IllegalTransition:
            continue
    actions.append("clone")
    if state in RETRIED:
        actions.append("retry")
    if state in TERMINAL:
        actions.append("delete")
    return tuple(actions)


def progress(run: Run, queue_position: int | None) -> Progress:
    """Shares of the budget's bounds; the largest one is how far the run is."""
    budget = run.config["budget"]
    hours = None if budget["hours"] is None else decode_number(budget["hours"])
    used = {
        "steps": (float(run.step), budget["steps"]),
        "backward_passes": (run.backward_passes, budget["backward_passes"]),
        "tokens": (run.tokens, budget["tokens"]),
        "hours": (run.training_s / 3600, hours),
    }
    shares = [done / float(bound) for done, bound in used.values() if bound is not None]
    fraction = min(1.0, max(0.0, *shares)) if shares else 0.0
    if run.state == RunState.SUCCEEDED:
        fraction = 1.0
    left = None
    if run.state == RunState.RUNNING and 0.0 < fraction < 1.0 and run.training_s > 0:
        left = run.training_s * (1 - fraction) / fraction
    return Progress(
        fraction=fraction,
        steps=run.step,
        step_budget=budget["steps"],
        backward_passes=run.backward_passes,
        backward_passes_budget=budget["backward_passes"],
        tokens=run.tokens,
        tokens_budget=budget["tokens"],
        training_s=run.training_s,
        hours_budget=hours,
        seconds_left=left,
        queue_position=queue_position,
    )
