"""`/runs/{run_id}/headline`: what became of a run, in a few sentences.

Each sentence is a pure function of the run and of the last and extreme values of its metrics. How it compares with
other runs, `/compare` says, with intervals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field
from sqlalchemy import select

from gxpo_services.api.dependencies import ReadSession, ServiceRoute, Viewer
from gxpo_services.api.errors import responses
from gxpo_services.api.fields import RunId
from gxpo_services.db.tables import Run
from gxpo_services.outputs import metrics
from gxpo_services.outputs.metrics import Summary
from gxpo_services.run_states import EXECUTING, TERMINAL, RunState
from gxpo_services.runs import service
from gxpo_services.runs.listing import REWARD
from gxpo_services.runs.schemas import RunView
from gxpo_trainer.compare.evidence import percent
from gxpo_trainer.compare.rows import GATE_ENDS, GATE_Z
from gxpo_trainer.config.rules import in_words

Topic = Literal["state", "gate", "evaluation", "signal"]
Last = Mapping[str, Summary]
"""Last and extreme values by metric."""
_TAU, _SHUTOFF = GATE_ENDS
_ACTIVE, _FLAT, _LOSS = "gate/active", "reward/no_signal", "policy/loss"


class HeadlinePart(BaseModel):
    """A sentence, or a few about one thing."""

    topic: Topic
    text: str = Field(description="May quote the trainer's message: never render it as markup.")
    runs: list[str] = Field([], description="Ids of the runs that hold resources.")


class HeadlineView(BaseModel):
    """What became of a run."""

    text: str = Field(description="All sentences.", examples=["Running: step 12 of 40. The gate has not fired."])
    parts: list[HeadlinePart]


def state_sentence(run: RunView, holders: Sequence[str] = ()) -> str:
    """`Running: step 12 of 40.` holders: names of the runs that hold resources while this one is queued."""
    steps, bound, state = run.progress.steps, run.progress.step_budget, run.state
    place = f"step {steps:,}" + (f" of {bound:,}" if bound else "")
    if state is RunState.QUEUED:
        held = f"; resources are held by {in_words([*holders], 'and')}" if holders else ""
        text = f"Queued at position {run.progress.queue_position}{held}"
    elif state in TERMINAL:
        reason = f": {run.reason.replace('_', ' ')}" if run.reason else ""
        word = "Finished" if state is RunState.SUCCEEDED else state.capitalize()
        text = f"{word} {f'at {place}' if steps else 'before the first step'}{reason}"
    else:
        phase = run.phase if run.phase != "training" else None
        text = f"{state.capitalize()}: {', '.join(filter(None, (place if steps or not phase else None, phase)))}"
    again = f". Recovered {run.recoveries}×" if run.recoveries else ""
    return f"{text}{again}. {' '.join(run.detail.split())}".strip()


def gate_sentence(rule: Mapping[str, Any], last: Last, ended: bool) -> str:
    """Whether the gate fired, and its largest z against τ; empty before a step. rule: settings of `learner.rule`."""
    gate = rule.get("gate")
    if not isinstance(gate, Mapping) or _TAU not in last:
        return ""
    tau, two_sided, z = last[_TAU].last, bool(gate.get("two_sided")), last.get(GATE_Z)
    limit = f", τ {_figure(tau)}" if gate.get("mode") != "never" and tau is not None and math.isfinite(tau) else ""
    scores = [abs(end) if two_sided else end for end in (z.lowest, z.highest) if end is not None] if z else []
    measured = f" (largest {'|z|' if two_sided else 'z'} {_figure(max(scores))}{limit})" if scores else ""
    if _SHUTOFF in last and (fired := last[_SHUTOFF].last) is not None:
        again = "; the look-ahead is on again" if _ACTIVE in last and last[_ACTIVE].last else ""
        return f"The gate fired at step {fired:,.0f}{measured}{again}."
    if not limit:
        return f"The gate cannot fire{measured}."
    if not scores:
        return "The gate did not leave its warm-up." if ended else "The gate is in its warm-up."
    return f"The gate {'did not fire' if ended else 'has not fired'}{measured}."


def evaluation_sentence(run: RunView, last: Last, ended: bool) -> str:
    """The last accuracy, and the best one if that is higher; a run without rewards has its loss instead."""
    if run.score_best is not None:
        now, best = float("nan" if run.score is None else run.score), float(run.score_best)
        place = f"at step {run.score_step:,}" if run.score_step else "before the first step"
        return f"{percent(now)} {place}{'' if best == now else f'; best {percent(best)}'}."
    if REWARD not in last and _LOSS in last and (loss := last[_LOSS].last) is not None:
        return f"Loss {_figure(loss)} at step {last[_LOSS].last_step:,}."
    return ("It was not evaluated." if ended else "No evaluation yet.") if last else ""


def signal_sentence(last: Last) -> str:
    """Whether the latest step was one of several without a gradient; see reward/no_signal."""
    if _FLAT not in last or REWARD not in last or last[_FLAT].last_step < last[REWARD].last_step:
        return ""
    return "No signal: almost all responses of a problem have equal rewards, so nothing is learned."


def _figure(value: float) -> str:
    return f"{value:.3g}".replace("-", "−")


router = APIRouter(route_class=ServiceRoute, tags=["runs"], responses=responses(401, 404, 422, 503))


@router.get("/runs/{run_id}/headline", summary="What became of a run")
def run_headline(run_id: RunId, _: Viewer, session: ReadSession) -> HeadlineView:
    """State, gate, last and best evaluation, and whether its rewards still teach it something."""
    run = service.find(session, run_id)
    (view,) = service.views(session, [run.number])
    holders: dict[str, str] = {}
    if run.state == RunState.QUEUED:
        executing = select(Run.id, Run.name).where(Run.state.in_(sorted(EXECUTING))).order_by(Run.number.desc())
        holders = dict(session.execute(executing).all())
    names = metrics.find_numbers(session, (GATE_Z, *GATE_ENDS, _ACTIVE, _FLAT, _LOSS, REWARD))
    stored = metrics.summaries(session, run.number)
    last = {name: stored[number] for name, number in names.items() if number in stored}
    ended = run.state in TERMINAL
    told: list[tuple[Topic, str, list[str]]] = [
        ("state", state_sentence(view, list(holders.values())), list(holders)),
        ("gate", gate_sentence(run.config["learner"]["rule"], last, ended), []),
        ("evaluation", evaluation_sentence(view, last, ended), []),
        ("signal", signal_sentence(last), []),
    ]
    parts = [HeadlinePart(topic=topic, text=text, runs=runs) for topic, text, runs in told if text]
    return HeadlineView(text=" ".join(part.text for part in parts), parts=parts)
