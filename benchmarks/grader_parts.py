"""What each part of the grader is for: the verdicts that change when it is left out.

Cases: the suites of other graders, every equal form of every gold (`equal_forms.py`), the near misses that
`near_misses.py --json` kept, and further labelled cases (`--cases`, lines of gold, prediction, expected). Each part in
turn is replaced by one that does nothing, and all cases are judged again.

    python -m benchmarks.grader_parts --near-misses near_misses.json [--cases FILE ...] [--markdown FILE]
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import multiprocessing
import pkgutil
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gxpo_trainer.grading
from benchmarks.equal_forms import equal_forms
from gxpo_trainer.grading.engine import engine_equal
from gxpo_trainer.grading.latex import STEPS, Unsupported
from gxpo_trainer.grading.verify import verify

SETS = ("math500", "amc23", "aime24", "minerva_math", "olympiadbench", "gsm8k_test", "math_train")
LIMIT_S = 1.0
"""CPU time of one answer, so that a busy machine takes no verdicts away."""
Case = tuple[str, str, bool]


def _unsupported(*_: Any) -> Any:
    raise Unsupported


DO_NOTHING: dict[str, tuple[str, Callable[..., Any]]] = {
    **{f"latex.{step.__name__}": (step.__name__, lambda s: s) for step in STEPS},
    "extract.response_tail": ("response_tail", lambda s: s),
    "extract._hashes": ("_hashes", lambda s: ""),
    "extract._answer_sentence": ("_answer_sentence", lambda s: ""),
    "extract._bare": ("_bare", lambda s: ""),
    "extract._last_line": ("_last_line", lambda s: ""),
    "extract._after_verb": ("_after_verb", lambda s: s),
    "extract._with_unit": ("_with_unit", lambda text, number: number.group().strip()),
    "structure.split_condition": ("split_condition", lambda s: (s, "")),
    "compare.as_intervals": ("as_intervals", lambda answer: None),
    "equality.proportional": ("proportional", lambda a, b: 0),
    "scalar._based_numbers": ("_based_numbers", lambda a, b: None),
    "scalar._clock_times": ("_clock_times", lambda a, b: None),
    "scalar._words_equal": ("_words_equal", lambda a, b: None),
    "scalar.choice_letters": ("choice_letters", lambda a, b: None),
    "units.number_from_words": ("number_from_words", lambda s: None),
    "units.split_unit": ("split_unit", lambda s: (s, "")),
    "units.parse_unit": ("parse_unit", lambda s: None),
    "equality._candidates": ("_candidates", lambda constants: iter(())),
    "expression.parse_expression": ("parse_expression", _unsupported),
    "engine.engine_equal (math-verify)": ("engine_equal", lambda a, b: None),
}


def _modules() -> list[Any]:
    names = [info.name for info in pkgutil.iter_modules(gxpo_trainer.grading.__path__)]
    return [importlib.import_module(f"gxpo_trainer.grading.{name}") for name in names]


@contextmanager
def _without(part: str) -> Iterator[None]:
    """The grader with one part that does nothing, in every module that imports it."""
    name, nothing = DO_NOTHING[part]
    modules = [module for module in _modules() if callable(getattr(module, name, None))]
    if not modules:
        raise LookupError(f"the grader has no part {part}")
    before = [getattr(module, name) for module in modules]
    latex: Any = importlib.import_module("gxpo_trainer.grading.latex")
    for module in modules:
        setattr(module, name, nothing)
    latex.STEPS = tuple(nothing if step.__name__ == name else step for step in STEPS)
    try:
        yield
    finally:
        latex.STEPS = STEPS
        for module, function in zip(modules, before, strict=True):
            setattr(module, name, function)


def _give_up(*_: object) -> None:
    raise TimeoutError


def _accepted(cases: list[Case]) -> list[bool]:
    verdicts = []
    for gold, prediction, _ in cases:
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
        try:
            verdicts.append(verify(gold, prediction).status == "correct")
        except Exception:
            # A part left out may break the next one: that answer is not accepted.
            verdicts.append(False)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    return verdicts


def _clear_caches() -> None:
    for module in _modules():
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()


def measure(part: str) -> tuple[str, int, int]:
    """(part, right verdicts lost, wrong verdicts lost) without it; the latter means that it costs verdicts."""
    signal.signal(signal.SIGPROF, _give_up)
    logging.disable(logging.CRITICAL)
    _clear_caches()
    with _without(part):
        accepted = _accepted(CASES)
    pairs = [(a == case[2], b == case[2]) for a, b, case in zip(BASE, accepted, CASES, strict=True)]
    return part, sum(full and not less for full, less in pairs), sum(less and not full for full, less in pairs)


def _is_fit(row: dict[str, Any]) -> bool:
    """Whether a labelled case is about mathematics and not about hanging the grader."""
    return row.get("tier", "math") == "math" and row.get("kind") != "hostile"


def load_cases(data: Path, near_misses: Path | None, extra: list[Path], sample: int, seed: int = 0) -> list[Case]:
    """All cases, distinct; of the equal forms and near misses a sample."""
    chosen = random.Random(seed)
    cases: list[Case] = []
    for path in (data / "grader_cases.jsonl", *extra):
        rows = [json.loads(line) for line in path.read_bytes().splitlines()]
        cases += [(row["gold"], row["prediction"], row["expected"]) for row in rows if _is_fit(row)]
    golds = [json.loads(line) for name in SETS for line in (data / f"{name}.jsonl").read_bytes().splitlines()]
    texts = [row.get("answer_latex") or row["answer"] for row in golds]
    forms = [(gold, f"$\\boxed{{{form}}}$", True) for gold in dict.fromkeys(texts) for form in equal_forms(gold)]
    cases += chosen.sample(forms, min(sample, len(forms)))
    if near_misses is not None:
        kept = json.loads(near_misses.read_text())["misses"]
        cases += [
            (gold, f"$\\boxed{{{text}}}$", False) for _, gold, text in chosen.sample(kept, min(sample, len(kept)))
        ]
    return list(dict.fromkeys(cases))


CASES: list[Case] = []
BASE: list[bool] = []


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parents[1] / "../shared/data")
    parser.add_argument("--near-misses", type=Path)
    parser.add_argument("--cases", type=Path, nargs="*", default=[])
    parser.add_argument("--sample", type=int, default=3_000, help="equal forms, and near misses")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args(argv)
    CASES.extend(load_cases(arguments.data, arguments.near_misses, arguments.cases, arguments.sample))
    # Imported before an answer's CPU time counts, and before the processes fork.
    engine_equal("x+1", "1+x")
    signal.signal(signal.SIGPROF, _give_up)
    logging.disable(logging.CRITICAL)
    BASE.extend(_accepted(CASES))
    right = sum(a == case[2] for a, case in zip(BASE, CASES, strict=True))
    lines = [f"{len(CASES)} cases, {right} right", "", "| left out | verdicts lost | gained |", "|---|---|---|"]
    # Forked, so that the cases travel for nothing.
    with multiprocessing.get_context("fork").Pool(arguments.workers, maxtasksperchild=1) as pool:
        for part, lost, gained in pool.imap(measure, DO_NOTHING, chunksize=1):
            lines.append(f"| `{part}` | {lost} | {gained} |")
            print(lines[-1], flush=True)
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.markdown is not None:
        arguments.markdown.write_text(text)


if __name__ == "__main__":
    main()
