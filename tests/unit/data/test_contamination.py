"""No training problem is in an evaluation set: what counts as the same, what as near, what is done about it."""

from __future__ import annotations

import pytest

from gxpo_trainer.data.contamination import NEAR, SHINGLE, find_overlap, without_contamination
from gxpo_trainer.data.prompts import PromptSet
from gxpo_trainer.errors import DataError
from gxpo_trainer.types import Prompt

HELD_OUT = {"mine": [Prompt("e0", r"Compute $\dfrac{1}{2} + x^{2}$, for $x \leq 3$.", "?")]}
LONG = [f"w{first}{second}" for first in "abcde" for second in "abcdefgh"]


def prompts(*texts: str) -> list[Prompt]:
    return [Prompt(f"t{i}", text, "?") for i, text in enumerate(texts)]


@pytest.mark.parametrize(
    "text",
    [
        r"Compute $\dfrac{1}{2} + x^{2}$, for $x \leq 3$.",
        r"compute \( \frac{1}{2}+x^2 \) for \(x\le3\)",
        "COMPUTE\n\n\\[\\tfrac{1}{2}\\,+\\,x^{2}\\]\tfor $x\\leq 3$!".replace("!", "."),
        r"Compute $\left.\frac{1}{2}\right. + x^{2}$; for $x \leq 3$:",
    ],
)
def test_layout_case_and_punctuation_do_not_hide_a_copy(text: str) -> None:
    (found,) = find_overlap(prompts(text), HELD_OUT).exact
    assert (found.train_id, found.benchmark, found.problem_id) == ("t0", "mine", "e0")


@pytest.mark.parametrize(
    "text",
    [
        r"Compute $\dfrac{1}{2} - x^{2}$, for $x \leq 3$.",
        r"Compute $\dfrac{1}{2} + x^{2}$, for $x \geq 3$.",
        r"Compute $\dfrac{1}{2} + x^{2}$, for $x \leq 30$.",
        r"Compute $\dfrac{1}{2} + x^{2}$, for $x \leq 3.5$.",
        r"Compute $\dfrac{1}{2} + x^{2}$",
    ],
)
def test_another_sign_or_number_is_another_problem(text: str) -> None:
    assert find_overlap(prompts(text), HELD_OUT).exact == ()


def test_similarity_is_the_share_of_common_shingles() -> None:
    # 40 words have 33 runs of 8. One changed word in the middle touches 8 of them: 25 common of 41 in all.
    changed = [*LONG[:20], "other", *LONG[21:]]
    held_out = {"mine": prompts(" ".join(LONG))}
    overlap = find_overlap(prompts(" ".join(changed)), held_out)
    assert SHINGLE == 8
    assert overlap.exact == ()
    assert overlap.near[0].similarity == pytest.approx(25 / 41)
    assert NEAR < 25 / 41


def test_two_changed_words_far_apart_are_not_near() -> None:
    # 16 of 33 runs are touched: 17 common of 49.
    changed = [*LONG[:12], "other", *LONG[13:27], "another", *LONG[28:]]
    assert find_overlap(prompts(" ".join(changed)), {"mine": prompts(" ".join(LONG))}).near == ()


@pytest.mark.parametrize("cut", [0, 10, 19, 20, 25])
def test_a_near_text_is_found_wherever_the_change_is(cut: int) -> None:
    # The first shingles may be exactly those that differ: the lookup must try enough of them.
    changed = [*LONG[:cut], "other", *LONG[cut + 1 :]]
    overlap = find_overlap(prompts("nothing in common at all with any of those", " ".join(changed)), {
        "other": prompts("x y z"), "mine": prompts(" ".join(LONG)),
    })  # fmt: skip
    assert [(item.train_id, item.benchmark) for item in overlap.near] == [("t1", "mine")]


def data() -> PromptSet:
    problem = HELD_OUT["mine"][0].text
    return PromptSet(tuple(prompts("1 + 1?", problem.lower(), "2 + 2?")), {"f": "hash"}, {"data.levels": 7})


def test_exact_copies_are_dropped_and_counted() -> None:
    kept = without_contamination(data(), HELD_OUT, "drop")
    assert [prompt.id for prompt in kept.prompts] == ["t0", "t2"]
    assert kept.num_left_out == {"data.levels": 7, "data.contamination": 1}
    assert kept.sha256 == data().sha256


def test_copies_are_rejected_or_kept_as_configured() -> None:
    with pytest.raises(DataError, match=r"data\.contamination = 'refuse': 1 of 3 .*such as t1 is e0 of mine"):
        without_contamination(data(), HELD_OUT, "refuse")
    assert without_contamination(data(), HELD_OUT, "ignore") == data()


def test_clean_data_is_left_as_it_is() -> None:
    assert without_contamination(data(), {"mine": prompts("3 + 3?")}, "refuse") == data()


def test_training_on_the_benchmark_alone_is_rejected() -> None:
    same = PromptSet(tuple(HELD_OUT["mine"]), {})
    with pytest.raises(DataError, match="train and evaluate on different problems"):
        without_contamination(same, HELD_OUT, "drop")


def test_near_duplicates_are_kept_and_reported() -> None:
    near = PromptSet(tuple(prompts(" ".join([*LONG[:39], "other"]))), {})
    kept = without_contamination(near, {"mine": [Prompt("e7", " ".join(LONG), "?")]}, "refuse")
    assert len(kept.prompts) == 1
    # 33 runs each, the last one differs: 32 of 34.
    assert kept.near_duplicates == ("t0 is 94% the text of e7 in mine",)
