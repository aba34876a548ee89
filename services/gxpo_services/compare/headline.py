"""`/runs/{run_id}/headline`: what became of a run, in a few sentences.

Each sentence is a pure function of the run, of the last and extreme values of its metrics, and of its evaluations. They
are compared with the baseline that its group has for the same seed and otherwise equal settings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter
from sqlalchemy import select
from sqlalchemy.orm import Session

from gxpo_client.formats import duration, figure, number_of, percent
from gxpo_services.api.dependencies import ReadSession, ServiceRoute, Viewer, find
from gxpo_services.api.errors import NotFound, responses
from gxpo_services.api.fields import RunId
from gxpo_services.db.tables import Run, RunDocument
from gxpo_services.outputs import metrics
from gxpo_services.outputs.metric_series import costs_at
from gxpo_services.outputs.metrics import BACKWARD_PASSES, SCORE, Summary
from gxpo_services.run_states import EXECUTING, TERMINAL, RunState
from gxpo_services.runs import service
from gxpo_services.runs.listing import REWARD
from gxpo_services.runs.schemas import HeadlineView, RunView
from gxpo_trainer.compare.curves import EvaluationCurve, Point, RunCurves, at_budget, peak
from gxpo_trainer.compare.evidence import against
from gxpo_trainer.compare.groups import common_budgets
from gxpo_trainer.compare.rows import GATE_ENDS, GATE_Z
from gxpo_trainer.compare.seeds import SeedGroup, condition_settings
from gxpo_trainer.config.rules import RULE_CHOICE, in_words, rule_name

Last = Mapping[str, Summary]
"""Last and extreme values by metric."""
_TAU, _SHUTOFF = GATE_ENDS
_ACTIVE, _FLAT, _LOSS = "gate/active", "reward/no_signal", "policy/loss"
_RATE = "learner.optimizer.learning_rate"
_MOST_BASELINES = 20
_NO_RECORDS = np.empty(0, dtype=metrics.RECORD)


def state_sentence(run: RunView, holders: Sequence[str] = ()) -> str:
    """`Running: step 12 of 40.` holders: names of the runs that hold resources while this one is queued."""
    steps, bound, state = run.progress.steps, run.progress.step_budget, run.state
    place = f"step {steps:,}" + (f" of {bound:,}" if bound else "")
    if state is RunState.QUEUED:
        held = f"; resources are held by {in_words([*holders], 'and')}" if holders else ""
        position = run.progress.queue_position
        text = f"Queued{f' at position {position}' if position else ''}{held}"
    elif state in TERMINAL:
        reason = f": {run.reason.replace('_', ' ')}" if run.reason else ""
        word = "Finished" if state is RunState.SUCCEEDED else state.capitalize()
        text = f"{word} {f'at {place}' if steps else 'before the first step'}{reason}"
    else:
        phase = run.phase if run.phase != "training" else None
        silent = None if run.silent_s is None else f"no heartbeat for {duration(run.silent_s)}"
        parts = (place if steps or not phase else None, phase, silent)
        text = f"{state.capitalize()}: {', '.join(filter(None, parts))}"
    again = f". Recovered {run.recoveries}×" if run.recoveries else ""
    return f"{text}{again}. {' '.join(run.detail.split())}".strip()


def gate_sentence(rule: Mapping[str, Any], last: Last, ended: bool) -> str:
    """Whether the gate fired, and its largest z against τ; empty before a step. rule: settings of `learner.rule`."""
    gate = rule.get("gate")
    if not isinstance(gate, Mapping) or _TAU not in last:
        return ""
    tau, two_sided, z = last[_TAU].last, bool(gate.get("two_sided")), last.get(GATE_Z)
    limit = f", τ {figure(tau, 3)}" if gate.get("mode") != "never" and tau is not None and math.isfinite(tau) else ""
    scores = [abs(end) if two_sided else end for end in (z.lowest, z.highest) if end is not None] if z else []
    measured = f" (largest {'|z|' if two_sided else 'z'} {figure(max(scores), 3)}{limit})" if scores else ""
    if _SHUTOFF in last and (fired := last[_SHUTOFF].last) is not None:
        again = "; the look-ahead is on again" if _ACTIVE in last and last[_ACTIVE].last else ""
        return f"The gate fired at step {fired:,.0f}{measured}{again}."
    if not limit:
        return f"The gate cannot fire{measured}."
    if not scores:
        return "The gate did not leave its warm-up." if ended else "The gate is in its warm-up."
    return f"The gate {'did not fire' if ended else 'has not fired'}{measured}."


def evaluation_sentence(curve: EvaluationCurve | None, last: Last, ended: bool) -> str:
    """The last accuracy, and the best one if that is higher; a run without rewards has its loss instead."""
    if curve is not None:
        now, best = curve.point(-1), peak(curve)
        higher = f"; best {percent(best.accuracy)} {_place(best)}" if best.accuracy > now.accuracy else ""
        return f"{percent(now.accuracy)} {_place(now)}{higher}."
    if REWARD not in last and _LOSS in last and (loss := last[_LOSS].last) is not None:
        return f"Loss {figure(loss, 3)} at step {last[_LOSS].last_step:,}."
    return ("It was not evaluated." if ended else "No evaluation yet.") if last else ""


def comparison_sentence(
    own: EvaluationCurve | None, baselines: Mapping[str, tuple[str, EvaluationCurve]]
) -> tuple[str, str]:
    """The difference to the most accurate baseline at equal backward passes, and its id; empty if there is none.

    baselines: id → label and curve. Accuracies of initial policies are not compared.
    """
    compared = []
    if own is None:
        return "", ""
    for run_id, (label, curve) in baselines.items():
        pair = [SeedGroup(name, (RunCurves(name, name, 0, one),)) for name, one in (("own", own), ("other", curve))]
        (budget,) = common_budgets(pair).get("backward_passes", (0.0,))
        here, there = (at_budget(one, "backward_passes", budget) for one in (own, curve))
        if here and there and min(here.spent, there.spent) > 0:
            compared.append((there.accuracy, here.accuracy, budget, label, run_id))
    if not compared:
        return "", ""
    reference, accuracy, budget, label, run_id = max(compared)
    name = label if len(compared) == 1 else f"{label}, the best of {len(compared)} baselines,"
    begin = "This is" if budget >= own.backward_passes[-1] else f"After {budget:,.0f} backward passes it was"
    return f"{begin} {against(accuracy - reference, name)} with the same seed.", run_id


def signal_sentence(last: Last) -> str:
    """Whether the latest step was one of several without a gradient; see reward/no_signal."""
    if _FLAT not in last or REWARD not in last or last[_FLAT].last_step < last[REWARD].last_step:
        return ""
    return "No signal: almost all responses of a problem have equal rewards, so nothing is learned."


def _place(point: Point) -> str:
    if math.isnan(point.backward_passes):
        return f"at step {point.steps:,.0f}"
    passes = number_of(round(point.backward_passes), "backward pass")
    return f"after {passes}" if point.backward_passes else "before the first step"


router = APIRouter(route_class=ServiceRoute, tags=["runs"], responses=responses(401, 404, 422, 503))


@router.get("/runs/{run_id}/headline", summary="What became of a run")
def run_headline(run_id: RunId, _: Viewer, session: ReadSession) -> HeadlineView:
    """State, gate, last and best evaluation, and the difference at equal backward passes to the baseline that its group
    has for its seed, if any."""
    run = find(session, Run, run_id)
    views = service.views(session, [run.number])
    if not views:
        raise NotFound(f"there is no run {run_id}")
    holders: dict[str, str] = {}
    if run.state == RunState.QUEUED:
        executing = select(Run.id, Run.name).where(Run.state.in_(sorted(EXECUTING))).order_by(Run.number.desc())
        holders = dict(session.execute(executing).all())
    names, stored = metrics.summaries(session, run.number)
    last = {name: stored[number] for name, number in names.items()}
    baselines = _baselines(session, run)
    curves = _curves(session, [run.number, *(number for number, *_ in baselines)])
    own, ended = curves.get(run.number), run.state in TERMINAL
    evaluated = {other: (label, curves[number]) for number, other, label in baselines if number in curves}
    difference, other = comparison_sentence(own, evaluated)
    return HeadlineView.of(
        ("state", state_sentence(views[0], list(holders.values())), list(holders)),
        ("gate", gate_sentence(run.config["learner"]["rule"], last, ended), []),
        ("evaluation", evaluation_sentence(own, last, ended), []),
        ("comparison", difference, [run.id, other]),
        ("signal", signal_sentence(last), []),
    )


def _baselines(session: Session, run: Run) -> list[tuple[int, str, str]]:
    """Number, id and label of the runs of baseline rules in a run's group with its seed and conditions; none for a
    baseline."""
    rules = [rule_name(rule) for rule in RULE_CHOICE.known() if rule.family == "baseline"]
    if run.group_number is None or run.rule in rules:
        return []
    query = select(Run.number, Run.id, Run.rule_label, Run.group_values, RunDocument.config).join(RunDocument)
    query = query.where(
        Run.group_number == run.group_number, Run.seed == run.seed, Run.rule.in_(rules), Run.score_step.is_not(None)
    )
    baselines, own = [], condition_settings(run.config)
    for number, run_id, label, values, config in session.execute(query.order_by(Run.number)):
        if condition_settings(config) == own:
            rate = (values or {}).get(_RATE)
            baselines.append((number, run_id, label if rate is None else f"{label} lr {float(rate):g}"))
    return baselines[:_MOST_BASELINES]


def _curves(session: Session, run_numbers: Sequence[int]) -> dict[int, EvaluationCurve]:
    """The finite scores of runs over their backward passes, without runs that have none."""
    names = metrics.find_numbers(session, (SCORE, BACKWARD_PASSES))
    histories = metrics.histories(session, list(names.values()), metrics.first_steps(session, run_numbers))
    curves = {}
    for number in run_numbers:
        scores = histories.get((number, names.get(SCORE, -1)), _NO_RECORDS)
        scores = scores[np.isfinite(scores["value"])]
        if len(scores):
            passes = costs_at(scores["step"], histories.get((number, names.get(BACKWARD_PASSES, -1))))
            unknown, values = np.full(len(scores), np.nan), scores["value"].astype(np.float64)
            steps = scores["step"].astype(np.float64)
            curves[number] = EvaluationCurve(steps, passes, unknown, unknown, values, unknown, unknown)
    return curves
