"""Detects training problems that are evaluation problems. Pure.

Exact duplicates have the same words, numbers and signs, ignoring case, spacing and punctuation. Near duplicates have a
Jaccard similarity of their `SHINGLE`-word shingles of at least `NEAR`, such as one changed word in a text of 40.
Most near duplicates ask for something else about the same setting, so they are kept and reported.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gxpo_trainer.data.prompts import PromptSet
from gxpo_trainer.errors import DataError
from gxpo_trainer.types import Prompt

SHINGLE = 8
NEAR = 0.5
_LAYOUT = re.compile(
    r"\\(?:left|right|displaystyle|textstyle|limits|q?quad|[bB]ig{1,2}[lrm]?)(?![a-z])|\\[,;:!() \[\]]"
    r"|\\(?:text|mathrm|mbox|textbf|textit)(?=\s*\{)"
)
_SYNONYMS = {"\\dfrac": "\\frac", "\\tfrac": "\\frac", "\\leq": "\\le", "\\geq": "\\ge", "\\neq": "\\ne",
             "\\cdots": "\\dots", "\\ldots": "\\dots"}  # fmt: skip
_TOKEN = re.compile(r"\\[a-z]+|\d+(?:\.\d+)?|[^\W\d_]+|[^\w\s.,;:?'\"`${}~]|_")
_TYPOGRAPHY = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"', "−": "-", "–": "-", "—": "-"})


@dataclass(frozen=True, slots=True)
class Duplicate:
    """A training problem and the evaluation problem that it duplicates. similarity: Jaccard index in [0, 1]."""

    train_id: str
    benchmark: str
    problem_id: str
    similarity: float


@dataclass(frozen=True, slots=True)
class Overlap:
    """Duplicates, one per training problem; near ones with the most similar evaluation problem."""

    exact: tuple[Duplicate, ...]
    near: tuple[Duplicate, ...]


def words(text: str) -> list[str]:
    """The text's lower-case words, numbers, LaTeX commands and operators, without layout and punctuation."""
    text = text if text.isascii() else unicodedata.normalize("NFKC", text).translate(_TYPOGRAPHY)
    tokens: list[str] = _TOKEN.findall(_LAYOUT.sub(" ", text.lower()))
    return [_SYNONYMS.get(token, token) for token in tokens] if "\\" in text else tokens


def find_overlap(train: Sequence[Prompt], benchmarks: Mapping[str, Sequence[Prompt]]) -> Overlap:
    """Find training problems that are exact or near duplicates of problems of the benchmarks (by name)."""
    evaluated = [(name, prompt) for name, prompts in benchmarks.items() for prompt in prompts]
    texts: dict[str, int] = {}
    shingles: list[frozenset[str]] = []
    containing: dict[str, list[int]] = {}
    for index, (_, prompt) in enumerate(evaluated):
        tokens = words(prompt.text)
        texts.setdefault(" ".join(tokens), index)
        shingles.append(frozenset(_shingles(tokens)))
        for shingle in shingles[-1]:
            containing.setdefault(shingle, []).append(index)
    exact: list[Duplicate] = []
    near: list[Duplicate] = []
    for prompt in train:
        tokens = words(prompt.text)
        same = texts.get(" ".join(tokens))
        best = (same, 1.0) if same is not None else _nearest(tokens, shingles, containing)
        if best is not None:
            name, other = evaluated[best[0]]
            (near if same is None else exact).append(Duplicate(prompt.id, name, other.id, best[1]))
    return Overlap(tuple(exact), tuple(near))


def _shingles(tokens: list[str]) -> list[str]:
    """All runs of SHINGLE words; none for a shorter text, which has exact duplicates only."""
    return [" ".join(tokens[i : i + SHINGLE]) for i in range(len(tokens) - SHINGLE + 1)]


def _nearest(
    tokens: list[str], shingles: list[frozenset[str]], containing: Mapping[str, list[int]]
) -> tuple[int, float] | None:
    """Index and similarity of the most similar text with a similarity of at least NEAR.

    Such a text shares at least NEAR of this one's shingles, so any subset of more than 1 − NEAR of them contains a
    shared one. Looking up that many is enough to find all candidates.
    """
    shingles_of_text = _shingles(tokens)
    few = int(len(shingles_of_text) * (1 - NEAR) + 1e-9) + 1
    candidates: set[int] = set()
    seen: set[str] = set()
    for shingle in shingles_of_text:
        seen.add(shingle)
        candidates.update(containing.get(shingle, ()))
        if len(seen) >= few:
            break
    if not candidates:
        return None
    own = set(shingles_of_text)
    similarity = {index: len(own & shingles[index]) / len(own | shingles[index]) for index in sorted(candidates)}
    best = max(similarity, key=similarity.__getitem__)
    return (best, similarity[best]) if similarity[best] >= NEAR else None


def without_contamination(
    data: PromptSet, benchmarks: Mapping[str, Sequence[Prompt]], policy: Literal["drop", "refuse", "ignore"]
) -> PromptSet:
    """Apply `data.contamination` to the training problems.

    Raises DataError with `refuse` if one is a problem of a benchmark, with `drop` if none would be left.
    """
    if policy == "ignore":
        return data
    overlap = find_overlap(data.prompts, benchmarks)
    near = tuple(
        f"{item.train_id} is {item.similarity:.0%} the text of {item.problem_id} in {item.benchmark}"
        for item in overlap.near
    )
    if not overlap.exact:
        return replace(data, near_duplicates=near)
    repeated = {item.train_id for item in overlap.exact}
    kept = tuple(prompt for prompt in data.prompts if prompt.id not in repeated)
    first = overlap.exact[0]
    example = f"{first.train_id} is {first.problem_id} of {first.benchmark}"
    if policy == "refuse" or not kept:
        raise DataError(
            f"data.contamination = {policy!r}: {len(repeated)} of {len(data.prompts)} training problems are problems "
            f"of evaluation.benchmarks, such as {example}; "
            + ('remove them, or set it to "drop"' if kept else "train and evaluate on different problems")
        )
    return replace(
        data,
        prompts=kept,
        num_left_out={**data.num_left_out, "data.contamination": len(repeated)},
        near_duplicates=near,
    )
