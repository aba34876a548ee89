"""answer -> Verdict: extraction, cleaning, comparison by structure, and math-verify for what is left.

`verify` is a pure function without a clock: `Verdict.seconds` is 0 here and set by the pool, which also enforces the
deadline. Call nothing here on untrusted answers outside a killable process.
"""

from __future__ import annotations

import contextlib
import functools
import re
from dataclasses import replace
from fractions import Fraction

from gxpo_trainer.grading.compare import answers_equal
from gxpo_trainer.grading.engine import nesting, parse_latex
from gxpo_trainer.grading.extract import MAX_ANSWER_CHARS, every_box, extract_answer, extract_box
from gxpo_trainer.grading.latex import MAX_NESTING, TooLarge, clean, same_tokens
from gxpo_trainer.grading.scalar import EXACT, choice_letters, read
from gxpo_trainer.grading.structure import Answer, Scalar, Sequence, parse_answer, split_condition
from gxpo_trainer.grading.units import parse_unit, split_unit
from gxpo_trainer.types import EVASION, Verdict, VerifyOptions

_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")
"""Integers that are equal only as equal texts."""
_THOUSANDS = re.compile(r"(?<![\w.,])([1-9][0-9]{0,2}(?:,[0-9]{3})+)(?![\w,])")
_DECIMAL_COMMA = re.compile(r"([+-]?[0-9]+),([0-9]+)")
NO_BOX = "no \\boxed{} answer (verifier.answer)"
TOO_LARGE = f"{EVASION}: a magnitude beyond the bounds"


def gold_answer(gold: str) -> str:
    """The final answer of a gold: the gold itself, or what a worked solution boxes or calls its final answer."""
    worked = "boxed" in gold or "inal answer" in gold.lower()
    return (worked and extract_answer(gold)) or gold


_cleaned_gold = functools.lru_cache(maxsize=4096)(lambda gold: clean(gold_answer(gold)))
"""Cached, because a gold is used for every sample of its group."""


def parse_gold(gold: str) -> str:
    """The cleaned gold. Raises ValueError when no verdict about it would be possible.

    A gold is usable when it is a number, an expression, words, a list or set of such, or what math-verify parses.
    """
    text = _cleaned_gold(gold) if len(gold_answer(gold)) <= MAX_ANSWER_CHARS else ""
    if not text:
        raise ValueError(f"gold {gold[:80]!r} holds no answer; give the final answer alone, or a solution with \\boxed")
    if not _is_readable(text):
        raise ValueError(f"gold {gold[:80]!r} cannot be parsed; write it as LaTeX that math-verify reads")
    return text


def _is_readable(text: str) -> bool:
    """Whether the grammar here or math-verify reads a cleaned gold; a value too large for one may suit the other."""
    answer = parse_answer(text)
    if not isinstance(answer, Scalar) or re.fullmatch(r"(?=.*\w)[\w\s'.,:;%()-]+", answer.text):
        return True
    with contextlib.suppress(TooLarge):
        reading = read(answer.text)
        if reading.node is not None or reading.words:
            return True
    with contextlib.suppress(TooLarge):
        return bool(parse_latex(text))
    return False


def verify(gold: str, response: str, options: VerifyOptions | None = None) -> Verdict:
    """Whether the response's final answer is the gold. Pure; no time-out of its own (see `pool.VerifierPool`).

    gold: empty where the problem has none. options: rules of the problem in addition to it; None for the common case.
    """
    rules = options or VerifyOptions()
    answer = extract_box(response) if rules.boxed else extract_answer(response)
    if not gold:
        return Verdict("ungraded", answer or None, 0.0, "the problem has no answer to compare with")
    if response.strip() == gold and not rules.boxed:
        return Verdict("correct", response.strip(), 0.0)
    if not answer:
        return Verdict("unparsed", None, 0.0, NO_BOX if rules.boxed else "no final answer found")
    verdict = _judged(gold, answer, rules)
    if rules.several and verdict.status != "correct":
        # Several answers may stand in boxes of their own, with sentences between them.
        together = every_box(response)
        if together is not None and (verdict_on_all := _judged(gold, together, rules)).status == "correct":
            return verdict_on_all
    return verdict


def _judged(gold: str, answer: str, rules: VerifyOptions) -> Verdict:
    if len(answer) > MAX_ANSWER_CHARS:
        return Verdict("unparsed", answer[:MAX_ANSWER_CHARS], 0.0, f"final answer of {len(answer)} characters")
    if _INTEGER.fullmatch(answer) and _INTEGER.fullmatch(gold) and (answer == gold or not rules.tolerance):
        return Verdict("correct" if answer == gold else "wrong", answer, 0.0)
    if nesting(answer) > MAX_NESTING:
        return Verdict("unparsed", answer, 0.0, f"brackets nested more than {MAX_NESTING} deep")
    text = clean(answer)
    if not text:
        return Verdict("unparsed", answer, 0.0, "nothing is left of the final answer")
    gold_text = _cleaned_gold(gold)
    unit = rules.unit if rules.unit and parse_unit(rules.unit) is not None else ""
    try:
        # Of the decimal as it is written: 0.1 is one tenth.
        equal = texts_equal(gold_text, text, rules.several, Fraction(str(rules.tolerance)), unit)
    except TooLarge:
        return Verdict("wrong", answer, 0.0, TOO_LARGE)
    except RecursionError:
        return Verdict("unparsed", answer, 0.0, "nested too deeply")
    if equal is None:
        return Verdict("unparsed", answer, 0.0, "not a mathematical expression")
    return Verdict("correct" if equal else "wrong", answer, 0.0)


def texts_equal(
    gold: str, answer: str, several: bool = False, tolerance: Fraction = EXACT, unit: str = ""
) -> bool | None:
    """Whether two cleaned answers agree in one of their readings, of which a list of several answers has one; None when
    undecided. tolerance: largest difference of each number. unit: of the gold's values without one. Raises TooLarge."""
    choice = None if several or unit else choice_letters(gold, answer)
    if choice is not None:
        return choice
    undecided = False
    for a, b in [(gold, answer)] if several else _readings(gold, answer):
        verdict = answers_equal(_gold_structure(a, unit, several), parse_answer(b), tolerance)
        if verdict:
            return True
        undecided |= verdict is None
    return None if undecided else False


@functools.lru_cache(maxsize=1024)
def _gold_structure(text: str, unit: str, several: bool) -> Answer:
    return _in_unit(parse_answer(text), unit, several) if unit else parse_answer(text)


def _in_unit(gold: Answer, unit: str, several: bool) -> Answer:
    """The gold with the unit behind each value of a list that has none; behind a bracket as a whole when it is the one
    answer."""
    if isinstance(gold, Sequence) and (several or not gold.opening):
        return replace(gold, items=tuple(_in_unit(item, unit, several) for item in gold.items))
    return gold if split_unit(gold.text)[1] else parse_answer(f"{gold.text} \\text{{{unit}}}")


def _readings(gold: str, answer: str) -> list[tuple[str, str]]:
    """Pairs to compare: as they stand; with 1,234 as a number instead of a list; with 1,22 as a decimal; without the
    conditions behind them (`for all n`, `k \\in \\mathbb{Z}`)."""
    plain_gold, plain = (_THOUSANDS.sub(lambda match: match[1].replace(",", ""), s) for s in (gold, answer))
    # 1,000 is no list, but 1,234 may be one.
    numbers = [match[1] for s in (gold, answer) for match in _THOUSANDS.finditer(s)]
    pairs = [] if any(re.search(",0[0-9]", number) for number in numbers) else [(gold, answer)]
    if (plain_gold, plain) != (gold, answer):
        pairs.append((plain_gold, plain))
    for comma, other in ((gold, answer), (answer, gold)):
        # `1,22` as a gold may be a decimal; `2,1` is a list. As an answer to a gold of 2.1 it is a decimal.
        few = comma is gold and len(comma.rpartition(",")[2]) < 2
        value = split_unit(comma)[0]
        if _DECIMAL_COMMA.fullmatch(value) and not few and re.match(r"[+-]?[0-9]*\.[0-9]+", other):
            point = _DECIMAL_COMMA.sub(r"\1.\2", comma)
            pairs.append((point, answer) if comma is gold else (gold, point))
    (bare_gold, gold_condition), (bare_answer, condition) = split_condition(gold), split_condition(answer)
    if bool(gold_condition) != bool(condition) or (condition and same_tokens(gold_condition, condition)):
        pairs.append((bare_gold, bare_answer))
    return pairs
