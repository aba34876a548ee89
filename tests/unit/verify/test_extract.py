"""Where the final answer of a response is found."""

from __future__ import annotations

import pytest

from gxpo_trainer.verify.boxes import TAIL_CHARS, matching_braces
from gxpo_trainer.verify.extract import MAX_ANSWER_CHARS, extract_answer


def text_of(response: str) -> str | None:
    return extract_answer(response) or None


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"So \boxed{1} is wrong. It is \boxed{2}.", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed {7} apples", "7"),
        (r"\fbox{7}", "7"),
        (r"\boxed 7 ", "7"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"we get \boxed{5} and then \boxed{6", "5"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
    ],
)
def test_the_last_balanced_box_is_the_answer(response: str, answer: str) -> None:
    assert text_of(response) == answer


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\boxed{1} and \boxed{2}", "1, 2"),
        (r"\(\boxed{1}\), \(\boxed{2}\)", "1, 2"),
        (r"\boxed{(3, 3)} \text{ for part (a) and } \boxed{(1, 1)}", "(3, 3), (1, 1)"),
        (r"First \boxed{1}. Now we know more. Hence \boxed{2}", "2"),
    ],
)
def test_boxes_joined_in_one_sentence_are_one_list(response: str, answer: str) -> None:
    assert text_of(response) == answer


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("Final Answer: The final answer is $12$. I hope it is correct.", "12"),
        (r"\boxed{255} is earned. Final Answer: The final answer is $10,455$. I hope it is correct.", "10,455"),
        ("Final Answer: The largest $n$ is 34.", "34"),
        ("Final Answer: The volume of $ABCDEFGH$ is 120. I hope it is correct.", "120"),
        ("**Final Answer:** **16**", "16"),
        (r"\boxed{7}. So the final answer is correct.", "7"),
    ],
)
def test_final_answer_sentence_counts_when_it_comes_last_and_says_something(response: str, answer: str) -> None:
    assert text_of(response) == answer


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("6 * 12 = 72 <<6*12=72>>\n#### 72", "72"),
        ("The answer is not 5. The answer is 6.", "6"),
        ("Answer: C", "C"),
        ("The correct answer is (C).", "(C)"),
        ("<answer>7</answer>", "7"),
        ("Therefore the answer is: 3 apples", "3 apples"),
    ],
)
def test_hashes_and_answer_sentences_are_read(response: str, answer: str) -> None:
    assert text_of(response) == answer


@pytest.mark.parametrize("answer", ["42", "x^2+2x+1", "1,000.5", "-\\frac{1}{2}", "28 percent", "Evelyn", "$[0,1)$"])
def test_a_bare_answer_is_taken_whole(answer: str) -> None:
    assert text_of(answer) == answer


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("We add them and find that there are 12 sequences in all.", "12"),
        (r"We find that $x \geq 5$ is the solution.", r"x \geq 5"),
        ("the number is not 10 which is 1,000.99€", "1,000.99"),
        ("the error increases by 100%.", "100%"),
        ("We get $a=1$.\n\nSo the roots are $2$ and $3$.", "2, 3"),
    ],
)
def test_without_a_marker_the_last_formula_or_number_is_taken(response: str, answer: str) -> None:
    assert text_of(response) == answer


def test_what_was_thought_before_the_closing_tag_is_not_the_answer() -> None:
    assert text_of(r"<think>maybe \boxed{1}</think> It is \boxed{2}.") == "2"
    assert text_of(r"maybe \boxed{1}</think> It is 2.") == "2"


def test_template_markers_at_the_end_are_ignored() -> None:
    assert text_of("the probability is 2/3. <|im_start|>user") == "2/3"


@pytest.mark.parametrize("response", ["", "   \n "])
def test_an_empty_response_has_no_answer(response: str) -> None:
    assert text_of(response) is None


def test_only_the_tail_of_a_long_response_is_read() -> None:
    assert text_of(r"\boxed{1}" + " blah" * TAIL_CHARS + r" \boxed{2}") == "2"
    long_line = "word " * (TAIL_CHARS // 2)
    found = text_of(long_line)
    assert found is None or len(found) <= MAX_ANSWER_CHARS


def test_braces_are_matched_and_escaped_ones_do_not_count() -> None:
    assert matching_braces(r"a{b\{{c}}}") == {5: 7, 1: 8}
