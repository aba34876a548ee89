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
    """Where a config comes from: exactly one of `config`, `toml` and `preset`; then `overrides` are put in."""

    model_config = ConfigDict(extra="forbid")

    config: dict[str, Any] | None = Field(
        None, description="Nested settings; what is left out has its default.", examples=[EXAMPLE_CONFIG]
    )
    toml: Text | None = Field(None, max_length=200_000, description="The same as the text of a run file.")
    preset: Text | None = Field(None, max_length=100, description="Name of a preset.", examples=["demo"])
    overrides: list[Override] = Field(
        [], max_length=200, description="`a.b=c` as for `gxpo train --set`.", examples=[["learner.rule.k=10"]]
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> RunSource:
        given = [name for name in ("config", "toml", "preset") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"needs exactly one of config, toml and preset; {' and '.join(given) or 'none'} is given")
        return self


class PresetView(BaseModel):
    """A ready-made config."""

    name: str = Field(examples=["demo"])
    summary: str = Field(description="What it is for.")
    toml: str = Field(description="The completed run file.")
    config: dict[str, Any] = Field(description="The same as nested settings.")


class PublishedTableView(BaseModel):
    """A table of the paper."""

    number: int
    name: str = Field(examples=["sampled_pass@1"])
    model: str | None = Field(description="Of all its rows; null where each row names its own.")
    rows: list[dict[str, Any]] = Field(description="As printed; scores in percent.")


class PublishedView(BaseModel):
    """The paper's numbers, to show beside one's own."""

    source: str
    units: str
    notes: list[str] = Field(description="What does not follow from the printed cells.")
    tables: list[PublishedTableView]
