"""`/schema`, `/presets` and `/published`: what a config can be, presets to start from, and the paper's results."""

from __future__ import annotations

import functools
from dataclasses import asdict
from importlib import resources
from itertools import takewhile
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, Field

from gxpo_services.api.dependencies import Viewer
from gxpo_services.api.errors import responses
from gxpo_services.runs.configs import stored
from gxpo_trainer.compare.published import gxpo_paper
from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.components import known_classes
from gxpo_trainer.config.io import load_preset, preset_names, to_toml


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


router = APIRouter(tags=["groups"], responses=responses(401, 403, 422, 503))


@router.get("/schema", summary="The config's JSON schema")
def get_schema(_: Viewer) -> dict[str, Any]:
    """Every setting with its type, default and description."""
    return config_schema()


@router.get("/presets", summary="Config presets")
def list_presets(_: Viewer) -> list[PresetView]:
    """Presets to submit unchanged or to start from."""
    return presets()


@router.get("/published", summary="The paper's results")
def get_published(_: Viewer) -> PublishedView:
    """Tables of the GXPO paper, with the paper's own grader, templates and problem sets."""
    return PublishedView.model_validate(asdict(gxpo_paper()))


def config_schema() -> dict[str, Any]:
    """The JSON schema of a config, with the custom settings classes that this server allows."""
    return _schema_of(known_classes())


@functools.lru_cache(maxsize=4)
def _schema_of(_known: tuple[type[BaseModel], ...]) -> dict[str, Any]:
    return RunConfig.model_json_schema()


@functools.cache
def presets() -> list[PresetView]:
    """Every preset; the leading comment of its file is the summary."""
    views = []
    for name in preset_names():
        config = load_preset(name)
        text = (resources.files("gxpo_trainer.config") / "presets" / f"{name}.toml").read_text(encoding="utf-8")
        comment = takewhile(lambda line: line.startswith("#"), text.splitlines())
        summary = " ".join(line.removeprefix("#").strip() for line in comment)
        views.append(PresetView(name=name, summary=summary, toml=to_toml(config, [summary]), config=stored(config)))
    return views
