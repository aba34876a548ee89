"""Requests and answers about configs, presets and the paper's numbers."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gxpo_services.api.fields import Text

Override = Annotated[Text, Field(min_length=1, max_length=2000)]

EXAMPLE_CONFIG: dict[str, Any] = {
    "name": "gxpo on word problems",
    "learner": {"rule": {"name": "gxpo", "k": 5, "alpha": 0.5}},
    "budget": {"steps": 40},
}


class RunSource(BaseModel):
    """Source of a config: exactly one of `config`, `toml` and `preset`, plus `overrides`."""

    model_config = ConfigDict(extra="forbid")

    config: dict[str, Any] | None = Field(
        None, description="Nested settings; omitted ones have their defaults.", examples=[EXAMPLE_CONFIG]
    )
    toml: Text | None = Field(None, max_length=200_000, description="The config as the text of a run file.")
    preset: Text | None = Field(None, max_length=100, description="Name of a preset.", examples=["demo"])
    overrides: list[Override] = Field(
        [], max_length=200, description="`a.b=c` as for `gxpo train --set`.", examples=[["learner.rule.k=10"]]
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> RunSource:
        given = [name for name in ("config", "toml", "preset") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"exactly one of config, toml and preset is required; {' and '.join(given) or 'none'} is given"
            )
        return self


class PlannedPart(BaseModel):
    """A share of a device's memory."""

    name: str = Field(examples=["optimizer"])
    bytes: int


class PlannedPhase(BaseModel):
    """What one device holds at a time."""

    phase: str = Field(examples=["learner"])
    needed_bytes: int
    limit_bytes: int | None = Field(description="Usable memory of the device; null where it is not known.")
    parts: list[PlannedPart]


class PlannedSeconds(BaseModel):
    """Seconds of one step by phase."""

    sampling: float
    verify: float
    passes: float
    look_ahead: float
    sync: float
    other: float
    step: float


class PlannedRule(BaseModel):
    """Cost of the run under one rule, with its look-ahead on to the end."""

    label: str = Field(examples=["GXPO K=5"])
    own: bool = Field(description="Whether it is the run's rule.")
    backward_passes_per_step: int
    seconds: PlannedSeconds
    steps: int | None
    backward_passes: int | None
    hours: float | None
    gpu_hours: float | None = Field(description="Null without GPUs.")


class PlanView(BaseModel):
    """Expected memory, time and cost of a run."""

    device: str = Field(description="Kind of device that it is planned for.", examples=["h100-80"])
    num_devices: int
    devices_needed: int
    shared_devices: bool = Field(description="Whether learner and samplers are on the same devices.")
    resident: bool = Field(description="Whether nothing has to leave a shared device between phases.")
    fits: bool
    advice: str | None = Field(description="What to change; null when the run fits.")
    memory: list[PlannedPhase]
    kv_cache_bytes: int
    kv_cache_sequences: int = Field(description="Sequences of mean length in a sampler's cache.")
    rules: list[PlannedRule]
    assumptions: list[str]


class PresetView(BaseModel):
    """A config preset."""

    name: str = Field(examples=["demo"])
    summary: str = Field(description="Purpose.")
    toml: str = Field(description="The complete run file.")
    config: dict[str, Any] = Field(description="The config as nested settings.")


class PublishedTableView(BaseModel):
    """A table of the paper."""

    number: int
    name: str = Field(examples=["sampled_pass@1"])
    model: str | None = Field(description="Model of all rows; null where each row names its own.")
    rows: list[dict[str, Any]] = Field(description="As printed; scores in percent.")


class PublishedView(BaseModel):
    """The paper's results."""

    source: str
    units: str
    notes: list[str] = Field(description="Remarks that do not follow from the tables.")
    tables: list[PublishedTableView]
