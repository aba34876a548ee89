"""The named benchmarks on their real rows: counts, golds, rules, and what of MATH's training set is in them.

Needs the shared data folder; the figures are in docs/evaluation.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gxpo_trainer.config import DataConfig, EvaluationConfig
from gxpo_trainer.data.benchmarks import BENCHMARKS, find_duplicates, load_benchmark
from gxpo_trainer.data.prompts import load_prompts
from gxpo_trainer.types import Prompt

DATA = (Path(__file__).resolve().parents[2] / "../shared/data").resolve()
pytestmark = pytest.mark.skipif(
    not (DATA / "math500.jsonl").is_file(), reason=f"the benchmarks' files are not in the shared data folder ({DATA})"
)
NUM_PROBLEMS = {"math500": 500, "amc23": 40, "gsm8k": 1319, "minerva": 272, "olympiadbench": 675, "aime24": 30}


@pytest.fixture(scope="module")
def problems() -> dict[str, tuple[Prompt, ...]]:
    settings = EvaluationConfig(data_root=str(DATA), num_problems=None)
    return {name: load_benchmark(name, DataConfig(), settings, check_golds=True).prompts for name in BENCHMARKS}


def test_every_gold_is_usable_and_olympiad_rules_are_those_of_its_rows(problems: dict[str, tuple[Prompt, ...]]) -> None:
    assert {name: len(prompts) for name, prompts in problems.items()} == NUM_PROBLEMS
    options = [prompt.extra["verify"] for prompt in problems["olympiadbench"] if "verify" in prompt.extra]
    assert sum(option.several for option in options) == 94
    assert sum(option.unit is not None for option in options) == 8
    assert [option.tolerance for option in options if option.tolerance] == [0.1]


def test_three_training_problems_of_math_are_in_olympiadbench_and_none_elsewhere(
    problems: dict[str, tuple[Prompt, ...]],
) -> None:
    train = load_prompts(DataConfig(source=str(DATA / "math_train.jsonl"), levels=(3, 4, 5)), 0).prompts
    duplicates = {(train_id, problem_id) for train_id, _, problem_id in find_duplicates(train, problems)}
    assert duplicates == {
        ("train/intermediate_algebra/815.json", "olympiadbench-2895"),
        ("train/intermediate_algebra/1087.json", "olympiadbench-2890"),
        ("train/precalculus/1184.json", "olympiadbench-2644"),
    }
    # Equal golds: they are the same problems indeed.
    golds = {prompt.id: prompt.gold for prompt in (*train, *problems["olympiadbench"])}
    assert all(golds[train_id] == golds[problem_id] for train_id, problem_id in duplicates)
