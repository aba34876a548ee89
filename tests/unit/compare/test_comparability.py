"""When two evaluations may be compared, and what is shown."""

from __future__ import annotations

from typing import Any

import pytest

from gxpo_trainer.compare.seeds import incomparable
from gxpo_trainer.reporting.tables import difference_table

RECORD: dict[str, Any] = {
    "benchmark": "math500", "data_sha256": "ab12", "problem_ids": ["a", "b", "c"], "template": "{problem}",
    "sampling": {"temperature": 1.0, "max_new_tokens": 100, "seeded": False}, "versions": {"gxpo": "1"},
    "scores": {"pass@1": 0.5}, "per_problem": [0.5, 0.0, 1.0], "samples_per_prompt": 4,
}  # fmt: skip


def changed(**changes: Any) -> dict[str, Any]:
    return {**RECORD, **changes}


def test_the_same_conditions_are_comparable_whatever_the_scores_and_seeds() -> None:
    sampling = {**RECORD["sampling"], "seeded": True}
    assert incomparable(RECORD, changed(scores={}, per_problem=[], samples_per_prompt=16, sampling=sampling)) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"benchmark": "gsm8k"}, "the benchmarks differ (benchmark: math500 and gsm8k)"),
        ({"data_sha256": "cd34"}, "the problems, golds or rules differ (data_sha256: ab12 and cd34)"),
        ({"problem_ids": ["a"]}, "not the same problems in the same order (problem_ids: 3 entries and 1 entries)"),
        ({"template": "Q: {problem}"}, "the prompt templates differ (template: {problem} and Q: {problem})"),
        (
            {"sampling": {"temperature": 0.6, "max_new_tokens": 100}},
            "the temperatures differ (sampling.temperature: 1.0 and 0.6)",
        ),
        ({"versions": {"gxpo": "2"}}, "the graders differ (versions: {'gxpo': '1'} and {'gxpo': '2'})"),
        (
            {"environment": {"name": "calculator"}},
            "the environments differ (single_turn and {'name': 'calculator'})",
        ),
        ({"versions": None}, "versions is not recorded on both sides"),
        (
            {"template": "x" * 60},
            f"the prompt templates differ (template: {{problem}} and {'x' * 60})",
        ),
        (
            {"template": "x" * 57 + "yyyy"},
            f"the prompt templates differ (template: {{problem}} and {'x' * 57}…)",
        ),
    ],
)
def test_each_condition_is_a_reason_by_itself(changes: dict[str, Any], reason: str) -> None:
    assert incomparable(RECORD, changed(**changes)) == [reason]


def test_differences_are_paired_and_the_rest_says_why_not() -> None:
    now = [changed(per_problem=[0.75, 0.25, 1.25], scores={"pass@1": 0.75}), changed(benchmark="gsm8k")]
    table = difference_table(now, [changed(data_sha256="old"), RECORD])
    columns = {column.header: list(column.cells) for column in table.columns}
    # Every problem gained 0.25, so the paired interval has no width.
    assert columns["difference"] == ["+25.0% [+25.0%, +25.0%]", "not in the earlier file"]
    assert columns["earlier"] == ["50.0%", "–"]
    other = difference_table(now[:1], [changed(template="x")])
    assert next(iter(other.columns[3].cells)).startswith("not comparable: the prompt templates differ")
