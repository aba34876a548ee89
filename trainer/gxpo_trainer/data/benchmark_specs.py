"""The named benchmarks: source of each, and one small function per peculiarity of its rows."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from gxpo_trainer.data.prompts import field_text, final_answer
from gxpo_trainer.data.records import Record
from gxpo_trainer.errors import DataError
from gxpo_trainer.verify.options import VerifyOptions

PROBLEM_FIELDS = ("problem", "question", "Problem")
ID_FIELDS = ("id", "unique_id", "ID")
FIX = "copies of this benchmark have it: correct the row, or set evaluation.data_root to another copy"


@dataclass(frozen=True, slots=True)
class BenchmarkSpec:
    """One benchmark.

    names: accepted in settings and for local copies, the canonical one first. hub, subset, split, num_problems: the
    public copy; pattern: its files, if the repository has an unusual layout. gold: the final answer of a row. options:
    verification options of a row, None for the defaults.
    """

    title: str
    names: tuple[str, ...]
    num_problems: int
    hub: str
    split: str
    gold: Callable[[Record], str]
    options: Callable[[Record], VerifyOptions | None] = lambda record: None
    subset: str | None = None
    pattern: str | None = None
    template: str = "boxed"

    @property
    def name(self) -> str:
        return self.names[0]


def plain_answer(record: Record) -> str:
    """`answer`, or the last box of `solution` (MATH)."""
    return final_answer(_answer_text(record, "answer", "Answer", "solution"))


def number_after_hashes(record: Record) -> str:
    """The number after ####, without thousands separators (GSM8K writes `#### 2,125`)."""
    gold = plain_answer(record)
    return gold.replace(",", "") if re.fullmatch(r"-?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?", gold) else gold


def whole_number(record: Record) -> str:
    """The answer with whole numbers normalized: AMC's `27.0` is 27, AIME's `073` is 73."""
    gold = plain_answer(record)
    match = re.fullmatch(r"0*([0-9]+)(?:\.0*)?", gold)
    return match[1] if match else gold


def minerva_answer(record: Record) -> str:
    r"""`answer_latex`, else the answer with Python notation (`4.5e33`, `-1./3`, `np.arcsin(x)`) converted to LaTeX."""
    if isinstance(record.fields.get("answer_latex"), str):
        return field_text(record, "answer_latex", FIX).strip()
    gold = plain_answer(record)
    if (number := re.fullmatch(r"([-+]?[0-9]+(?:\.[0-9]*)?)[eE]([-+]?)0*([0-9]+)", gold)) is not None:
        return f"{number[1]} \\times 10^{{{number[2].strip('+')}{number[3]}}}"
    if (quotient := re.fullmatch(r"(-?)([0-9]+)\./([0-9]+)", gold)) is not None:
        return f"{quotient[1]}\\frac{{{quotient[2]}}}{{{quotient[3]}}}"
    return re.sub(r"\bnp\.(?=[a-z])", r"\\", gold)


def olympiad_answer(record: Record) -> str:
    """All answers of `final_answer`, without dollar signs; corrects one gold with a stray letter."""
    gold = _answer_text(record, "final_answer", "answer").replace("$", "").strip().rstrip(".")
    return {"t(0,4]": "(0,4]"}.get(gold, gold)


def olympiad_options(record: Record) -> VerifyOptions | None:
    """`is_multiple_answer`, `unit`, and `error`: one absolute tolerance, or one per answer, separated by commas."""
    given = {name: record.fields.get(name) for name in ("error", "unit", "is_multiple_answer")}
    several = str(given["is_multiple_answer"]).strip().lower() in ("true", "1")
    unit = str(given["unit"] or "").strip() or None
    try:
        parts = [part for part in str(given["error"] or "").split(",") if part.strip()]
        options = VerifyOptions(tuple(float(part) for part in parts), unit, several)
    except ValueError:
        raise DataError(f"{record.location}: error = {given['error']!r} is not a tolerance; correct the row") from None
    return None if options == VerifyOptions() else options


def _answer_text(record: Record, *names: str) -> str:
    """The first of the named fields that the row has."""
    present = [name for name in names if record.fields.get(name) not in (None, "", [])]
    return field_text(record, present[0] if present else names[0], FIX)


BENCHMARKS = {
    spec.name: spec
    for spec in (
        BenchmarkSpec(
            "MATH-500", ("math500", "math_500", "MATH-500"), 500, "HuggingFaceH4/MATH-500", "test", plain_answer
        ),
        BenchmarkSpec("AMC23", ("amc23", "amc2023"), 40, "math-ai/amc23", "test", whole_number),
        BenchmarkSpec(
            "GSM8K", ("gsm8k", "gsm8k_test"), 1319, "openai/gsm8k", "test", number_after_hashes, subset="main"
        ),
        BenchmarkSpec(
            "Minerva Math", ("minerva", "minerva_math", "minervamath"), 272, "math-ai/minervamath", "test",
            minerva_answer,
        ),
        BenchmarkSpec(
            "OlympiadBench", ("olympiadbench", "olympiad_bench", "OlympiadBench"), 674, "Hothan/OlympiadBench", "train",
            olympiad_answer, olympiad_options, pattern="*OE_TO_maths_en_COMP*",
        ),
        BenchmarkSpec("AIME24", ("aime24", "aime2024", "aime_2024"), 30, "HuggingFaceH4/aime_2024", "train",
                      whole_number),
    )
}  # fmt: skip
"""Benchmarks by name, in the order of the GXPO paper's tables, AIME24 last."""

_BY_ANY_NAME = {name: spec for spec in BENCHMARKS.values() for name in spec.names}


def find_spec(name: str) -> BenchmarkSpec | None:
    """The benchmark with this name or alias."""
    return _BY_ANY_NAME.get(name)
