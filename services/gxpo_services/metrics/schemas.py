"""Responses about metrics."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from gxpo_services.api.fields import JsonNumber

Axis = Literal["step", "backward_passes", "time", "tokens"]


class SeriesView(BaseModel):
    """Series of a metric; the three lists have equal lengths, in order of steps."""

    x: list[float] = Field(description="Position on the requested axis.", examples=[[1, 2, 3]])
    y: list[JsonNumber] = Field(description="Values.", examples=[[0.25, 0.31, "NaN"]])
    steps: list[int] = Field(description="Steps of the points.", examples=[[1, 2, 3]])
    downsampled: bool = Field(
        description="Whether the series was thinned: to minima and maxima, with `joined` to evenly spaced steps."
    )
    sum: float | None = Field(
        None, description="Sum of the finite values of all steps, also those up to `after`; only with `joined`."
    )
    count: int | None = Field(None, description="Number of these values; only with `joined`.")


class MetricsView(BaseModel):
    """Metrics of a run, of the effective history: a later attempt replaces the steps it repeats."""

    x: Axis
    run: str = Field(description="Id of the run.")
    last_step: int = Field(description="Latest step of the run; it may still get more metrics, e.g. of an evaluation.")
    attempt: int = Field(description="Latest attempt.")
    revision: int = Field(description="Increases when a new attempt rewrites history; then request everything.")
    series: dict[str, SeriesView] = Field(description="Series by metric; empty without values.")


class ManyMetricsView(BaseModel):
    """Metrics of several runs."""

    runs: dict[str, MetricsView] = Field(description="By id of the run.")
