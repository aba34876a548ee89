"""Requests and answers about groups and sweeps. Times are seconds since 1970."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from gxpo_services.api.errors import FieldError
from gxpo_services.api.fields import MAX_INTEGER, Text, Word
from gxpo_services.configs.schemas import RunSource
from gxpo_services.run_states import RunState
from gxpo_services.runs.schemas import Notes, Priority, RunView, Tags

SweepPreset = Literal["alpha", "k", "tau", "rules"]
Scalar = bool | int | float | Text
GridValue = Scalar | Annotated[list[Scalar], Field(max_length=20)] | None
Path = Annotated[Text, Field(min_length=1, max_length=200)]
MAX_RUNS = 500
"""Runs of one sweep."""


class GroupRequest(BaseModel):
    """An empty group, for runs that are submitted one by one."""

    model_config = ConfigDict(extra="forbid")

    name: Word = Field(description="For people.", examples=["GRPO, SFPO and GXPO"])


class SweepRequest(BaseModel):
    """One base config × a grid of settings × seeds."""

    model_config = ConfigDict(extra="forbid")

    name: Word = Field(description="For people; runs are called after it.", examples=["alpha ablation"])
    base: RunSource = Field(description="The config that all runs start from.", examples=[{"preset": "demo"}])
    grid: dict[Path, Annotated[list[GridValue], Field(min_length=1, max_length=100)]] = Field(
        {},
        max_length=8,
        description="Dotted path → its values; every combination is a run.",
        examples=[{"learner.rule.k": [3, 5, 10]}],
    )
    seeds: list[Annotated[int, Field(ge=0, le=MAX_INTEGER)]] = Field(
        [],
        max_length=100,
        description="Each combination with each of these; none: the seed of the base.",
        examples=[[0, 1, 2]],
    )
    preset: SweepPreset | None = Field(
        None,
        description="A grid of the paper: `alpha` (α × K), `k`, `tau`; or `rules`: GRPO, SFPO and GXPO of the base.",
    )
    control: bool = Field(
        False,
        description="Also GRPO at learning rate × (αK + 1) for every look-ahead, as the control of a longer step.",
    )
    tags: Tags = Field([], description="Words to find the runs by.")
    notes: Notes = Field("", description="Free text of every run.")
    priority: Priority = Field(0, description="Higher ones start first.")


class SweepPresetView(BaseModel):
    """A ready-made sweep."""

    name: SweepPreset
    summary: str
    grid: dict[str, list[Any]] = Field(description="Empty for `rules`, which changes the rule as a whole.")
    control: bool = Field(description="Whether the control of the learning rate is part of it.")


class SweepCost(BaseModel):
    """What all runs of a sweep will take at most."""

    runs: int
    steps: int | None = Field(description="Null when a run is bounded by hours or tokens alone.")
    backward_passes: int | None = Field(description="Full-batch gradients, an upper bound; null when unknown.")
    per_step_words: str = Field(description="Cost of a step, rule by rule.")


class PlannedRun(BaseModel):
    """A run that a sweep would make."""

    name: str
    rule: str
    rule_label: str
    seed: int
    group_values: dict[str, Any] = Field(description="Its own settings, by dotted path.")
    backward_passes: int | None
    config_sha256: str


class SweepPlan(BaseModel):
    """What would become of a sweep."""

    valid: bool
    errors: list[FieldError]
    cost: SweepCost | None = Field(description="Null when the sweep cannot be made.")
    runs: list[PlannedRun]


class GroupView(BaseModel):
    """A group in a list."""

    id: str = Field(examples=["g01jd5cv3q80000000000"])
    name: str
    kind: str = Field(description="sweep, or group for runs submitted one by one.")
    created_at: float
    created_by: str
    num_runs: int
    by_state: dict[RunState, int] = Field(description="Runs in each state that occurs.")


class GroupDetail(GroupView):
    """A group with its runs."""

    spec: dict[str, Any] = Field(description="The request that made it.")
    runs: list[RunView] = Field(description="In the order in which they were made, at most 1000.")


class GroupPage(BaseModel):
    """A part of the list of groups, newest first."""

    items: list[GroupView]
    next_cursor: str | None = Field(description="For the next part; null at the end.")


class SweepAnswer(BaseModel):
    """A sweep that was made."""

    group: GroupView
    runs: list[RunView]
    cost: SweepCost
