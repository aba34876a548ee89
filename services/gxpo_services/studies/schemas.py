"""Requests and answers about studies."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from gxpo_services.api.fields import JsonNumber, Text
from gxpo_services.groups.schemas import GroupView
from gxpo_services.runs.schemas import Notes, Priority, Tags


class StudyRequest(BaseModel):
    """A study file (docs/studies.md)."""

    model_config = ConfigDict(extra="forbid")

    toml: Annotated[Text, Field(max_length=200_000)] = Field(description="Content of the file.")
    tags: Tags = Field([], description="Tags of every run.")
    notes: Notes = Field("", description="Notes of every run.")
    priority: Priority = Field(0, description="Higher ones start first.")


class ArmView(BaseModel):
    """An arm of a study."""

    name: str
    label: str
    learning_rate: JsonNumber | None = Field(description="Its best learning rate; null until its ladder is complete.")
    seeds_done: list[int] = Field(description="Reported seeds that are done.")


class StudyCost(BaseModel):
    """Upper bounds: a ladder ends where an arm's accuracy falls."""

    runs: int
    backward_passes: int


class StudyView(BaseModel):
    """A study and how far it is. Its runs are those of the group."""

    group: GroupView
    title: str
    baseline: str = Field(description="Label of the arm that the others are compared with.")
    seeds: list[int]
    cost: StudyCost
    runs_done: int
    complete: bool
    failed: list[str] = Field(description="Ids of failed runs that the study waits for: retry them.")
    arms: list[ArmView]
    study: dict[str, Any] = Field(description="The file, with its defaults.")
