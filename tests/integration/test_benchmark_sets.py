"""The named benchmarks on their real rows: counts, golds, rules, and what of MATH's training set is in them.

Needs the shared data folder; the figures are in docs/evaluation.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gxpo_trainer.config import DataConfig, EvaluationConfig
from gxpo_trainer.data.benchmarks import BENCHMARKS, Benchmark, find_duplicates, load_benchmark
from gxpo_trainer.data.prompts import load_prompts
from gxpo_trainer.training.prepare import gold_problem

DATA = (Path(__file__).resolve().parents[2] / "../shared/data").resolve()
pytestmark = pytest.mark.skipif(
    not (DATA / "math500.jsonl").is_file(), reason=f"the benchmarks' files are not in the shared data folder ({DATA})"
)
NUM_PROBLEMS = {"math500": 500, "amc23": 40, "gsm8k": 1319, "minerva": 272, "olympiadbench": 675, "aime24": 30}


def load(name: str) -> Benchmark:
    return load_benchmark(name, DataConfig(), EvaluationConfig(data_root=str(DATA), num_problems=None), gold_problem)


@pytest.mark.parametrize("name", list(BENCHMARKS))
def test_every_problem_has_a_gold_that_the_grader_can_use(name: str) -> None:
    assert len(load(name).prompts) == NUM_PROBLEMS[name]


def test_olympiad_rules_are_those_of_its_rows() -> None:
    options = [prompt.extra["verify"] for prompt in load("olympiadbench").prompts if "verify" in prompt.extra]
    assert sum(option.several for option in options) == 94
    assert sum(option.unit is not None for option in options) == 8
    assert [option.tolerance for option in options if option.tolerance] == [0.1]


def test_three_training_problems_of_math_are_in_olympiadbench_and_none_elsewhere() -> None:
    train = load_prompts(DataConfig(source=str(DATA / "math_train.jsonl"), levels=(3, 4, 5)), 0).prompts
    duplicates = find_duplicates(train, {name: load(name).prompts for name in BENCHMARKS})
    assert {(item.train_id, item.problem_id) for item in duplicates} == {
        ("train/intermediate_algebra/815.json", "olympiadbench-2895"),
        ("train/intermediate_algebra/1087.json", "olympiadbench-2890"),
        ("train/precalculus/1184.json", "olympiadbench-2644"),
    }
    # Equal golds: they are the same problems indeed.
    golds = {prompt.id: prompt.gold for prompt in (*train, *load("olympiadbench").prompts)}
    assert all(golds[item.train_id] == golds[item.problem_id] for item in duplicates)
