"""Every member of a request has an upper bound, and JSON from outside is read strictly."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from support.bounds import unbounded

from gxpo_services.api.fields import MAX_VALUES, Body, faults, read_json
from gxpo_services.app import create_app
from gxpo_services.compare.schemas import CompareQuery, ExportQuery, HeatMapQuery
from gxpo_services.outputs.metric_series import ManySeriesQuery
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


SWEEP = {"name": "s", "base": {"preset": "demo"}}
SERIES = {"names": ["a"], "runs": ["r"]}
# Bounds of numbers are those of docs/rest.md, which is generated.
BOUNDS: list[tuple[type[BaseModel], str, list[Any], list[Any]]] = [
    (CompareQuery, "budgets", [["x" * 1000] * 50], [["x"] * 51, ["x" * 1001]]),
    (CompareQuery, "baseline", ["x" * 1000], ["x" * 1001]),
    (CompareQuery, "benchmark", ["x" * 200], ["x" * 201]),
    (CompareQuery, "metric", ["pass@1", "maj@999999"], ["pass@", "pass@1000000", "mean@1"]),
    (CompareQuery, "runs", [["x" * 20_000] * 200], [["x"] * 201, ["x" * 20_001]]),
    (CompareQuery, "groups", [["x" * 20_000] * 200], [["x"] * 201, ["x" * 20_001]]),
    (HeatMapQuery, "x", ["x" * 200], ["x" * 201]),
    (HeatMapQuery, "y", ["x" * 200], ["x" * 201]),
    (ExportQuery, "parts", [["runs"], ["runs"] * 4], [[], ["runs"] * 5]),
    (ManySeriesQuery, "names", [["x" * 20_000] * 500], [[], ["x"] * 501, ["x" * 20_001]]),
    (ManySeriesQuery, "runs", [["r"], ["r" * 64] * 200], [[], ["r"] * 201, ["r" * 65], ["r/"]]),
    (SweepRequest, "name", ["x", "x" * 200], ["", "x" * 201]),
    (SweepRequest, "seeds", [[0, 2**63 - 1], [1] * 100], [[-1], [2**63], [1] * 101, [True]]),
    (SweepRequest, "grid", [{"p" * 200: ["x" * 100_000]}, {str(n): [1] * 100 for n in range(8)}, {"p": [[1] * 20]},
                            {"p": [-(2**63) + 1]}],
     [{"": [1]}, {"p" * 201: [1]}, {"p": []}, {"p": [1] * 101}, {str(n): [1] for n in range(9)}, {"p": [[1] * 21]},
      {"p": ["x" * 100_001]}]),
]  # fmt: skip


@pytest.mark.parametrize(("request_type", "member", "accepted", "refused"), BOUNDS)
def test_a_member_has_its_stated_bounds(
    request_type: type[BaseModel], member: str, accepted: list[Any], refused: list[Any]
) -> None:
    others: dict[type[BaseModel], dict[str, Any]] = {
        SweepRequest: SWEEP,
        ManySeriesQuery: {"names": ["a"], "runs": ["r"]},
    }
    for value in accepted:
        request_type.model_validate(others.get(request_type, {}) | {member: value})
    for value in refused:
        with pytest.raises(ValidationError):
            request_type.model_validate(others.get(request_type, {}) | {member: value})


def test_what_a_request_leaves_out_has_these_values() -> None:
    compared, series = CompareQuery(), ManySeriesQuery.model_validate(SERIES)
    assert (compared.metric, compared.x, compared.smoothing, compared.gates) == ("pass@1", "step", 0, True)
    assert (compared.baseline, compared.benchmark, compared.sampling_share) == (None, None, None)
    assert (compared.runs, compared.groups, compared.budgets) == ([], [], [])
    assert (HeatMapQuery().metric, HeatMapQuery().show) == ("pass@1", "final")
    assert (ExportQuery().format, ExportQuery().parts) == ("csv", ["metrics", "evaluations", "runs"])
    assert (series.x, series.after, series.max_points) == ("step", None, 1000)
    assert (series.joined, series.smoothing) == (False, 0)
    sweep = SweepRequest.model_validate(SWEEP)
    assert (sweep.grid, sweep.seeds, sweep.preset, sweep.control) == ({}, [], None, False)
    assert (sweep.tags, sweep.notes, sweep.priority) == ([], "", 0)


def test_every_request_body_is_strict() -> None:
    assert all(kind.model_config["strict"] and kind.model_config["extra"] == "forbid" for kind in Body.__subclasses__())


class Counted(dict[str, object]):
    """A dict that counts how often its items are read."""

    reads = 0

    def items(self) -> object:  # type: ignore[override]
        type(self).reads += 1
        return super().items()


def nested(depth: int) -> dict[str, object]:
    value: dict[str, object] = {"a": 1}
    for _ in range(depth - 1):
        value = {"a": value}
    return value


def test_free_form_json_is_bounded_in_depth_keys_and_number_of_values() -> None:
    assert faults(nested(32)) == []
    assert faults(nested(33)) == [(".".join("a" * 33), "is nested deeper than 32 levels")]
    assert faults({"k" * 100: [1]}) == []
    assert faults({"x": [0] * (MAX_VALUES - 2)}) == [], "the list and the object are values too"
    assert faults({"x": [0] * (MAX_VALUES - 1)}) == [("", f"has more than {MAX_VALUES} values")]
    assert faults({"\ud800": 1, "x": {"a\0": 1}}) == [(p, "has a key that cannot be stored") for p in ("", "x")]


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
