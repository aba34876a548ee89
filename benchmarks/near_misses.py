"""Wrong answers one keystroke away from real golds: how many does the grader accept?

Every gold of every set is changed by text alone in one place: a brace moved, a sign flipped, an exponent or index
changed by one, two digits swapped, a digit raised by one, numerator and denominator swapped, a bound opened or closed,
a list entry dropped or added, a percent sign added or dropped, an argument moved out of a function. A change is kept
only where math-verify, not our evaluator, reads both sides and says that they differ. Each kept answer is then graded;
none may be `correct`.

    python benchmarks/near_misses.py [--data ../shared/data] [--sets math500,...] [--limit N] [--json FILE]
"""

from __future__ import annotations

import argparse
import collections
import json
import logging
import multiprocessing
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from gxpo_trainer.grading.pool import VerifierPool

SETS = ("math500", "amc23", "aime24", "minerva_math", "olympiadbench", "gsm8k_test", "math_train", "gsm8k_train")
_GROUP = r"\{((?:[^{}]|\{[^{}]*\})*)\}"
_NEXT = re.compile(r"\s*(?:[+-]\s*)?(?:\\[A-Za-z]+(?![A-Za-z{])|[0-9]+|[A-Za-z])(?![{^_(])")
_CALL_OF_SUM = re.compile(
    r"\\(?:ln|log|sin|cos|tan|arctan|exp)\s*(?:\\left)?\(([^()]+?)([+-])([^()+-]+?)(?:\\right)?\)"
)

NearMiss = tuple[str, str, str]
"""Kind of change, gold, changed answer."""


def near_misses(gold: str) -> Iterator[tuple[str, str]]:
    """(kind, changed answer) for every single change of one gold."""
    for make in (
        _brace_moved,
        _sign_flipped,
        _exponent_or_index,
        _digits_swapped,
        _digit_changed,
        _fraction_swapped,
        _bound,
        _list_entry,
        _percent,
        _argument_moved,
    ):
        kind = make.__name__.strip("_").replace("_", " ")
        for changed in make(gold):
            if re.sub(r"\s", "", changed) != re.sub(r"\s", "", gold):
                yield kind, changed


def _brace_moved(gold: str) -> Iterator[str]:
    r"""A group takes in what follows (`2^{n}-1` -> `2^{n-1}`) or gives up its last token (`e^{-2t}` -> `e^{-2}t`)."""
    for match in re.finditer(_GROUP, gold):
        if re.search(r"\\(?:text|mbox|mathrm|begin|end|textbf|textnormal|mathbf)\s*$", gold[: match.start()]):
            continue
        following = _NEXT.match(gold, match.end())
        if following is not None:
            end = following.end()
            yield gold[: match.start()] + "{" + match[1] + following.group() + "}" + gold[end:]
        shorter = re.fullmatch(r"(.*[0-9A-Za-z}])\s*((?:[+-]\s*)?(?:\\[A-Za-z]+|[0-9]+|[A-Za-z]))", match[1])
        if shorter is not None and shorter[1] and not re.search(r"\\[A-Za-z]*$", shorter[1]):
            yield gold[: match.start()] + "{" + shorter[1] + "}" + shorter[2] + gold[match.end() :]


def _sign_flipped(gold: str) -> Iterator[str]:
    for match in re.finditer(r"(?<![eE^])(?<!phantom )[+-](?=\s*[\\0-9A-Za-z({])", gold):
        yield gold[: match.start()] + ("+" if match.group() == "-" else "-") + gold[match.end() :]
    if re.match(r"\s*[0-9\\]", gold) and "," not in gold and "=" not in gold:
        yield "-" + gold


def _exponent_or_index(gold: str) -> Iterator[str]:
    for match in re.finditer(r"([\^_])\s*(?:\{\s*(-?\d+)\s*\}|(\d))", gold):
        value = int(match[2] or match[3])
        for changed in (value + 1, value - 1):
            yield f"{gold[: match.start()]}{match[1]}{{{changed}}}{gold[match.end() :]}"


def _digits_swapped(gold: str) -> Iterator[str]:
    for match in re.finditer(r"\d(?=\d)", gold):
        at = match.start()
        if gold[at] != gold[at + 1]:
            yield gold[:at] + gold[at + 1] + gold[at] + gold[at + 2 :]


def _digit_changed(gold: str) -> Iterator[str]:
    for match in re.finditer(r"\d", gold):
        yield gold[: match.start()] + str((int(match.group()) + 1) % 10) + gold[match.end() :]


def _fraction_swapped(gold: str) -> Iterator[str]:
    for match in re.finditer(rf"(\\[dt]?frac)\s*{_GROUP}\s*{_GROUP}", gold):
        yield gold[: match.start()] + f"{match[1]}{{{match[3]}}}{{{match[2]}}}" + gold[match.end() :]
    if quotient := re.fullmatch(r"(\d+)/(\d+)", gold):
        yield f"{quotient[2]}/{quotient[1]}"


def _bound(gold: str) -> Iterator[str]:
    if re.search(r"[\[(][^\[\]()]*,[^\[\]()]*[\])]", gold) and ("[" in gold or "]" in gold or "infty" in gold):
        for match in re.finditer(r"[\[\]()]", gold):
            other = {"[": "(", "]": ")", "(": "[", ")": "]"}[match.group()]
            yield gold[: match.start()] + other + gold[match.end() :]
    for match in re.finditer(r"\\(?:leq?|geq?)(?![a-z])|[<>]", gold):
        other = {"\\le": "<", "\\leq": "<", "\\ge": ">", "\\geq": ">", "<": "\\le ", ">": "\\ge "}[match.group()]
        yield gold[: match.start()] + other + gold[match.end() :]


def _list_entry(gold: str) -> Iterator[str]:
    match = re.fullmatch(r"(\\?[({\[]?)([^()\[\]{}]*,[^()\[\]{}]*)(\\?[)}\]]?)", gold)
    if match is None or re.fullmatch(r"\d{1,3}(?:,(?:\\!)?\d{3})+", gold):
        return
    parts = match[2].split(",")
    for at in range(len(parts)):
        if len(parts) > 1:
            yield match[1] + ",".join(parts[:at] + parts[at + 1 :]) + match[3]
    yield match[1] + ",".join([*parts, " 917"]) + match[3]


def _percent(gold: str) -> Iterator[str]:
    if "\\%" in gold:
        number = re.fullmatch(r"(-?[\d.]+)\s*\\%", gold)
        if number is not None:
            yield f"{float(number[1]) / 100:g}\\%"
            yield f"{float(number[1]) * 100:g}\\%"
    elif re.fullmatch(r"-?\d+(?:\.\d+)?", gold) and float(gold):
        yield f"{float(gold) / 100:g}"


def _argument_moved(gold: str) -> Iterator[str]:
    for match in _CALL_OF_SUM.finditer(gold):
        head = gold[: match.start()] + match.group().partition("(")[0].removesuffix("\\left")
        yield f"{head}({match[1]}){match[2]}{match[3]}{gold[match.end() :]}"
    for match in re.finditer(rf"\\sqrt\s*{_GROUP}", gold):
        parts = re.fullmatch(r"(.*[0-9A-Za-z}])\s*([+-].*|[A-Za-z0-9])", match[1])
        if parts is not None:
            yield f"{gold[: match.start()]}\\sqrt{{{parts[1]}}}{parts[2]}{gold[match.end() :]}"


def _differs(miss: NearMiss) -> bool:
    """Whether math-verify reads both sides and says that they differ, in both directions."""
    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)
    try:
        gold, changed = (parse(f"\\boxed{{{text}}}", fallback_mode="no_fallback") for text in miss[1:])
        return bool(gold and changed) and not verify(gold, changed) and not verify(changed, gold)
    except Exception:
        # What math-verify cannot judge is not kept.
        return False


def collect(data: Path, sets: tuple[str, ...], limit: int, seed: int = 0) -> list[NearMiss]:
    """Distinct changes of the golds of the sets; at most `limit`, drawn with the seed."""
    distinct: dict[NearMiss, None] = {}
    for name in sets:
        for line in (data / f"{name}.jsonl").read_bytes().splitlines():
            row = json.loads(line)
            gold = row.get("answer_latex") or row["answer"]
            for kind, changed in near_misses(gold):
                distinct[kind, gold, changed] = None
    misses = list(distinct)
    random.Random(seed).shuffle(misses)
    return misses[:limit]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parents[1] / "../shared/data")
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--limit", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    misses = collect(arguments.data, tuple(arguments.sets.split(",")), arguments.limit)
    with multiprocessing.get_context("spawn").Pool(arguments.workers) as judges:
        differ = judges.map(_differs, misses, chunksize=50)
    kept = [miss for miss, other in zip(misses, differ, strict=True) if other]
    with VerifierPool(arguments.workers, deadline_s=10.0) as pool:
        verdicts = pool.submit([(gold, f"The answer is $\\boxed{{{changed}}}$.") for _, gold, changed in kept]).result()
    counts = collections.Counter(kind for kind, _, _ in kept)
    accepted = [miss for miss, verdict in zip(kept, verdicts, strict=True) if verdict.status == "correct"]
    result = {
        "generated": len(misses),
        "kept": len(kept),
        "by_kind": dict(sorted(counts.items())),
        "verdicts": dict(collections.Counter(verdict.status for verdict in verdicts)),
        "accepted": accepted,
    }
    print(json.dumps(result, indent=2, ensure_ascii=False))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({**result, "misses": kept}, ensure_ascii=False) + "\n")
    return 1 if accepted else 0


if __name__ == "__main__":
    sys.exit(main())
