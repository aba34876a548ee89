"""The paper's tables as data: complete, consistent with themselves, and equal to their source."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gxpo_trainer.compare.published import gxpo_paper, published_model
from gxpo_trainer.reporting.tables import published_table

SOURCE = Path(__file__).resolve().parents[4] / "shared" / "data" / "paper_tables.json"
NAMES = {"MATH-500": "math500", "AMC23": "amc23", "GSM8K": "gsm8k", "Minerva": "minerva",
         "OlympiadBench": "olympiadbench"}  # fmt: skip


def test_single_cells_are_those_of_the_paper() -> None:
    rows = {(row.model, row.label): row.scores for row in gxpo_paper().sampled_scores()}
    assert rows["Qwen2.5-1.5B", "GXPO K=10"]["math500"] == 32.31
    assert rows["Llama-3.2-3B", "GRPO"]["gsm8k"] == 67.04
    assert gxpo_paper().table("convergence").rows[3]["time_speedup"] == 2.1
    with pytest.raises(KeyError, match="no published table 'speed'; choose one of sampled_pass@1"):
        gxpo_paper().table("speed")


@pytest.mark.skipif(not SOURCE.exists(), reason="paper_tables.json is absent: the paper's tables as transcribed")
def test_all_tables_equal_their_source() -> None:
    source = json.loads(SOURCE.read_text())

    def renamed(value: object) -> object:
        if isinstance(value, dict):
            return {NAMES.get(key, key): renamed(inner) for key, inner in value.items()}
        return [renamed(inner) for inner in value] if isinstance(value, list) else value

    tables = gxpo_paper().tables
    assert [table.number for table in tables] == list(range(1, 9))
    for table, (key, rows) in zip(tables, source["tables"].items(), strict=True):
        assert key.startswith(str(table.number))
        assert list(table.rows) == renamed(rows)
        assert table.model is None or table.model.lower() in key
    assert (gxpo_paper().source, list(gxpo_paper().notes)) == (source["source"], source["notes"])


@pytest.mark.parametrize(
    ("path", "model"),
    [
        ("Qwen/Qwen2.5-1.5B-Instruct", "Qwen2.5-1.5B"),
        ("runs/qwen2.5-7b-gxpo", "Qwen2.5-7B"),
        ("meta-llama/Llama-3.2-3B", "Llama-3.2-3B"),
        ("Qwen/Qwen2.5-0.5B", None),
        ("Qwen/Qwen2.5-13B", None),
        ("starter", None),
    ],
)
def test_a_base_model_is_known_by_its_name(path: str, model: str | None) -> None:
    assert published_model(path) == model


def test_published_lines_stand_under_ours_for_the_benchmarks_evaluated() -> None:
    records = [{"benchmark": name, "scores": {"pass@1": 0.25}} for name in ("gsm8k", "aime24", "math500")]
    table = published_table(records, "Qwen/Qwen2.5-1.5B-Instruct")
    columns = {str(column.header): list(map(str, column.cells)) for column in table.columns}
    assert list(columns) == ["model", "rule", "gsm8k", "math500"]
    assert columns["rule"][:2] == ["this evaluation", "GRPO"]
    assert columns["gsm8k"][:2] == ["25.0%", "43.5%"]
    assert len(columns["rule"]) == 8
    assert published_table(records[1:2], "starter") is None
