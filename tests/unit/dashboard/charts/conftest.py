"""Every chart that a test of this folder builds has a specification that Vega-Lite's own schema accepts: a misspelt or
misplaced property, which the browser would ignore, fails the test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from altair.vegalite import v6
from jsonschema_rs import Draft7Validator

from gxpo_dashboard.charts.base import Chart, with_brush

_SCHEMA = Path(v6.__file__).parent / "schema" / "vega-lite-schema.json"


def _read(node: dict[str, Any]) -> dict[str, Any]:
    # Names such as `ScaleDatumDef<string>` are no addresses yet.
    return {**node, "$ref": quote(node["$ref"], safe="#/")} if "$ref" in node else node


@pytest.fixture(scope="session")
def schema() -> Draft7Validator:
    return Draft7Validator(json.loads(_SCHEMA.read_text(encoding="utf-8"), object_hook=_read))


@pytest.fixture(autouse=True)
def accepted(schema: Draft7Validator, monkeypatch: pytest.MonkeyPatch) -> None:
    build = Chart.__init__

    def checked(chart: Chart, *args: Any, **kwargs: Any) -> None:
        build(chart, *args, **kwargs)
        spec = json.loads(json.dumps(with_brush(chart) if chart.x else chart.spec))
        assert not [error.message[-300:] for error in schema.iter_errors(spec)]

    monkeypatch.setattr(Chart, "__init__", checked)
