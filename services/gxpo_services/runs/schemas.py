"""Requests and answers about runs, and how rows become answers. Pure. Times are seconds since 1970."""

from __future__ import annotations

import functools
import math
import time
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, Field

from gxpo_services.api.errors import FieldError, ProblemDetails
from gxpo_services.api.fields import Body, Id, JsonNumber, Page, PageQuery, Tag, Text, Word
from gxpo_services.api.idempotency import etag
from gxpo_services.db.tables import RunDocument
from gxpo_services.run_states import REQUESTED, TERMINAL, Action, RunState, silent_s
from gxpo_services.runs.configs import Override, RunSource
from gxpo_services.runs.plan import ExpectedCostView, expected_cost
from gxpo_trainer.config.io import build
from gxpo_trainer.config.rules import RULE_CHOICE
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.planner.report import PlanView

Notes = Annotated[Text, Field(max_length=20_000)]
Tags = Annotated[list[Tag], Field(max_length=20)]
Priority = Annotated[int, Field(ge=-1000, le=1000)]
BulkAction = Literal["cancel", "pause", "resume", "archive", "unarchive", "delete"]
PossibleAction = Literal["cancel", "pause", "resume", "clone", "retry", "delete"]


class RunRequest(RunSource):
    """A run to submit."""

    name: Word | None = Field(None, description="Display name; default: the config's name.")
    tags: Tags = Field([], description="Tags to find it by.", examples=[["demo"]])
    notes: Notes = Field("", description="Free text.")
    priority: Priority = Field(0, description="Higher ones start first.")
    group: Id | None = Field(None, description="Id of its group.")
    clone_of: Id | None = Field(None, description="Run that the config was taken from; becomes `parent_id`.")


class CloneRequest(Body):
    """Differences of a clone from its original; omitted members are copied."""

    overrides: list[Override] = Field([], max_length=200, description="`a.b=c`, applied to the original's config.")
    name: Word | None = Field(None, description="Display name.")
    tags: Tags | None = Field(None, description="Tags to find it by.")
    notes: Notes | None = Field(None, description="Free text.")
    priority: Priority | None = Field(None, description="Higher ones start first.")
    group: Id | None = Field(None, description="Group of the clone; null: no group.")


class RunPatch(Body):
    """Changes of an existing run; omitted members keep their values, null resets to the default."""

    name: Word | None = Field(None, description="Display name; null: the config's, which never changes.")
    tags: Tags | None = Field(None, description="All tags; they replace the current ones; null: none.")
    notes: Notes | None = Field(None, description="Free text; null: none.")
    archived: bool | None = Field(None, description="Archived runs are hidden from lists; null: false.")
    priority: Priority | None = Field(None, description="Effective while the run is queued; null: 0.")


class BulkRequest(Body):
    """One action on many runs."""

    action: BulkAction
    runs: Annotated[list[Id], Field(min_length=1, max_length=500, description="Ids.")]


class BulkItem(BaseModel):
    """What the action did to a run."""

    run: str
    state: RunState | None = Field(description="Afterwards; null for a run that was deleted or does not exist.")
    problem: ProblemDetails | None = Field(description="Why the run was left as it is; null when it was not.")


class BulkAnswer(BaseModel):
    """Results in the order of the request, each run once."""

    items: list[BulkItem]


class Progress(BaseModel):
    """Progress of a run."""

    fraction: float = Field(description="0 to 1, by the budget limit closest to exhaustion; 0 during a warm start.")
    steps: int = Field(description="Includes those of a warm start, as step_budget does.")
    step_budget: int | None
    backward_passes: JsonNumber
    backward_passes_budget: int | None
    tokens: JsonNumber
    tokens_budget: int | None
    training_s: JsonNumber = Field(description="Excludes evaluation, diagnostics, checkpoints and pauses.")
    hours_budget: JsonNumber | None
    seconds_left: float | None = Field(description="Estimated from the pace so far without evaluations; null: unknown.")
    queue_position: int | None = Field(description="1: next by priority and age; null unless queued.")


class RunView(BaseModel):
    """A run in a list."""

    id: str = Field(examples=["r01jd5cv3q80000000000"])
    name: str
    state: RunState
    reason: str | None = Field(description="Failure reason, or steps_done or budget_reached.")
    detail: str = Field(description="Error message.")
    ended_by: str | None = Field(description="The budget limit that was reached.")
    rule: str
    rule_label: str = Field(examples=["GXPO K=5"])
    model: str
    seed: int
    warm_steps: int = Field(description="Steps of its warm start, which use up no budget.")
    benchmarks: list[str] = Field(description="Benchmarks of its evaluations; `score` is their average.")
    tags: list[str]
    notes: str
    priority: int
    archived: bool
    group: str | None = Field(description="Id of its group.")
    group_values: dict[str, Any] | None = Field(description="Its settings in the sweep, by dotted path.")
    parent_id: str | None = Field(description="The original of a clone or a retry.")
    parent_kind: Literal["clone", "retry"] | None
    created_by: str = Field(description="Name of the token.")
    created_at: float
    updated_at: float
    started_at: float | None
    ended_at: float | None
    launch: int = Field(description="Jobs launched so far.")
    recoveries: int
    attempt: int = Field(description="The trainer's latest attempt.")
    heartbeat_at: float | None
    silent_s: float | None = Field(description="Seconds without a heartbeat once they exceed 15; null otherwise.")
    phase: str | None = Field(description="Activity of its trainer; null without one.", examples=["waiting for 3 GPUs"])
    progress: Progress
    score: JsonNumber | None = Field(description="Latest eval/average/pass@1.")
    score_best: JsonNumber | None
    score_step: int | None
    reward: JsonNumber | None = Field(description="Latest reward/mean.")
    metrics: dict[str, JsonNumber | None] = Field({}, description="Last values of requested metrics; the sort value.")
    pruned_at: float | None = Field(description="When GXPO_RETENTION_DAYS deleted samples and log; null: kept.")
    settings: dict[str, Any] = Field({}, description="The requested settings of its config; null where it has none.")
    config_sha256: str = Field(description="Equal for runs that differ only in name.")
    possible_actions: list[PossibleAction]


class RunCost(BaseModel):
    """Maximum cost of a run in backward passes."""

    backward_passes: int | None
    formula: str = Field(description="Explanation of the formula.")


class RunDetail(RunView):
    """A run with its config, identity and cost."""

    config: dict[str, Any] = Field(description="Every setting; infinities are strings.")
    identity: dict[str, Any] | None = Field(description="Versions, hardware, and hashes of data and policy.")
    cost: RunCost


class HeadlinePart(BaseModel):
    """A sentence, or a few about one thing."""

    topic: Literal["state", "gate", "evaluation", "comparison", "signal"]
    text: str = Field(description="May quote names and the trainer's message: never render it as markup.")
    runs: list[str] = Field(
        [], description="Ids of the runs that it names or compares, or of those that hold resources."
    )


class HeadlineView(BaseModel):
    """What became of a run, or what a list of runs says over all its pages."""

    text: str = Field(description="All sentences.", examples=["Running: step 12 of 40. The gate has not fired."])
    parts: list[HeadlinePart]

    @classmethod
    def of(cls, *parts: tuple[str, str, list[str]]) -> Self:
        """parts: topic, text and runs; without those that have no text."""
        told = [
            HeadlinePart.model_validate({"topic": topic, "text": text, "runs": runs})
            for topic, text, runs in parts
            if text
        ]
        return cls(text=" ".join(part.text for part in told), parts=told)


class RunPage(Page[RunView]):
    """A page of a list."""

    total: int | None = Field(description="Number of matching runs; on the first page only.")
    states: dict[RunState, int] | None = Field(description="The same by state.")
    headline: HeadlineView | None = Field(description="The states, and the most accurate run; on the first page only.")


class RunValidation(BaseModel):
    """Result of validating a run."""

    valid: bool
    errors: list[FieldError]
    cost: ExpectedCostView | None = Field(description="Null when the config is invalid.")
    config: dict[str, Any] | None = Field(description="The complete config.")
    toml: str | None = Field(description="The complete config as a run file.")
    equal_runs: list[RunView] = Field(description="Earlier runs whose configs differ only in name, newest first.")
    plan: PlanView | None = Field(None, description="Null when the config is invalid or cannot be planned.")
    plan_problem: str | None = Field(None, description="Why there is no plan of a valid config.")


class ListQuery(PageQuery):
    """Filters, order and page of the list of runs."""

    state: list[RunState] = Field([], max_length=20, description="Any of these.")
    rule: Text | None = Field(None, max_length=200, description=f"{', '.join(RULE_CHOICE.built_in)}, or a custom rule.")
    model: Text | None = Field(None, max_length=400, description="model.path, exact.")
    tag: list[Tag] = Field([], max_length=20, description="All of these.")
    group: Id | None = Field(None, description="Id of a group.")
    owner: Text | None = Field(None, max_length=100, description="Name of the token that submitted it, exact.")
    text: Text | None = Field(None, max_length=200, description="Substring of name, notes, id, model or a tag.")
    created_after: float | None = Field(None, ge=0, le=1e11, description="Seconds since 1970, exclusive.")
    created_before: float | None = Field(None, ge=0, le=1e11, description="Seconds since 1970, exclusive.")
    archived: Literal["false", "true", "any"] = Field("false", description="Exclude, select or include archived runs.")
    sort: Text = Field(
        "created_at",
        max_length=207,
        description="A column of runs, or `metric:<name>`. Runs without a value come last.",
        examples=["created_at", "score_best", "metric:reward/mean"],
    )
    order: Literal["asc", "desc"] = "desc"
    metric_at: Literal["last", "best", "highest", "lowest"] = Field(
        "last", description="Which value of the metric: its last, highest (best) or lowest value."
    )
    with_metric: list[Word] = Field([], max_length=50, description="Metrics whose last values are included.")
    with_setting: list[Word] = Field([], max_length=50, description="Settings or sections to include, by dotted path.")


RETRIED = frozenset({RunState.FAILED, RunState.CANCELLED})
_BUDGETS = ("step_budget", "backward_passes_budget", "tokens_budget", "hours_budget")

RunRow = dict[str, Any]
"""A row of listing.list_rows."""


def version(run: RunDetail) -> str:
    """Entity tag of what people edit of a run."""
    return etag(run.model_dump(mode="json", include=set(RunPatch.model_fields)))


def detail(run: RunRow, document: RunDocument) -> RunDetail:
    try:
        cost = expected_cost(build(document.config))
        words = {"backward_passes": cost.backward_passes, "formula": cost.per_step_words}
    except ConfigError as error:  # accepted by another version, or while another list of plugins was allowed
        words = {"backward_passes": None, "formula": str(error)}
    more = {"config": document.config, "identity": document.identity, "cost": words}
    return RunDetail.model_validate(with_progress(run) | more)


def with_progress(run: RunRow) -> dict[str, Any]:
    """The row with progress, silence and possible actions, as RunView has them."""
    state = RunState(run["state"])
    return run | {
        "progress": _progress(run),
        "silent_s": silent_s(state, run["heartbeat_at"], time.time()),
        "possible_actions": possible_actions(state),
    }


@functools.cache
def possible_actions(state: RunState) -> tuple[PossibleAction, ...]:
    """Actions that would have an effect in this state."""
    actions: dict[PossibleAction, bool] = {action: state in REQUESTED[action] for action in get_args(Action)}
    actions |= {"clone": True, "retry": state in RETRIED, "delete": state in TERMINAL}
    return tuple(action for action, is_possible in actions.items() if is_possible)


def _progress(run: RunRow) -> dict[str, Any]:
    """Progress of a run; `fraction` is the largest share of any budget limit."""
    training_s, warm_steps = run["training_s"], run["warm_steps"]
    spent = {"steps": run["step"], "backward_passes": run["backward_passes"], "tokens": run["tokens"]}
    bounds = {name: run[name] for name in _BUDGETS}
    # Of these, the steps alone include a warm start.
    used = zip((*spent.values(), training_s / 3600), bounds.values(), (warm_steps, 0, 0, 0), strict=True)
    shares = (max(0.0, min(1.0, (done - warm) / (bound - warm))) for done, bound, warm in used if bound is not None)
    fraction = 1.0 if run["state"] == RunState.SUCCEEDED else max(shares, default=0.0)
    is_known = run["state"] == RunState.RUNNING and 0.0 < fraction < 1.0 and training_s > 0
    left = training_s * (1 - fraction) / fraction if is_known else math.inf
    more = {"training_s": training_s, "queue_position": run["queue_position"]}
    return spent | bounds | more | {"fraction": fraction, "seconds_left": left if math.isfinite(left) else None}
