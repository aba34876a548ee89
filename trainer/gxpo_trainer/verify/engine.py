"""math-verify as the engine for what our own exact layers leave undecided.

Its time-outs are switched off: they use SIGALRM, which works in a main thread only. Whoever calls this module
runs it in a process that can be killed (`pool.py`). The import costs a second, so it happens at the first use.
"""

from __future__ import annotations

import functools
import logging
import re
from typing import Any

FLOAT_DECIMALS = 6
NUMERIC_DIGITS = 15
MAX_CHARS = 1_000
MAX_NESTING = 40
MAX_POWERS = 100


@functools.cache
def _math_verify() -> tuple[Any, Any, tuple[Any, ...]]:
    """(parse, verify, extraction settings) of math-verify, with its remark about missing time-outs silenced."""
    import math_verify
    import math_verify.grader
    import math_verify.parser

    for module in (math_verify.parser, math_verify.grader):
        module.TIMEOUT_WARNING_SHOWN = True
        logging.getLogger(module.__name__).setLevel(logging.ERROR)
    return math_verify.parse, math_verify.verify, (math_verify.LatexExtractionConfig(),)


def warm_up() -> None:
    """Import the engine and build its parser's tables (about 1.5 s), so that no answer pays for it."""
    engine_equal("x+1", "1+x")


def fit_for_parsing(answer: str) -> bool:
    """Whether the answer is short, not deeply nested and balanced; the engine's parser takes minutes over others."""
    if len(answer) > MAX_CHARS or answer.count("^") > MAX_POWERS:
        return False
    depth = 0
    for bracket in re.findall(r"[()\[\]{}]", answer):
        depth += 1 if bracket in "([{" else -1
        if not 0 <= depth <= MAX_NESTING:
            return False
    return depth == 0


def parse_latex(answer: str) -> list[Any]:
    """sympy objects of one LaTeX answer; empty when it cannot be parsed. No raw-string fallback."""
    if not fit_for_parsing(answer):
        return []
    parse, _, settings = _math_verify()
    parsed: list[Any] = parse(
        f"\\boxed{{{answer}}}",
        extraction_config=settings,
        fallback_mode="no_fallback",
        parsing_timeout=None,
    )
    return [expression for expression in parsed if not isinstance(expression, str)]


@functools.lru_cache(maxsize=256)
def _parse_gold(answer: str) -> list[Any]:
    """Golds come back for every sample of a group: the last ones are kept."""
    return parse_latex(answer)


def engine_parses(answer: str) -> bool:
    """Whether the engine can make a mathematical object of the answer."""
    return bool(parse_latex(answer))


def engine_equal(gold: str, answer: str) -> bool | None:
    """math-verify's judgement; None when it cannot parse the answer (or the gold)."""
    golds = _parse_gold(gold)
    answers = parse_latex(answer) if golds else []
    if not golds or not answers:
        return None
    _, verify, _ = _math_verify()
    return bool(
        verify(
            golds,
            answers,
            float_rounding=FLOAT_DECIMALS,
            numeric_precision=NUMERIC_DIGITS,
            strict=True,
            allow_set_relation_comp=True,
            timeout_seconds=None,
        )
    )
