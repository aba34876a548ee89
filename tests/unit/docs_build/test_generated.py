"""The generated pages are what the code generates now, and their sources describe everything."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from docs_build import commands, generated, metrics, rest
from docs_build.metrics import SECTIONS, undescribed
from gxpo_trainer.cli import build_parser

ROOT = Path(__file__).parents[3]
TRAINER = ROOT / "trainer" / "gxpo_trainer"
GROUPS = "update|gate|grad|gxpo|diagnostics|policy|importance|reward|verify|rollout|time|system|eval"


def test_a_page_that_differs_is_stale(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for path, text in generated.pages().items():
        (tmp_path / path).write_text(text + ("!" if path == "docs/metrics.md" else ""), encoding="utf-8")
    assert generated.stale(tmp_path) == ["docs/metrics.md"]


def test_every_metric_in_the_trainers_code_is_described() -> None:
    code = [path.read_text(encoding="utf-8") for path in TRAINER.rglob("*.py")]
    named = {name for text in code for name in re.findall(rf'"((?:{GROUPS})/[a-z0-9_@/]*[a-z0-9_])"', text)}
    assert len(named) > 60
    assert not undescribed(named)


def test_every_described_metric_occurs_in_the_trainers_code() -> None:
    code = "\n".join(path.read_text(encoding="utf-8") for path in TRAINER.rglob("*.py"))
    names = [name for section in SECTIONS for row in section.metrics for name in row]
    plain = [re.split(r"[@<…]", name)[0].rstrip("/").rpartition("/")[2] for name in names]
    parts = {part.removesuffix("_fraction").removesuffix("_mean").removesuffix("_s") for part in plain}
    assert [part for part in sorted(parts) if part not in code] == []


def test_a_name_is_described_as_a_whole_only() -> None:
    known = {"policy/pass12/loss", "eval/mine.jsonl/pass@4/ci_low", "reward/Brevity", "eval/math500/full/pass@1"}
    assert undescribed(known) == set()
    assert undescribed({"gate/z2", "my/gate/z", "policy/passes"}) == {"gate/z2", "my/gate/z", "policy/passes"}


def test_a_bar_in_a_meaning_does_not_end_the_cell() -> None:
    (row,) = [line for line in metrics.render_page().splitlines() if line.startswith("| `rollout/logprob_gap_mean`")]
    assert r"\|log π_learner − log π_sampler\|" in row


def test_every_command_and_argument_has_a_help_text() -> None:
    bare = re.findall(r"^\| `[^|]*` \|  \|$", commands.render_page(build_parser()), re.MULTILINE)
    assert {line.split("`")[1].split()[0] for line in bare} <= {"--name", "--notes", "--title"}


def test_arguments_are_rendered_with_their_values_and_choices() -> None:
    parser = argparse.ArgumentParser(prog="tool")
    nested = parser.add_subparsers().add_parser("go", help="go somewhere")
    nested.add_argument("--fast", action="store_true", help="90%% faster")
    nested.add_argument("--by", choices=("car", "foot"), required=True, help="means")
    nested.add_argument("places", metavar="PLACE", nargs="+", help="where to")
    page = commands.render_page(parser)
    assert "| [`tool go`](#tool-go) | go somewhere |" in page
    rows = ["| `PLACE …` | where to |", "| `--fast` | 90% faster |", r"| `--by car\|foot` | required; means |"]
    assert page.endswith("\n".join(["| argument | meaning |", "|---|---|", *rows]) + "\n")


def test_a_call_is_rendered_with_parameters_body_and_answers() -> None:
    call = {
        "tags": ["runs"],
        "summary": "Submit a run",
        "operationId": "runs_submit",
        "parameters": [
            {"name": "run_id", "in": "path", "schema": {"type": "string"}},
            {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1}, "description": "a | b <c>"},
        ],
        "requestBody": {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Request"}}}},
        "responses": {"201": {"description": "Queued."}, "401": {"description": "Sign in"}},
    }
    members = {"seeds": {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}}
    description = {
        "tags": [{"name": "runs", "description": "All runs."}],
        "paths": {"/runs": {"post": call}},
        "components": {"schemas": {"Request": {"properties": members, "required": ["seeds"]}}},
    }
    page = rest.render_page(description)
    assert "### POST /runs { #runs_submit }" in page
    assert r"| `limit` | integer, ≥ 1 | a \| b &lt;c> |" in page
    assert "run_id" not in page
    assert "Body: [Request](#request)" in page
    assert "| 201 | – | Queued. |" in page
    assert "Sign in" not in page
    assert "| `seeds`* | array of integer or null |  |" in page
