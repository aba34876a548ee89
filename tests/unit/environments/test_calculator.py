"""The embedded tool: what it computes, and what cannot make it compute for long."""

from gxpo_trainer.environments import Problem, Turn
from gxpo_trainer.environments.calculator import ERROR, MAX_DEPTH, MAX_LENGTH, Calculator, calculate, last_calculation


def test_values_are_exact_and_what_is_no_calculation_is_an_error() -> None:
    values = {
        "12*7": "84", "2+3*4": "14", "(2+3)*4": "20", "10-3-2": "5", "24/4/2": "3", "7/2": "7/2", "1/3+1/6": "1/2",
        "10/4*2": "5", "-3+5": "2", "2*-3": "-6", "-(2+3)": "-5", " 12 *\t7 ": "84", "007": "7", "0-0": "0",
        "9" * 50 + "+1": "1" + "0" * 50,
    }  # fmt: skip
    errors = (
        "9**9**9", "2^10", "10**100", "1/0", "1/(2-2)", "__import__('os')", "abs(3)", "x", "1e9", "1.5", "1,000",
        "0x10", "1_000",
        "٣",  # a digit in another script
        "2 3", "2+", "+2", "*2", "(2", "2)", "()", "", "  ", "1;2", "1\x002",
    )  # fmt: skip
    expected = values | dict.fromkeys(errors, ERROR)
    assert {expression: calculate(expression) for expression in expected} == expected


def test_size_and_depth_are_bounded() -> None:
    assert calculate("1" * MAX_LENGTH) == "1" * MAX_LENGTH
    assert calculate("1" * (MAX_LENGTH + 1)) == ERROR
    assert calculate("9" * 1_000_000) == ERROR
    assert calculate("(" * MAX_DEPTH + "1" + ")" * MAX_DEPTH) == "1"
    assert calculate("(" * (MAX_DEPTH + 1) + "1" + ")" * (MAX_DEPTH + 1)) == ERROR
    assert calculate("-" * 99 + "1") == ERROR
    assert calculate("(" * 100_000) == ERROR


def test_only_the_last_complete_calculation_counts() -> None:
    calculations = {
        "so <calc>1+1</calc>": "1+1", "<calc>1</calc> then <calc>2</calc> and": "2",
        "<calc>1</calc> then <calc>2": "1", "<calc>1 <calc>2</calc>": "2", "no tool": None, "<calc>1+1": None,
        "1+1</calc>": None, "</calc><calc>": None, "<calc></calc>": "",
    }  # fmt: skip
    assert {text: last_calculation(text) for text in calculations} == calculations


def test_an_episode() -> None:
    calculator = Calculator()
    first = calculator.reset(Problem("p", "How much is 12 times 7?", "84", {}), seed=3)
    assert first.messages == ({"role": "user", "content": "How much is 12 times 7?"},)
    assert calculator.step("I ask: <calc>12*7</calc>") == Turn("84")
    assert calculator.step("<calc>84/0</calc>") == Turn("error")
    assert calculator.step("The answer is 84.") == Turn("", None, True)
