"""math-verify as the engine for what our own exact layers leave undecided.

Its time-outs are switched off: they use SIGALRM, which works in a main thread only. Whoever calls this module
runs it in a process that can be killed (`pool.py`). The import costs a second, so it happens at the first use.
"""

from __future__ import annotations

import functools
import logging
import re
from typing import Any

from gxpo_trainer.verify.tokens import TooLarge

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


def nesting(text: str) -> int:
    """How deep brackets are nested; large when they do not close."""
    depth = deepest = 0
    for bracket in re.findall(r"[()\[\]{}]", text):
        depth += 1 if bracket in "([{" else -1
        deepest = max(deepest, depth)
    return deepest


def _fit_for_parsing(answer: str) -> bool:
    """Whether the answer is short, not deeply nested and balanced; the engine's parser takes minutes over others.

    Raises TooLarge for a sum or product with so many terms that sympy would not end.
    """
    if len(answer) > MAX_CHARS or answer.count("^") > MAX_POWERS or nesting(answer) > MAX_NESTING:
        return False
    if re.search(r"\^\s*\{?\s*(?:[0-9]{5,}|10\s*\^)", answer):
        raise TooLarge
    if "\\sum" in answer or "\\prod" in answer:
        bounds = re.findall(r"\^\s*\{?\s*(?:[0-9]\s*\\(?:cdot|times)\s*)?(10\s*\^\s*\{?\s*[0-9]+|[0-9]+)", answer)
        if any(("^" in bound and int(bound.rpartition("^")[2].strip(" {")) > 3) or len(bound) > 4 for bound in bounds):
            raise TooLarge
    return sum(1 if bracket in "([{" else -1 for bracket in re.findall(r"[()\[\]{}]", answer)) == 0


def parse_latex(answer: str) -> list[Any]:
    """sympy objects of one LaTeX answer; empty when it cannot be parsed. No raw-string fallback."""
    if not _fit_for_parsing(answer):
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
