"""From inputs to a plan: memory by device and phase, whether it fits, seconds and cost of the whole budget."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pydantic import ValidationError

from gxpo_trainer.config import RuleSettings
from gxpo_trainer.config.rules import compared_rules, rule_name
from gxpo_trainer.planner.advice import advise
from gxpo_trainer.planner.devices import Assumptions, assumptions_for
from gxpo_trainer.planner.fitting import Fit, fit_of
from gxpo_trainer.planner.inputs import Inputs
from gxpo_trainer.planner.timing import StepTime, step_time
from gxpo_trainer.planner.workload import Workload, workload_of


@dataclass(frozen=True, slots=True)
class RulePlan:
    """A run's cost under one rule, with its look-ahead on to the end: an upper bound where a gate can fire.

    own: whether it is the run's rule. steps: None where the budget does not bound them.
    """

    label: str
    own: bool
    passes_per_step: int
    time: StepTime
    steps: int | None
    backward_passes: int | None
    hours: float | None
    gpu_hours: float | None


@dataclass(frozen=True, slots=True)
class Plan:
    """What is known of a run before it starts. advice: what to change when it does not fit, None when it fits."""

    inputs: Inputs
    assumed: Assumptions
    load: Workload
    fit: Fit
    advice: str | None
    rules: tuple[RulePlan, ...]

    @property
    def fits(self) -> bool:
        return self.fit.fits


def make_plan(inputs: Inputs, assumed: Assumptions | None = None) -> Plan:
    """The plan of a run. assumed: None for the defaults of its kind of device."""
    assumed = assumed or assumptions_for(inputs.device)
    load = workload_of(inputs, assumed)
    fit = fit_of(inputs, assumed)
    own = inputs.rule
    rules = [own if rule_name(kind) == own.name else _adapted(kind, own) for kind in compared_rules()]
    if all(rule is not own for rule in rules):
        rules.append(own)
    costs = tuple(_rule_plan(inputs, assumed, load, rule) for rule in rules if rule is not None)
    return Plan(inputs, assumed, load, fit, None if fit.fits else advise(inputs, assumed), costs)


def fits_resident(plan: Plan) -> bool:
    """Whether learner and sampler can stay on their shared devices at once, so that nothing has to be parked.

    True on separate devices and on hosts without GPUs, where nothing is ever parked.
    """
    return plan.fit.resident


def refusal(plan: Plan) -> str | None:
    """The sentence that refuses a run that cannot fit; None for one that can, or might within the planner's error."""
    return plan.advice if plan.fit.certain else None


def _adapted(kind: type[RuleSettings], own: RuleSettings) -> RuleSettings | None:
    try:
        return kind.adapted_from(own)
    except ValidationError:
        return None


def _rule_plan(inputs: Inputs, assumed: Assumptions, load: Workload, rule: RuleSettings) -> RulePlan:
    chosen = replace(inputs, rule=rule)
    time = step_time(chosen, assumed, load, rule, gate_open=True)
    per_step = rule.passes_per_step(gate_open=True)
    steps = _steps(chosen, load, time.total, per_step)
    hours = None if steps is None else steps * time.total / 3600
    return RulePlan(
        label=rule.label_of(rule.model_dump()),
        own=rule is inputs.rule,
        passes_per_step=per_step,
        time=time,
        steps=steps,
        backward_passes=None if steps is None else steps * per_step,
        hours=hours,
        gpu_hours=hours * inputs.devices_needed if hours is not None and inputs.on_gpu else None,
    )


def _steps(inputs: Inputs, load: Workload, step_s: float, passes: int) -> int | None:
    """Steps to the first bound of the budget."""
    budget = inputs.budget
    bounds = (
        (budget.steps, 1.0),
        (budget.backward_passes, float(passes)),
        (None if budget.hours is None else budget.hours * 3600, step_s),
        (budget.tokens, inputs.sequences * load.response),
    )
    found = [bound / used for bound, used in bounds if bound is not None]
    steps = min(found, default=math.inf)
    return max(1, math.ceil(steps - 1e-9)) if math.isfinite(steps) else None
