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
