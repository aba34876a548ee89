"""Requests and answers about runs. Times are seconds since 1970."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from gxpo_services.api.errors import FieldError
from gxpo_services.api.fields import Id, JsonNumber, Tag, Text, Word
from gxpo_services.configs.schemas import Override, RunSource
from gxpo_services.run_states import RunState

Notes = Annotated[Text, Field(max_length=20_000)]
Tags = Annotated[list[Tag], Field(max_length=20)]
Priority = Annotated[int, Field(ge=-1000, le=1000)]
PossibleAction = Literal["cancel", "pause", "resume", "clone", "retry", "delete"]


class RunRequest(RunSource):
    """A run to make."""

    name: Word | None = Field(None, description="For people; none: the name in the config.")
    tags: Tags = Field([], description="Words to find it by.", examples=[["demo"]])
    notes: Notes = Field("", description="Free text.")
    priority: Priority = Field(0, description="Higher ones start first.")
    group: Id | None = Field(None, description="Id of the group that it belongs to.")


class CloneRequest(BaseModel):
    """What a clone has otherwise than its original; what is left out is as there."""

    model_config = ConfigDict(extra="forbid")

    overrides: list[Override] = Field([], max_length=200, description="`a.b=c`, put into the original's config.")
    name: Word | None = Field(None, description="For people.")
    tags: Tags | None = Field(None, description="Words to find it by.")
    notes: Notes | None = Field(None, description="Free text.")
    priority: Priority | None = Field(None, description="Higher ones start first.")
    group: Id | None = Field(None, description="Group of the clone; none: no group.")


class RunPatch(BaseModel):
    """What may be changed of a run that exists; what is left out or null stays."""

    model_config = ConfigDict(extra="forbid")

    name: Word | None = Field(None, description="For people. The config keeps the name that it was submitted with.")
    tags: Tags | None = Field(None, description="All words, in place of the present ones.")
    notes: Notes | None = Field(None, description="Free text.")
    archived: bool | None = Field(None, description="Archived runs are left out of lists.")
    priority: Priority | None = Field(None, description="Counts while the run waits.")


class Progress(BaseModel):
    """How far a run has come."""

    fraction: float = Field(description="0 to 1, by the bound of the budget that is nearest to its end.")
    steps: int
    step_budget: int | None
    backward_passes: JsonNumber
    backward_passes_budget: int | None
    tokens: JsonNumber
    tokens_budget: int | None
    training_s: JsonNumber = Field(description="Without evaluation, diagnostics, checkpoints and pauses.")
    hours_budget: JsonNumber | None
    seconds_left: float | None = Field(description="By its pace so far, evaluations left out; null when unknown.")
    queue_position: int | None = Field(description="1: next by priority and age; null unless queued.")


class RunView(BaseModel):
    """A run in a list."""

    id: str = Field(examples=["r01jd5cv3q80000000000"])
    name: str
    state: RunState
    reason: str | None = Field(description="Why it failed, or steps_done or budget_reached.")
    detail: str = Field(description="What went wrong, in words.")
    ended_by: str | None = Field(description="The bound of the budget that was reached.")
    rule: str
    rule_label: str = Field(examples=["GXPO K=5"])
    model: str
    seed: int
    tags: list[str]
    notes: str
    priority: int
    archived: bool
    group: str | None = Field(description="Id of its group.")
    group_values: dict[str, Any] | None = Field(description="Its own settings in a sweep, by dotted path.")
    parent_id: str | None = Field(description="The run that it is a clone or a retry of.")
    parent_kind: Literal["clone", "retry"] | None
    created_by: str = Field(description="Name of the token.")
    created_at: float
    updated_at: float
    started_at: float | None
    ended_at: float | None
    launch: int = Field(description="Jobs launched so far.")
    recoveries: int
    attempt: int = Field(description="The trainer's newest attempt.")
    heartbeat_at: float | None
    progress: Progress
    score: JsonNumber | None = Field(description="Newest eval/average/pass@1.")
    score_best: JsonNumber | None
    score_step: int | None
    reward: JsonNumber | None = Field(description="Newest reward/mean.")
    metrics: dict[str, JsonNumber | None] = Field(
        {}, description="Last values of the metrics asked for, and the value that the list is sorted by."
    )
    config_sha256: str = Field(description="Equal for runs that differ in name alone.")
    possible_actions: list[PossibleAction]


class ExpectedCostView(BaseModel):
    """What a run will take at most."""

    steps: int | None = Field(description="Null when only hours or tokens bound them.")
    backward_passes: int | None = Field(description="Full-batch gradients, an upper bound; null when unknown.")
    per_step_words: str = Field(examples=["GXPO: 3 backward passes a step (probes + 1)"])


class RunCost(BaseModel):
    """What a run will take at most, in backward passes."""

    backward_passes: int | None
    formula: str = Field(description="How it comes about, in words.")


class RunDetail(RunView):
    """A run with all that it was asked to do and said about itself."""

    config: dict[str, Any] = Field(description="Every setting; infinities are words.")
    identity: dict[str, Any] | None = Field(description="Versions, hardware, hashes of data and policy.")
    cost: RunCost


class RunPage(BaseModel):
    """A part of a list."""

    items: list[RunView]
    next_cursor: str | None = Field(description="For the next part; null at the end.")
    total: int | None = Field(description="Runs that fit the filters; with the first part only.")


class RunValidation(BaseModel):
    """What would become of a request."""

    valid: bool
    errors: list[FieldError]
    cost: ExpectedCostView | None = Field(description="Null when the config cannot be used.")
    config: dict[str, Any] | None = Field(description="The completed config.")
    toml: str | None = Field(description="The completed config as a run file.")
    equal_runs: list[RunView] = Field(description="Earlier runs whose configs differ in name alone, newest first.")


class ListQuery(BaseModel):
    """Filters, order and part of the list of runs."""

    state: list[RunState] = Field([], max_length=20, description="Any of these.")
    rule: Text | None = Field(None, max_length=20, description="grpo, sfpo or gxpo.")
    model: Text | None = Field(None, max_length=400, description="model.path, whole.")
    tag: list[Tag] = Field([], max_length=20, description="All of these.")
    group: Id | None = Field(None, description="Id of a group.")
    text: Text | None = Field(None, max_length=200, description="Part of name, notes, id, model or a tag.")
    created_after: float | None = Field(None, ge=0, le=1e11, description="Seconds since 1970, itself left out.")
    created_before: float | None = Field(None, ge=0, le=1e11, description="Seconds since 1970, itself left out.")
    archived: Literal["false", "true", "any"] = Field("false", description="Archived runs: without, only, also.")
    sort: Text = Field(
        "created_at",
        max_length=207,
        description="A column of runs, or `metric:<name>`. Runs without a value come last.",
        examples=["created_at", "score_best", "metric:reward/mean"],
    )
    order: Literal["asc", "desc"] = "desc"
    metric_at: str = Field(
        "last",
        pattern=r"^(last|best|highest|lowest|[0-9]{1,9})$",
        description="Which value of the metric: its last, its highest (best), its lowest, or the newest at or before "
        "a step.",
    )
    with_metric: list[Word] = Field([], max_length=50, description="Metrics whose last values come along.")
    limit: int = Field(50, ge=1, le=200, description="Most runs in the answer.")
    cursor: Text | None = Field(None, max_length=2000, description="`next_cursor` of the part before.")
