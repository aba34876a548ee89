"""Requests and answers about metrics and what trainers report."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from gxpo_services.api.fields import JsonNumber

Axis = Literal["step", "backward_passes", "time", "tokens"]


class SeriesView(BaseModel):
    """One metric's curve; the three lists have equal lengths and follow the steps."""

    x: list[float] = Field(description="Position on the axis that was asked for.", examples=[[1, 2, 3]])
    y: list[JsonNumber] = Field(description="Values.", examples=[[0.25, 0.31, "NaN"]])
    steps: list[int] = Field(description="Steps of the points.", examples=[[1, 2, 3]])
    downsampled: bool = Field(description="Whether points were left out; peaks and dips never are.")


class MetricsView(BaseModel):
    """Curves of one run, of the history that counts: a later attempt replaces what it repeats."""

    x: Axis
    run: str = Field(description="Id of the run.")
    last_step: int = Field(description="Newest step of the run; it may get more metrics yet, an evaluation's say.")
    attempt: int = Field(description="Newest attempt that reported.")
    revision: int = Field(description="Grows when a new attempt rewrites history: ask for everything anew then.")
    series: dict[str, SeriesView] = Field(description="Curves by metric; one without values is empty.")


class ManyMetricsView(BaseModel):
    """Curves of several runs."""

    runs: dict[str, MetricsView] = Field(description="By id of the run.")
