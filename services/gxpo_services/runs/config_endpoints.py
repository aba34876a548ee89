"""`/schema`, `/presets` and `/published`: the config schema, presets and the paper's results.

Requests and answers about configs, presets and the paper's numbers.
"""

from __future__ import annotations

import functools
from dataclasses import asdict
from importlib import resources
from typing import Any

from fastapi import APIRouter

from gxpo_services.api.dependencies import Viewer
from gxpo_services.api.errors import responses
from gxpo_services.runs.configs import PresetView, PublishedView, stored
from gxpo_trainer.compare.published import gxpo_paper
from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.io import load_preset, preset_names, to_toml

router = APIRouter(tags=["groups"], responses=responses(401, 403, 422, 503))


@router.get("/schema", summary="The config's JSON schema")
def get_schema(_: Viewer) -> dict[str, Any]:
    """Every setting with its type, default and description."""
    return _schema()


@router.get("/presets", summary="Config presets")
def list_presets(_: Viewer) -> list[PresetView]:
    """Presets to submit unchanged or to start from."""
    return _presets()


@router.get("/published", summary="The paper's results")
def get_published(_: Viewer) -> PublishedView:
    """Tables of the GXPO paper, with the paper's own grader, templates and problem sets."""
    return PublishedView.model_validate(asdict(gxpo_paper()))


@functools.cache
def _schema() -> dict[str, Any]:
    return RunConfig.model_json_schema()


@functools.cache
def _presets() -> list[PresetView]:
    found = []
    for name in preset_names():
        config = load_preset(name)
        summary = _summary(name)
        found.append(PresetView(name=name, summary=summary, toml=to_toml(config, [summary]), config=stored(config)))
    return found


def _summary(name: str) -> str:
    """The leading comment of a preset file."""
    text = (resources.files("gxpo_trainer.config") / "presets" / f"{name}.toml").read_text(encoding="utf-8")
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    return " ".join(lines)
