"""Requests and answers about groups and sweeps. Times are seconds since 1970."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from gxpo_services.api.errors import FieldError
from gxpo_services.api.fields import MAX_INTEGER, Text, Word
from gxpo_services.run_states import RunState
from gxpo_services.runs.configs import RunSource
from gxpo_services.runs.schemas import Notes, Priority, RunView, Tags
from gxpo_trainer.config.rules import COMPARED_LABELS, in_words

SweepPreset = Literal["alpha", "k", "tau", "rules"]
Scalar = bool | int | float | Text
GridValue = Scalar | Annotated[list[Scalar], Field(max_length=20)] | None
Path = Annotated[Text, Field(min_length=1, max_length=200)]
MAX_RUNS = 500
"""Runs of one sweep."""


class GroupRequest(BaseModel):
    """An empty group, for runs that are submitted individually."""

    model_config = ConfigDict(extra="forbid")

    name: Word = Field(description="Display name.", examples=["GRPO, SFPO and GXPO"])


class SweepRequest(BaseModel):
    """One base config × a grid of settings × seeds."""

    model_config = ConfigDict(extra="forbid")

    name: Word = Field(description="Display name; a prefix of the runs' names.", examples=["alpha ablation"])
    base: RunSource = Field(description="The base config of all runs.", examples=[{"preset": "demo"}])
    grid: dict[Path, Annotated[list[GridValue], Field(min_length=1, max_length=100)]] = Field(
        {},
        max_length=8,
        description="Dotted path → values; every combination is a run.",
        examples=[{"learner.rule.k": [3, 5, 10]}],
    )
    seeds: list[Annotated[int, Field(ge=0, le=MAX_INTEGER)]] = Field(
        [],
        max_length=100,
        description="Seeds of each combination; default: the seed of the base.",
        examples=[[0, 1, 2]],
    )
    preset: SweepPreset | None = Field(
        None,
        description="A preset grid: the paper's `alpha` (α × K), `k` and `tau`, or "
        f"`rules`: {in_words(COMPARED_LABELS, 'and')}.",
    )
    control: bool = Field(
        False,
        description="Add GRPO at learning rate × (αK + 1) for every look-ahead, as a control for the longer step.",
    )
    tags: Tags = Field([], description="Tags of every run.")
    notes: Notes = Field("", description="Notes of every run.")
    priority: Priority = Field(0, description="Higher ones start first.")


class SweepPresetView(BaseModel):
    """A sweep preset."""

    name: SweepPreset
    summary: str
    grid: dict[str, list[Any]] = Field(description="Empty for `rules`, which replaces the whole rule.")
    control: bool = Field(description="Whether it includes the learning-rate control.")


class SweepCost(BaseModel):
    """Maximum cost of all runs of a sweep."""

    runs: int
    steps: int | None = Field(description="Null when only hours or tokens limit a run.")
    backward_passes: int | None = Field(description="Full-batch gradients, an upper bound; null when unknown.")
    per_step_words: str = Field(description="Cost per step of each rule.")


class PlannedRun(BaseModel):
    """A run of a planned sweep."""

    name: str
    rule: str
    rule_label: str
    seed: int
    group_values: dict[str, Any] = Field(description="Its settings in the sweep, by dotted path.")
    backward_passes: int | None
    config_sha256: str


class SweepPlan(BaseModel):
    """Result of validating a sweep."""

    valid: bool
    errors: list[FieldError]
    cost: SweepCost | None = Field(description="Null when the sweep is invalid.")
    runs: list[PlannedRun]


class GroupView(BaseModel):
    """A group in a list."""

    id: str = Field(examples=["g01jd5cv3q80000000000"])
    name: str
    kind: str = Field(description="sweep, study, or group for runs submitted individually.")
    created_at: float
    created_by: str
    num_runs: int
    by_state: dict[RunState, int] = Field(description="Number of runs by state.")


class GroupDetail(GroupView):
    """A group with its runs."""

    spec: dict[str, Any] = Field(description="The request that created it.")
    runs: list[RunView] = Field(description="In order of creation, at most 1000.")


class GroupPage(BaseModel):
    """A page of the list of groups, newest first."""

    items: list[GroupView]
    next_cursor: str | None = Field(description="Cursor of the next page; null at the end.")


class GroupPatch(BaseModel):
    """Changes of a group."""

    model_config = ConfigDict(extra="forbid")

    name: Word = Field(description="Display name. Names of its runs stay.")


class SweepAnswer(BaseModel):
    """A submitted sweep."""

    group: GroupView
    runs: list[RunView]
    cost: SweepCost
