"""answer -> Verdict: extraction, normalisation, exact comparison, and math-verify for what is left.

`verify` is a pure function without a clock: `Verdict.seconds` is 0 here and filled in by the pool, which also
holds the deadline. Nothing here may be called on untrusted answers outside a killable process.
"""

from __future__ import annotations

import functools
import re
from dataclasses import replace

from gxpo_trainer.types import Verdict, VerdictStatus
from gxpo_trainer.verify.compare import answers_equal
from gxpo_trainer.verify.conversion import in_unit
from gxpo_trainer.verify.engine import engine_parses
from gxpo_trainer.verify.exact import Number, numbers_equal, read_number
from gxpo_trainer.verify.expression import Unsupported, parse_expression
from gxpo_trainer.verify.extract import MAX_ANSWER_CHARS, every_box, extract_answer
from gxpo_trainer.verify.normalize import normalize
from gxpo_trainer.verify.options import VerifyOptions
from gxpo_trainer.verify.scalar import choice_letters
from gxpo_trainer.verify.structure import Answer, Scalar, parse_answer
from gxpo_trainer.verify.tolerance import within

_THOUSANDS = re.compile(r"[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_DECIMAL_COMMA = re.compile(r"[+-]?[0-9]+,[0-9]+")


def gold_answer(gold: str) -> str:
    """The final answer of a gold: the gold itself, or what a worked solution boxes or calls its final answer."""
    if "boxed" in gold or "inal answer" in gold.lower():
        extraction = extract_answer(gold)
        if extraction is not None:
            return extraction.text
    return gold


@functools.lru_cache(maxsize=4096)
def _prepared_gold(gold: str) -> tuple[Number | None, str]:
    """Plain number (or None) and normalised text of a gold; kept, since a gold comes back for every sample."""
    text = gold_answer(gold)
    return read_number(text), normalize(text)


def parse_gold(gold: str) -> str:
    """The normalised gold. Raises ValueError when no verdict about it would be possible.

    A gold is usable when it is a number, an expression, words, a list or set of such, or anything that math-verify
    parses.
    """
    plain, text = _prepared_gold(gold)
    if plain is not None:
        return text
    if not text or len(text) > MAX_ANSWER_CHARS:
        raise ValueError(
            f"gold {gold[:80]!r} holds no answer; give the final answer alone, or a solution with a \\boxed"
        )
    if not _readable(parse_answer(text)) and not engine_parses(text):
        raise ValueError(f"gold {gold[:80]!r} cannot be parsed; write it as LaTeX that math-verify reads")
    return text


def _readable(answer: Answer) -> bool:
    if not isinstance(answer, Scalar):
        return True
    if re.fullmatch(r"[\w\s'.,:;%()-]+", answer.text) and re.search(r"\w", answer.text):
        return True
    try:
        parse_expression(answer.text)
    except Unsupported:
        return False
    return True


def verify(gold: str, response: str, options: VerifyOptions | None = None) -> Verdict:
    """Whether the response's final answer is the gold. Pure; no time-out of its own (see `pool.VerifierPool`).

    options: rules of the problem beside its gold; None for the common case.
    """
    extraction = extract_answer(response)
    if extraction is None:
        return Verdict("unparsed", None, 0.0, "no final answer found")
    if options is None:
        return _judged(gold, extraction.text)
    verdict = _judged_by(options, gold, extraction.text)
    if options.several and verdict.status != "correct":
        # Several answers may stand in boxes of their own, with sentences between them.
        together = every_box(response)
        if together is not None and _judged_by(options, gold, together).status == "correct":
            return Verdict("correct", together, 0.0)
    return verdict


def _judged(gold: str, answer: str) -> Verdict:
    if len(answer) > MAX_ANSWER_CHARS:
        return Verdict("unparsed", answer[:MAX_ANSWER_CHARS], 0.0, f"final answer of {len(answer)} characters")
    gold_number, gold_text = _prepared_gold(gold)
    number = read_number(answer)
    if gold_number is not None and number is not None:
        return Verdict("correct" if numbers_equal(gold_number, number) else "wrong", answer, 0.0)
    text = normalize(answer)
    if not text:
        return Verdict("unparsed", answer, 0.0, "nothing is left of the final answer")
    verdict = texts_equal(gold_text, text)
    if verdict is None:
        return Verdict("unparsed", answer, 0.0, "not a mathematical expression")
    return Verdict("correct" if verdict else "wrong", answer, 0.0)


def _judged_by(options: VerifyOptions, gold: str, answer: str) -> Verdict:
    """The verdict on one final answer under the problem's own rules."""
    in_gold_unit = answer if options.unit is None else in_unit(answer, options.unit)
    if len(answer) > MAX_ANSWER_CHARS or not (text := normalize(in_gold_unit)):
        return _judged(gold, answer)
    gold_text = _prepared_gold(gold)[1]
    if options.several:
        # Read as lists only: a comma is neither a decimal nor a thousands separator.
        found = answers_equal(_gold_structure(gold_text), parse_answer(text))
        status: VerdictStatus = "unparsed" if found is None else "correct" if found else "wrong"
        verdict = Verdict(status, answer, 0.0, "not a mathematical expression" if found is None else "")
    else:
        verdict = replace(_judged(gold, in_gold_unit), extracted=answer)
    if (
        options.tolerance
        and verdict.status != "correct"
        and within(_gold_structure(gold_text), parse_answer(text), options.tolerance)
    ):
        return Verdict("correct", answer, 0.0, "within the tolerance")
    return verdict


def texts_equal(gold: str, answer: str) -> bool | None:
    """Whether two normalised answers agree in one of their readings; None when undecided."""
    if gold == answer:
        return True
    choice = choice_letters(gold, answer)
    if choice is not None:
        return choice
    verdicts = [answers_equal(_gold_structure(a), parse_answer(b)) for a, b in _readings(gold, answer)]
    return True if True in verdicts else (None if None in verdicts else False)


_gold_structure = functools.lru_cache(maxsize=1024)(parse_answer)


def _without_thousands(text: str) -> str:
    return text.replace(",", "") if _THOUSANDS.fullmatch(text) else text


def _readings(gold: str, answer: str) -> list[tuple[str, str]]:
    """Pairs to compare: as they stand; with 1,234 as a number instead of a list; with 1,22 as a decimal."""
    pairs = [(gold, answer)]
    if _THOUSANDS.fullmatch(gold) or _THOUSANDS.fullmatch(answer):
        pairs.append((_without_thousands(gold), _without_thousands(answer)))
    for comma, other in ((gold, answer), (answer, gold)):
        # `1,22` as a gold may be a decimal; `2,1` is a list. As an answer to a gold of 2.1 it is a decimal.
        few = comma is gold and len(comma.rpartition(",")[2]) < 2
        if _DECIMAL_COMMA.fullmatch(comma) and not few and re.fullmatch(r"[+-]?[0-9]*\.[0-9]+", other):
            point = comma.replace(",", ".")
            pairs.append((point, answer) if comma is gold else (gold, point))
    return pairs
