"""Every member of a request has an upper bound, and JSON from outside is read strictly."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError
from support.bounds import unbounded

from gxpo_services.api.fields import MAX_VALUES, Body, faults, read_json
from gxpo_services.app import create_app
from gxpo_services.runs.schemas import BulkRequest, CloneRequest, RunPatch, RunRequest
from gxpo_services.settings import ServiceSettings
from gxpo_services.sweeps.grid import SweepRequest

FREE_FORM = {
    # `faults` bounds configs; ingest/batches.py bounds what trainers report.
    *(f"post {path}config" for path in ("runs ", "runs/validate ", "sweeps base.", "sweeps/validate base.")),
    *(f"post runs/{{run_id}}/ingest {member}" for member in ("", "identity", "outcome")),
    *(f"post runs/{{run_id}}/ingest {kind}[]" for kind in ("metrics", "samples", "evaluations", "events")),
}


def test_every_member_and_parameter_of_a_request_is_bounded(tmp_path: Path) -> None:
    description = create_app(ServiceSettings(home=tmp_path)).openapi()
    schemas = description["components"]["schemas"]
    found = set()
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            contents = operation.get("requestBody", {}).get("content", {}).values()
            parts = [("", content["schema"]) for content in contents]
            parts += [(parameter["name"], parameter["schema"]) for parameter in operation.get("parameters", ())]
            where = f"{method} {path.removeprefix('/api/v1/')}"
            found |= {f"{where} {place}" for name, part in parts for place in unbounded(part, schemas, name)}
    assert found == {f"{place}: object" for place in FREE_FORM} | {"delete tokens/{token_id} token_id: string"}


@pytest.mark.parametrize(
    "text",
    [
        *("NaN", "[-Infinity]", '{"a": 1e999}', "-1e999", "9" * 400 + ".0", "9" * 5000, "[" * 65 + "]" * 65),
        *('{"a":' * 65 + "1" + "}" * 65, "[" * 200_000, "", "nul", "[1,]", "\ufeff{}"),
    ],
)
def test_what_is_no_strict_json_is_a_value_error(text: str) -> None:
    for form in (text, text.encode()):
        with pytest.raises(ValueError, match=r"."):
            read_json(form)


def test_strict_json_is_read_as_the_standard_library_reads_it() -> None:
    value = {"a": [1, -2.5, 1e308, True, None, "NaN", "1e999", {"b": "\u00e9"}], "big": 9 * 10**399}
    assert read_json(json.dumps(value)) == value
    assert read_json("[" * 64 + "]" * 64) == json.loads("[" * 64 + "]" * 64)
    assert read_json("7") == 7
    with pytest.raises(UnicodeDecodeError):
        read_json(b'"\xff"')


@pytest.mark.parametrize(
    ("request_type", "body"),
    [
        (RunRequest, {"preset": "demo", "priority": False}),
        (RunRequest, {"preset": "demo", "priority": 1.0}),
        (RunRequest, {"preset": "demo", "priority": "1"}),
        (RunPatch, {"priority": True}),
        (RunPatch, {"archived": 1}),
        (RunPatch, {"archived": "yes"}),
        (CloneRequest, {"priority": False}),
        (SweepRequest, {"name": "s", "base": {"preset": "demo"}, "seeds": [True]}),
        (BulkRequest, {"action": "cancel", "runs": [1]}),
    ],
)
def test_a_member_of_another_type_is_refused(request_type: type[BaseModel], body: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="Input should be a valid"):
        request_type.model_validate(body)


def test_every_request_body_is_strict() -> None:
    assert all(kind.model_config["strict"] and kind.model_config["extra"] == "forbid" for kind in Body.__subclasses__())


class Counted(dict[str, object]):
    """A dict that counts how often its items are read."""

    reads = 0

    def items(self) -> object:  # type: ignore[override]
        type(self).reads += 1
        return super().items()


def test_the_work_of_checking_free_form_json_is_bounded_whatever_its_shape() -> None:
    many = [{"a": 0}] * (MAX_VALUES + 1)
    assert faults({"x": many}) == [("x", f"has more than {MAX_VALUES} values")]
    wide = {"x": [[0] * 1000] * 1000}
    assert faults(wide) == [("", f"has more than {MAX_VALUES} values")]
    # A long key would be part of the path of every value below it: 4 MB × 2 million values.
    assert faults({"k" * 4_000_000: [0] * 2_000_000}) == [("", "has a key of more than 100 characters")]
    nested = Counted({str(number): Counted({}) for number in range(MAX_VALUES)})
    assert faults(nested) == [("", f"has more than {MAX_VALUES} values")]
    assert Counted.reads == 1
    assert len(faults({str(number): "\0" for number in range(1000)})) == 100
    assert faults({"ok": [1, 2.5, "text", None, math.inf]}) == []
