"""Rules of one problem: units, tolerances, several answers. Each case also shows what the default path would say."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from gxpo_trainer.errors import DataError
from gxpo_trainer.grading.files import grade_file
from gxpo_trainer.grading.options import VerifyOptions
from gxpo_trainer.grading.pool import VerifierPool
from gxpo_trainer.grading.verify import verify

MINUTES = VerifyOptions(unit="minute")
AREA = VerifyOptions(unit="$cm^2$")
SPEED = VerifyOptions(unit="km/h")
SEVERAL = VerifyOptions(several=True)
TENTH = VerifyOptions(tolerance=(0.1,), unit="%")


@pytest.mark.parametrize(
    ("gold", "answer", "options", "by_default", "with_options"),
    [
        # 3/4 h = 45 min; 2700 s = 45 min; 45 h is not.
        ("45", r"\frac{3}{4}\text{ hours}", MINUTES, "wrong", "correct"),
        ("45", "2700 s", MINUTES, "wrong", "correct"),
        ("45", r"45\text{ hours}", MINUTES, "correct", "wrong"),
        ("45", r"45 \mathrm{~min}", MINUTES, "correct", "correct"),
        ("45", "45", MINUTES, "correct", "correct"),
        # Another quantity is another answer; a unit that is not in the table is dropped.
        ("45", "45 km", MINUTES, "correct", "wrong"),
        ("45", "45 fortnights", MINUTES, "correct", "correct"),
        # 166 cm² = 0.0166 m².
        ("166", r"0.0166\text{ m}^2", AREA, "wrong", "correct"),
        ("166", r"166\text{ m}^2", AREA, "correct", "wrong"),
        ("166", r"166 \mathrm{~cm}^{2}", AREA, "correct", "correct"),
        # 600/7 km/h = 600/7 · 1000/3600 m/s = 500/21 m/s.
        (r"\frac{600}{7}", r"\frac{500}{21}\text{ m/s}", SPEED, "wrong", "correct"),
        # An absolute tolerance holds at its bound and not beyond.
        ("4.2", r"4.3\%", TENTH, "wrong", "correct"),
        ("4.2", "4.31", TENTH, "wrong", "wrong"),
        ("4.2", r"\sqrt{17.5}", TENTH, "wrong", "correct"),  # 4.183
        ("4.2", r"\sqrt{19}", TENTH, "wrong", "wrong"),  # 4.359
        ("4.2", "x", TENTH, "wrong", "wrong"),
        # Each answer has its own tolerance, in the gold's order, wherever it stands in the response.
        ("1.68, 0.45", "0.46, 1.7", VerifyOptions((0.02, 0.01), None, True), "wrong", "correct"),
        ("1.68, 0.45", "0.47, 1.7", VerifyOptions((0.02, 0.01), None, True), "wrong", "wrong"),
        ("1.68, 0.45", "1.7", VerifyOptions((0.02,), None, True), "wrong", "wrong"),
        # A comma between several answers is never a decimal or thousands separator.
        ("69,84", "69.84", SEVERAL, "correct", "wrong"),
        ("100,200", "100200", SEVERAL, "correct", "wrong"),
        ("69,84", "84, 69", SEVERAL, "correct", "correct"),
        ("69,84", r"84 \text{ and } 69", SEVERAL, "correct", "correct"),
        ("69,84", "69", SEVERAL, "wrong", "wrong"),
        ("-1,2,-2", r"-1, \pm 2", SEVERAL, "correct", "correct"),
        ("(1,2),(3,4)", "(3,4), (1,2)", SEVERAL, "correct", "correct"),
        ("(1,2),(3,4)", "(2,1), (3,4)", SEVERAL, "wrong", "wrong"),
    ],
)
def test_a_rule_changes_the_verdict_as_it_says(
    gold: str, answer: str, options: VerifyOptions, by_default: str, with_options: str
) -> None:
    response = f"So it is $\\boxed{{{answer}}}$."
    assert verify(gold, response).status == by_default
    found = verify(gold, response, options)
    assert found.status == with_options
    assert found.extracted == answer


def test_the_unit_of_a_problem_is_that_of_a_gold_without_one() -> None:
    def status(gold: str, answer: str, **rules: Any) -> str:
        return verify(gold, rf"\boxed{{{answer}}}", VerifyOptions(**rules)).status

    assert status("5", r"5000 \text{ m}", unit="km") == "correct"
    assert status("5", r"5 \text{ m}", unit="km") == "wrong"
    assert status(r"5 \text{ m}", r"5 \text{ m}", unit="km") == "correct"
    assert status("5", r"5 \text{ m}", unit="dogs") == "correct"
    assert status("5, 6", r"5, 6 \text{ m}", unit="km", several=True) == "correct"


def test_several_answers_may_stand_in_boxes_of_their_own() -> None:
    response = r"If $a = 1$ then $\boxed{69}$. In the other case $a$ is even, so that \boxed{84}."
    assert verify("69,84", response).status == "wrong"
    assert verify("69,84", response, SEVERAL).status == "correct"
    assert verify("69,84,1", response, SEVERAL).status == "wrong"
    # A box too many is not the answer, though the last two boxes alone would be.
    assert verify("69,84", r"First \boxed{3}. Then $\boxed{69}$. And then \boxed{84}.", SEVERAL).status == "wrong"


def test_options_survive_json() -> None:
    options = VerifyOptions((0.1, 0.5), "km/h", True)
    assert VerifyOptions.from_dict(json.loads(json.dumps(options.to_dict()))) == options
    assert VerifyOptions().to_dict() == {}
    assert VerifyOptions.from_dict({"tolerance": 0.1}) == VerifyOptions((0.1,))


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ([], "is list instead of an object"),
        ({"tolerence": 1}, "unknown key 'tolerence'; use tolerance, unit, several"),
        ({"tolerance": "0.1"}, "must be a number or a list"),
        ({"tolerance": -1}, "finite numbers of at least 0"),
        ({"tolerance": float("inf")}, "finite numbers"),
        ({"unit": 3}, "unit = 3: must be text"),
        ({"unit": " "}, "unit is empty"),
        ({"several": 1}, "must be true or false"),
    ],
)
def test_options_that_mean_nothing_are_refused(body: object, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        VerifyOptions.from_dict(body)


def test_options_reach_the_worker_and_only_their_own_answer() -> None:
    with VerifierPool(workers=1, deadline_s=60.0) as pool:
        verdicts = pool.verify_many(
            [
                ("4.2", r"\boxed{4.25}"),
                ("4.2", r"\boxed{4.25}", {"options": {"tolerance": [0.1]}}),
                ("4.2", r"\boxed{4.25}"),
            ]
        )
    assert [verdict.status for verdict in verdicts] == ["wrong", "correct", "wrong"]


def test_grade_takes_rules_a_line_and_refuses_bad_ones_by_line(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    row = {"gold": "45", "prediction": r"\boxed{0.75\text{ h}}", "options": {"anything": "of another suite"}}
    source.write_text(json.dumps(row) + "\n" + json.dumps({**row, "verify": {"unit": "min"}}) + "\n")
    out = io.StringIO()
    grade_file(source, out, workers=1, deadline_s=60.0)
    assert [json.loads(line)["verdict"] for line in out.getvalue().splitlines()] == ["wrong", "correct"]
    source.write_text(json.dumps(row) + "\n" + json.dumps({**row, "verify": {"units": "min"}}) + "\n")
    with pytest.raises(DataError, match=r"in\.jsonl, line 2: 'verify': has the unknown key 'units'"):
        grade_file(source, io.StringIO(), workers=1)
