"""The embedded tool task: the policy writes `<calc>12*7</calc>` and reads `84`."""

from __future__ import annotations

import ast
import itertools
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from gxpo_trainer.environments.contract import Observation, Problem, Turn

MAX_LENGTH = 100
"""Most characters of a calculation. Without powers they bound every number in it to as many digits."""
MAX_DEPTH = 10
"""Most parentheses and signs inside one another."""
ERROR = "error"
_OPEN, _CLOSE = "<calc>", "</calc>"
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class Calculator:
    """Answers the last calculation of a turn; a turn without one ends the episode. Rewards are left to the verifier."""

    def reset(self, problem: Problem, seed: int) -> Observation:
        return Observation.of_text(problem.text)

    def step(self, action: str) -> Turn:
        expression = last_calculation(action)
        return Turn(done=True) if expression is None else Turn(observation=calculate(expression))


def last_calculation(text: str) -> str | None:
    """The text between the last pair of tags; None without one."""
    begin = text.rfind(_OPEN, 0, max(0, text.rfind(_CLOSE)))
    if begin < 0:
        return None
    begin += len(_OPEN)
    return text[begin : text.find(_CLOSE, begin)]


def calculate(expression: str) -> str:
    """The exact value of integers with + - * / and parentheses, such as `84` or `7/2`; `error` where there is none."""
    if len(expression) > MAX_LENGTH or re.search(r"[^-+*/()0-9\s]", expression):
        return ERROR
    if max(itertools.accumulate((c == "(") - (c == ")") for c in expression), default=0) > MAX_DEPTH:
        return ERROR
    # Python's numbers have no leading zeros.
    python = re.sub(r"\b0+(?=[0-9])", "", " ".join(expression.split()))
    try:
        return str(_value(ast.parse(python, mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError):
        return ERROR


def _value(node: ast.expr, signs: int = 0) -> Fraction:
    """Raises ValueError for what is no calculation, ZeroDivisionError for a division by 0."""
    match node:
        case ast.Constant(int() as number):
            return Fraction(number)
        case ast.UnaryOp(ast.USub(), operand) if signs < MAX_DEPTH:
            return -_value(operand, signs + 1)
        case ast.BinOp(left, operation, right) if type(operation) in _OPERATIONS:
            result: Fraction = _OPERATIONS[type(operation)](_value(left, signs), _value(right, signs))
            return result
    raise ValueError(f"{type(node).__name__} is no calculation")
