"""The grader against other graders' test suites, and against every gold of every set.

Needs the shared data folder; figures and the reasons of all exceptions are in docs/grader.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gxpo_trainer.grading.pool import VerifierPool
from gxpo_trainer.grading.verify import parse_gold
from gxpo_trainer.types import Verdict

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "../shared/data"
SETS = ("math500", "amc23", "aime24", "minerva_math", "olympiadbench", "gsm8k_test", "math_train")
DEADLINE_S = 30.0

sys.path.insert(0, str(ROOT))
from benchmarks.equal_forms import equal_forms, wrong_forms  # noqa: E402

NO_OTHER_FORM = {
    "minerva-139",
    "train/algebra/1055.json",
    "train/algebra/1087.json",
    "train/number_theory/535.json",
    "train/number_theory/1012.json",
    "train/prealgebra/281.json",
    "train/prealgebra/1691.json",
    "train/precalculus/1049.json",
}
"""Golds that the generator of equal forms cannot rewrite."""

NO_GOOD_GOLD = {"olympiadbench-2045"}
"""Golds that are no answer as written (a stray letter before an interval)."""


def rows(name: str) -> list[dict[str, Any]]:
    path = DATA / f"{name}.jsonl"
    if not path.is_file():
        pytest.skip(f"{name}.jsonl is not in the shared data folder ({DATA})")
    return [json.loads(line) for line in path.read_bytes().splitlines()]


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


@pytest.mark.parametrize("name", SETS)
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
