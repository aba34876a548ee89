"""The real sets: the grader against other graders' suites and every gold, and the named benchmarks' counts, rules and
problems in common with MATH's training set.

Needs the shared data folder; figures and the reasons of all exceptions are in docs/grader.md and docs/evaluation.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gxpo_trainer.config import DataConfig, EvaluationConfig
from gxpo_trainer.data.benchmarks import BENCHMARKS, find_duplicates, load_benchmark
from gxpo_trainer.data.prompts import load_prompts
from gxpo_trainer.grading.pool import VerifierPool
from gxpo_trainer.grading.verify import parse_gold
from gxpo_trainer.types import Prompt, Verdict

ROOT = Path(__file__).resolve().parents[2]
DATA = (ROOT / "../shared/data").resolve()
SETS = ("math500", "amc23", "aime24", "minerva_math", "olympiadbench", "gsm8k_test")
NUM_PROBLEMS = {"math500": 500, "amc23": 40, "gsm8k": 1319, "minerva": 272, "olympiadbench": 675, "aime24": 30}
DEADLINE_S = 30.0

sys.path.insert(0, str(ROOT))
from benchmarks.equal_forms import equal_forms, wrong_forms  # noqa: E402

NO_OTHER_FORM = {"minerva-139"} | {
    f"train/{name}.json"
    for name in ("algebra/1055", "algebra/1087", "number_theory/535", "number_theory/1012", "prealgebra/281",
                 "prealgebra/1691", "precalculus/1049")
}  # fmt: skip
"""Golds that the generator of equal forms cannot rewrite."""

NO_GOOD_GOLD = {"olympiadbench-2045"}
"""Golds that are no answer as written (a stray letter before an interval)."""


def path_of(name: str) -> Path:
    path = DATA / f"{name}.jsonl"
    if not path.is_file():
        pytest.skip(f"{name}.jsonl is not in the shared data folder ({DATA})")
    return path


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path_of(name).read_bytes().splitlines()]


def golds(name: str) -> list[tuple[str, str]]:
    return [(row["id"], row.get("answer_latex") or row["answer"]) for row in rows(name)]


def verify_all(pairs: list[tuple[str, str]]) -> list[Verdict]:
    with VerifierPool(workers=2, deadline_s=DEADLINE_S) as pool:
        return pool.submit(pairs).result()


def boxed(answer: str) -> str:
    return f"The answer is $\\boxed{{{answer}}}$."


def test_at_least_99_percent_agreement_with_other_graders_suites() -> None:
    cases = rows("grader_cases")
    verdicts = verify_all([(case["gold"], case["prediction"]) for case in cases])
    accepted = [verdict.status == "correct" for verdict in verdicts]
    false_accepts = [case["id"] for case, ok in zip(cases, accepted, strict=True) if ok and not case["expected"]]
    false_rejects = [case["id"] for case, ok in zip(cases, accepted, strict=True) if case["expected"] and not ok]
    print(f"{len(cases)} cases, false accepts {false_accepts}, false rejects {false_rejects}")
    assert len(false_accepts) + len(false_rejects) <= 0.01 * len(cases), (false_accepts, false_rejects)


@pytest.mark.parametrize("name", [*SETS, pytest.param("math_train", marks=pytest.mark.long("7,498 golds"))])
def test_every_gold_is_usable_and_correct_in_a_different_spelling_and_in_no_wrong_form(name: str) -> None:
    asked: list[tuple[str, str, str]] = []
    without_form = set()
    for identifier, gold in golds(name):
        if identifier in NO_GOOD_GOLD:
            continue
        assert parse_gold(gold)
        forms = equal_forms(gold)
        if not forms:
            without_form.add(identifier)
        asked.extend((identifier, gold, form) for form in forms)
    verdicts = verify_all([(gold, boxed(form)) for _, gold, form in asked])
    rejected = [(*case, v.status) for case, v in zip(asked, verdicts, strict=True) if v.status != "correct"]
    print(f"{name}: {len(asked)} forms, rejected {rejected}, without a form {sorted(without_form)}")
    assert rejected == []
    assert without_form <= NO_OTHER_FORM
    wrong = [(gold, boxed(form)) for _, gold in golds(name) for form in wrong_forms(gold)]
    verdicts = verify_all(wrong)
    assert [pair for pair, verdict in zip(wrong, verdicts, strict=True) if verdict.status == "correct"] == []
    assert {verdict.status for verdict in verdicts} <= {"wrong", "unparsed"}


@pytest.fixture(scope="module")
def problems() -> dict[str, tuple[Prompt, ...]]:
    settings = EvaluationConfig(data_root=str(path_of("math500").parent), num_problems=None)
    return {name: load_benchmark(name, DataConfig(), settings).prompts for name in BENCHMARKS}


def test_every_gold_is_usable_and_olympiad_rules_are_those_of_its_rows(problems: dict[str, tuple[Prompt, ...]]) -> None:
    assert {name: len(prompts) for name, prompts in problems.items()} == NUM_PROBLEMS
    options = [prompt.extra["verify"] for prompt in problems["olympiadbench"] if "verify" in prompt.extra]
    assert sum(option.several for option in options) == 94
    assert sum(option.unit is not None for option in options) == 8
    assert [option.tolerance for option in options if option.tolerance] == [0.1]


def test_three_training_problems_of_math_are_in_olympiadbench_and_none_elsewhere(
    problems: dict[str, tuple[Prompt, ...]],
) -> None:
    train = load_prompts(DataConfig(source=str(path_of("math_train")), levels=(3, 4, 5)), 0).prompts
    duplicates = {(train_id, problem_id) for train_id, _, problem_id in find_duplicates(train, problems)}
    assert duplicates == {
        ("train/intermediate_algebra/815.json", "olympiadbench-2895"),
        ("train/intermediate_algebra/1087.json", "olympiadbench-2890"),
        ("train/precalculus/1184.json", "olympiadbench-2644"),
    }
    # Equal golds: they are the same problems indeed.
    golds = {prompt.id: prompt.gold for prompt in (*train, *problems["olympiadbench"])}
    assert all(golds[train_id] == golds[problem_id] for train_id, problem_id in duplicates)
