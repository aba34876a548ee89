"""math-verify as the engine for what our own exact layers leave undecided.

Its time-outs are switched off: they use SIGALRM, which works in a main thread only. Call this
module in a process that can be killed (`pool.py`). The import takes a second, so it happens at the first use.
"""

from __future__ import annotations

import functools
import logging
import re
from typing import Any

from gxpo_trainer.grading.latex import TooLarge

MAX_CHARS = 1_000
MAX_NESTING = 40
MAX_POWERS = 100
_HUGE = re.compile(r"\^\s*\{?\s*(?:[0-9]\s*\\(?:cdot|times)\s*)?(?:[0-9]{5,}|10\s*\^)")
"""A power, or the upper bound of a sum or product, with which sympy would not end."""


def nesting(text: str) -> int:
    """How deep brackets are nested."""
    depth = deepest = 0
    for bracket in re.findall(r"[()\[\]{}]", text):
        depth += 1 if bracket in "([{" else -1
        deepest = max(deepest, depth)
    return deepest


@functools.lru_cache(maxsize=256)
def parse_latex(answer: str) -> list[Any]:
    """sympy objects of one LaTeX answer; empty when it cannot be parsed, or when the parser would take minutes.

    Raises TooLarge.
    """
    if len(answer) > MAX_CHARS or answer.count("^") > MAX_POWERS or nesting(answer) > MAX_NESTING:
        return []
    if _HUGE.search(answer):
        raise TooLarge
    if sum(map(answer.count, "([{")) != sum(map(answer.count, ")]}")):
        return []
    from math_verify import LatexExtractionConfig, parse

    # Both modules warn that there are no time-outs.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    settings = (LatexExtractionConfig(),)
    parsed = parse(f"\\boxed{{{answer}}}", settings, fallback_mode="no_fallback", parsing_timeout=None)
    return [expression for expression in parsed if not isinstance(expression, str)]


def engine_equal(gold: str, answer: str) -> bool | None:
    """math-verify's judgement; None when it cannot parse the answer (or the gold)."""
    golds = parse_latex(gold)
    answers = parse_latex(answer) if golds else []
    if not golds or not answers:
        return None
    from math_verify import verify

    return bool(verify(golds, answers, allow_set_relation_comp=True, timeout_seconds=None))
