"""The embedded tool task: the policy writes `<calc>12*7</calc>` and reads `84`."""

from __future__ import annotations

import re
from fractions import Fraction

from gxpo_trainer.environments.contract import Observation, Problem, Turn

MAX_LENGTH = 100
"""Most characters of a calculation. Without powers they bound every number in it to as many digits."""
MAX_DEPTH = 10
"""Most parentheses and signs inside one another."""
ERROR = "error"
_OPEN, _CLOSE = "<calc>", "</calc>"


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
    if len(expression) > MAX_LENGTH:
        return ERROR
    try:
        return str(_Parser(expression).value())
    except (ValueError, ZeroDivisionError):
        return ERROR


class _Parser:
    """Recursive descent: sum = term ([+-] term)*, term = factor ([*/] factor)*, factor = -factor | (sum) | digits.

    Raises ValueError for any other character.
    """

    def __init__(self, expression: str) -> None:
        if re.search(r"[^-+*/()0-9\s]", expression):
            raise ValueError("unexpected character")
        self._tokens = re.findall(r"[0-9]+|[-+*/()]", expression)
        self._next = 0

    def value(self) -> Fraction:
        """Raises ValueError for what is no calculation, ZeroDivisionError for a division by 0."""
        value = self._sum(0)
        if self._peek():
            raise ValueError(f"unexpected {self._peek()!r}")
        return value

    def _peek(self) -> str:
        return self._tokens[self._next] if self._next < len(self._tokens) else ""

    def _take(self) -> str:
        token = self._peek()
        self._next += 1
        return token

    def _sum(self, depth: int) -> Fraction:
        value = self._term(depth)
        while self._peek() in ("+", "-"):
            sign = 1 if self._take() == "+" else -1
            value += sign * self._term(depth)
        return value

    def _term(self, depth: int) -> Fraction:
        value = self._factor(depth)
        while self._peek() in ("*", "/"):
            if self._take() == "*":
                value *= self._factor(depth)
            else:
                value /= self._factor(depth)
        return value

    def _factor(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise ValueError("too deep")
        token = self._take()
        if token == "-":
            return -self._factor(depth + 1)
        if token == "(":
            value = self._sum(depth + 1)
            if self._take() != ")":
                raise ValueError("a parenthesis is not closed")
            return value
        if not token.isdigit():
            raise ValueError(f"unexpected {token!r}")
        return Fraction(int(token))
