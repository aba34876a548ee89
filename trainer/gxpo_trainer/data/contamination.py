"""Is a training problem also an evaluation problem? Pure.

Exact: the same words, numbers and signs, whatever the case, the spacing and the punctuation. Near: at least
`NEAR` of the runs of `SHINGLE` words of the two texts together are in both (Jaccard): one changed word in a text of 40
or more. Most of these ask for something else about the same figure, so they are named for a person to read and kept.
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
_LOOK = re.compile(
    r"\\(?:left|right|displaystyle|textstyle|limits|q?quad|[bB]ig{1,2}[lrm]?)(?![a-z])|\\[,;:!() \[\]]"
    r"|\\(?:text|mathrm|mbox|textbf|textit)(?=\s*\{)"
)
_SYNONYMS = {"\\dfrac": "\\frac", "\\tfrac": "\\frac", "\\leq": "\\le", "\\geq": "\\ge", "\\neq": "\\ne",
             "\\cdots": "\\dots", "\\ldots": "\\dots"}  # fmt: skip
_TOKEN = re.compile(r"\\[a-z]+|\d+(?:\.\d+)?|[^\W\d_]+|[^\w\s.,;:?'\"`${}~]|_")
_TYPOGRAPHY = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"', "−": "-", "–": "-", "—": "-"})


@dataclass(frozen=True, slots=True)
class Duplicate:
    """A training problem and the evaluation problem that it repeats. similarity: Jaccard in [0, 1]."""

    train_id: str
    benchmark: str
    problem_id: str
    similarity: float


@dataclass(frozen=True, slots=True)
class Overlap:
    """exact: one entry a training problem. near: each training problem with its most similar evaluation problem."""

    exact: tuple[Duplicate, ...]
    near: tuple[Duplicate, ...]


def words(text: str) -> list[str]:
    """The text as lower-case words, numbers, LaTeX commands and operators; layout and punctuation are gone."""
    text = text if text.isascii() else unicodedata.normalize("NFKC", text).translate(_TYPOGRAPHY)
    found: list[str] = _TOKEN.findall(_LOOK.sub(" ", text.lower()))
    return [_SYNONYMS.get(word, word) for word in found] if "\\" in text else found


def find_overlap(train: Sequence[Prompt], benchmarks: Mapping[str, Sequence[Prompt]]) -> Overlap:
    """Training problems that are, or nearly are, problems of the benchmarks (by name)."""
    places = [(name, prompt) for name, prompts in benchmarks.items() for prompt in prompts]
    texts: dict[str, int] = {}
    shingles: list[frozenset[str]] = []
    containing: dict[str, list[int]] = {}
    for index, (_, prompt) in enumerate(places):
        found = words(prompt.text)
        texts.setdefault(" ".join(found), index)
        shingles.append(frozenset(_shingles(found)))
        for shingle in shingles[-1]:
            containing.setdefault(shingle, []).append(index)
    exact: list[Duplicate] = []
    near: list[Duplicate] = []
    for prompt in train:
        found = words(prompt.text)
        same = texts.get(" ".join(found))
        best = (same, 1.0) if same is not None else _nearest(found, shingles, containing)
        if best is not None:
            name, other = places[best[0]]
            (near if same is None else exact).append(Duplicate(prompt.id, name, other.id, best[1]))
    return Overlap(tuple(exact), tuple(near))


def _shingles(found: list[str]) -> list[str]:
    """All runs of SHINGLE words; none of a shorter text, which can only be repeated exactly."""
    return [" ".join(found[i : i + SHINGLE]) for i in range(len(found) - SHINGLE + 1)]


def _nearest(
    found: list[str], shingles: list[frozenset[str]], containing: Mapping[str, list[int]]
) -> tuple[int, float] | None:
    """Index and similarity of the most similar text at or above NEAR.

    A text that near holds at least NEAR of this one's shingles. So of any 1 − NEAR of them and one more, one is
    shared, and almost every text is settled by looking up that many.
    """
    num = len(found) - SHINGLE + 1
    few = int(num * (1 - NEAR) + 1e-9) + 1
    candidates: set[int] = set()
    seen: set[str] = set()
    for i in range(max(num, 0)):
        shingle = " ".join(found[i : i + SHINGLE])
        seen.add(shingle)
        candidates.update(containing.get(shingle, ()))
        if len(seen) >= few:
            break
    if not candidates:
        return None
    own = set(_shingles(found))
    similarity = {index: len(own & shingles[index]) / len(own | shingles[index]) for index in sorted(candidates)}
    best = max(similarity, key=similarity.__getitem__)
    return (best, similarity[best]) if similarity[best] >= NEAR else None


def without_contamination(
    data: PromptSet, benchmarks: Mapping[str, Sequence[Prompt]], policy: Literal["drop", "refuse", "ignore"]
) -> PromptSet:
    """The training problems that may be trained on, by `data.contamination`.

    Raises DataError with `refuse` when one is a problem of a benchmark, with `drop` when none would be left.
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
            + ('take them out, or set it to "drop"' if kept else "train and evaluate on different problems")
        )
    return replace(
        data,
        prompts=kept,
        num_left_out={**data.num_left_out, "data.contamination": len(repeated)},
        near_duplicates=near,
    )
