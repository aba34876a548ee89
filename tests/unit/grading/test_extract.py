"""Where the final answer of a response is found."""

from __future__ import annotations

from gxpo_trainer.grading import extract, latex as l
from gxpo_trainer.grading.latex import MAX_TOKENS, clean, same_tokens


def text_of(response: str) -> str | None:
    return extract.extract_answer(response) or None


def test_the_final_answer_is_extracted() -> None:
    answers: dict[str, str | None] = {
        # The last balanced box.
        r"So \boxed{1} is wrong. It is \boxed{2}.": "2", r"\boxed{\frac{1}{2}}": r"\frac{1}{2}",
        r"\boxed {7} apples": "7", r"\boxed 7 ": "7", r"we get \boxed{5} and then \boxed{6": "5",
        r"\boxed{\{1,2\}}": r"\{1,2\}",
        # Boxes joined in one sentence are one list.
        r"\boxed{1} and \boxed{2}": "1, 2", r"\(\boxed{1}\), \(\boxed{2}\)": "1, 2",
        r"\boxed{(3, 3)} \text{ for part (a) and } \boxed{(1, 1)}": "(3, 3), (1, 1)",
        r"First \boxed{1}. Now we know more. Hence \boxed{2}": "2",
        # A final-answer sentence counts when it comes last and has an answer.
        "Final Answer: The final answer is $12$. I hope it is correct.": "12",
        r"\boxed{255} is earned. Final Answer: The final answer is $10,455$. I hope it is correct.": "10,455",
        "Final Answer: The largest $n$ is 34.": "34",
        "Final Answer: The volume of $ABCDEFGH$ is 120. I hope it is correct.": "120",
        "**Final Answer:** **16**": "16", r"\boxed{7}. So the final answer is correct.": "7",
        # Hashes and answer sentences.
        "6 * 12 = 72 <<6*12=72>>\n#### 72": "72", "The answer is not 5. The answer is 6.": "6", "Answer: C": "C",
        "The correct answer is (C).": "(C)", "<answer>7</answer>": "7",
        "Therefore the answer is: 3 apples": "3 apples",
        # Without a marker: the last formula or number.
        "We add them and find that there are 12 sequences in all.": "12",
        r"We find that $x \geq 5$ is the solution.": r"x \geq 5", "the error increases by 100%.": "100%",
        "We get $a=1$.\n\nSo the roots are $2$ and $3$.": "2, 3",
        # Prose between the dollar signs of two prices is no formula.
        "We pay $3 for the red apples and $5": "$5",
        # What a sentence calls the answer.
        "The answer is 5 km/h.": "5 km/h", "The answer is 3 + 4 = 7.": "3 + 4 = 7",
        "The answer is 3 * 4 = 12, because we add them all up.": "12",
        "The answers are 3 or 4 of the ones above.": "3, 4",
        "The answer is 3 for the first of the 4 questions.": "3", "The answer is either 3 or 4.": "3, 4",
        "The answer is $3$ or $4$.": "3, 4", "The answer is $3$ percent.": "3 percent",
        "The answer is $red apples$.": "red apples", "The answer is $3$. It is not $4$.": "3",
        "The answer is: the number of apples is 12. So 13 is wrong.": "12",
        "The answer is blue whale.": "blue whale", "The answer is 7; Bob was right.": "7",
        "the answer is\n\n": "the answer is", "The answer is 5. The answer is not 6.": "5",
        "Answer: 1. Answer: 2. Answer: not 3. Answer: not 4. Answer: not 5. Answer: not 6.": "2",
        "La respuesta es 5.": "5", "答案是 5。": "5", "Final answer is not known.\nThe answer is 5.": "5",
        r"The final answer is $5$, so \boxed{6}": "6", r"\boxed{6}. The final answer is 5": "5",
        r"\boxed{6}. The final answer is six": "6", "#### 5\n#### 6": "6",
        "the sum is 7\n#### a heading with several words": "7", "## 5 is the result\nwe get 6": "6",
        # Without the remark behind it and the steps before it; a condition and a modulus belong to it.
        "The answer is 42 because 6*7=42.": "42", "The answer is 42, as 6*7=42.": "42",
        "The answer is 81 (nine squared).": "81", "The answer is 12 (i.e. 5+7).": "12",
        "The answer is (B), not (C).": "(B)", "42, not 43": "42", "#### 42, not 43": "42",
        "2x = 18 so x = 9": "x = 9", "The answer is 12 so far.": "12 so far",
        "The answer is 2^n where n > 1.": "2^n where n > 1", "The answer is x = 3 (mod 7).": "x = 3 (mod 7)",
        "The answer is 2^n (x + 1).": "2^n (x + 1)", "The answer is x^2 (cos x + 1).": "x^2 (cos x + 1)",
        "#### 2 (log 3)": "2 (log 3)", "The answer is 2 (sin x).": "2 (sin x)", "The answer is 2 (abc).": "2 (abc)",
        "The answer is 12 (hours).": "12 (hours)", "The answer is 12 (million dollars).": "12 (million dollars)",
        "The answer is 12 (metres squared).": "12 (metres squared)", "The answer is 5 (modulo 7).": "5 (modulo 7)",
        "The answer is 12 (unless n = 0).": "12 (unless n = 0)", "#### 12 (that is 5+7)": "12",
        "The answer is 12 so that 3.": "12 so that 3",
        "The answer is cos(theta).": "cos(theta)", "We add them all up: there are 12 (i.e. 5+7).": "12",
        # The last line, when nothing is called the answer.
        "We count the apples and there are 12 km left.": "12 km",
        "We count the apples and there are 12 of them, not 13.": "12",
        "We count the apples: it cannot be 12 and so there are 13, never 14.": "13",
        "We take it: the correct option is B": "B",
        "We count them. There are 12, which is 3 more than 9.": "9",
        "We count them. There are 12, because it is 3 more than 9.": "12",
        "Because of the 3 sides we get the sum $x = 4$ and then 5.": "5",
        "Because of the 3 sides we get 5 and then $x = 4$": "x = 4",
        "We sum it all up and find (1, 2) here": "(1, 2)",
        r"We sum it all up and find \frac{1}{2} here": r"\frac{1}{2}", r"We sum it all up and find 3√2 here": "3√2",
        r"We sum it all up and find -3\sqrt{2} here": r"-3\sqrt{2}",
        "The area of it all is 3π.": "3π", "We see that all in all it is 3 pi there": "3 pi",
        "We see that there are 12 pies in all": "12", r"We see that it is -\pi/3 all in all": r"-\pi/3",
        "Some words without anything like one here": "Some words without anything like one here",
        "word " * 40 + "w": None, ("word " * 40)[:-1] + "w": ("word " * 40)[:-1] + "w", "$x$ wins": "x",
    }  # fmt: skip
    assert {response: text_of(response) for response in answers} == answers


def test_a_bare_answer_is_taken_whole_with_plain_for_full_width_characters() -> None:
    for answer in ("42", "x^2+2x+1", "1,000.5", "-\\frac{1}{2}", "28 percent", "Evelyn", "$[0,1)$"):
        assert text_of(answer) == answer
    assert text_of("答案：１２") == "12"
    assert text_of("\\boxed{１\u00a0２}") == "1 2"
    assert text_of("！＂～ｚ") == '!"~z'
    assert text_of("\\boxed{｟１｠}") == "｟1｠", "these brackets have no plain form"


def test_only_the_tail_of_a_response_is_read_and_not_what_was_thought() -> None:
    assert text_of(r"<think>maybe \boxed{1}</think> It is \boxed{2}.") == "2"
    assert text_of(r"maybe \boxed{1}</think> It is 2.") == "2"
    assert text_of(r"\boxed{1}" + " blah" * extract.TAIL_CHARS + r" \boxed{2}") == "2"
    for opening in ("Final answer is ", "The answer is "):
        assert text_of(opening + "word " * 1_000) == ("word " * 800).strip()
    long_line = "word " * (extract.TAIL_CHARS // 2)
    answer = text_of(long_line)
    assert answer is None or len(answer) <= extract.MAX_ANSWER_CHARS


def test_two_boxes_are_joined_by_a_conjunction_or_a_comma() -> None:
    joined = {
        ", ": True, " and ": True, " or ": True, r" \text{ or } ": True, r"\quad\text{and}\quad ": True,
        ", y = ": True, "\n": True, "\n\n": False, ". ": False, "! ": False, ", no, ": False,
        " is wrong, so ": False, ", which gives ": False, ", " + " " * 58: True, ", " + " " * 59: False,
    }  # fmt: skip
    answers = {between: text_of(rf"\boxed{{1}}{between}\boxed{{2}}") for between in joined}
    assert answers == {between: "1, 2" if one_list else "2" for between, one_list in joined.items()}


def test_boxes_are_found_with_their_places() -> None:
    repeated = {" ": "5", " = ": "5", "$\n$": "5", ", ": "5, 5", " and ": "5, 5"}
    assert {between: text_of(rf"\boxed{{5}}{between}\boxed{{5}}") for between in repeated} == repeated
    assert text_of(r"\boxed{4}, \boxed{5} \boxed{5}") == "4, 5"
    text = r"a \boxed{1{2}} b \fbox {3} c \boxed 4. d \boxed{5"
    assert [(text[box.start : box.end], box.content) for box in extract.find_boxes(text)] == [
        (r"\boxed{1{2}}", "1{2}"),
        (r"\fbox {3}", "3"),
        (r"\boxed 4", "4"),
    ]
    assert extract.find_boxes("no such thing") == []
    assert extract.matching_braces(r"a{b\{{c}}}") == {5: 7, 1: 8}
    nested = "".join(r"\boxed{" for _ in range(3)) + "6" + "}" * 3
    assert [box.content for box in extract.find_boxes(nested + r"\boxed{7}")] == [r"\boxed{\boxed{6}}", "7"]


def test_all_different_boxes_make_one_list() -> None:
    assert extract.every_box(r"\boxed{1}</think>\boxed{2}, \boxed{3}") == "2, 3"
    assert extract.every_box(r"\boxed{1}\boxed{2}</think> ") == "1, 2"
    assert extract.every_box(r"First \boxed{1}. Then \boxed{2}. Again \boxed{1}.") == "1, 2"
    assert extract.every_box(r"\boxed{ 1 } is \boxed{1}") is None
    assert extract.every_box(r"\boxed{1}") is None
    assert extract.every_box("1") is None


# One spelling of LaTeX: each variation by its own function.


GREEK_LETTERS = "alpha beta gamma delta theta lambda mu rho sigma tau phi omega".split()


def test_each_variation_has_one_spelling() -> None:
    spellings = {
        (l.math_delimiters, r"\$5"): r"\$5", (l.math_delimiters, "$5"): r"\$5", (l.emphasis, "**B**"): "B",
        (l.emphasis, r"\text{A, B}"): "A, B", (l.emphasis, "x**2 + y**2"): "x**2 + y**2",
        (l.double_backslashes, r"\\frac{1}{2}"): r"\frac{1}{2}",
        (l.double_backslashes, r"\\begin{matrix}1\\end{matrix}"): r"\begin{matrix}1\end{matrix}",
        (l.double_backslashes, r"\begin{matrix}1\\a\end{matrix}"): r"\begin{matrix}1\\a\end{matrix}",
        (l.command_names, r"\dfrac{1}{2} \leq \tfrac12"): r"\frac{1}{2} \le \frac12",
        (l.command_names, r"x \lt 3"): "x < 3", (l.presentation, r"\left(1\right)\bigl[2\bigr]"): "(1)[2]",
        (l.presentation, r"\leftarrow"): r"\leftarrow", (l.presentation, r"\color{red}{5}"): "{5}",
        (l.presentation, r"x = \boxed{5}"): "x = {5}", (l.spacing, r"32,\!349"): "32349",
        (l.spacing, r"14{,}916"): "14916", (l.spacing, r"a\,b\quad c~d"): "a b c d", (l.spacing, r"1 \\ 2"): r"1 \\ 2",
        (l.plain_operators, "x**2 >= 3"): r"x^2 \ge  3", (l.plain_operators, r"f^{\prime}(x)"): "f'(x)",
        (l.plain_functions, "sqrt(3)"): r"\sqrt (3)", (l.plain_functions, "np.arcsin(x)"): r"\arcsin (x)",
        (l.plain_functions, "2pi"): r"2\pi ", (l.plain_functions, "5 min"): "5 min",
        (l.plain_functions, "min(a, b)"): r"\min (a, b)", (l.repeating_decimals, r"0.\overline{3}"): r"\frac{3}{9}",
        (l.repeating_decimals, r"0.1\overline{6}"): r"\frac{15}{90}", (l.repeating_decimals, "0.(3)"): r"\frac{3}{9}",
        (l.repeating_decimals, r"0.1666\ldots"): r"\frac{15}{90}",
        (l.repeating_decimals, r"1.4142\ldots"): r"1.4142\ldots", (l.separators, "1,234"): "1,234",
        (l.separators, "1.234"): "1.234", (l.mixed_numbers, "3 1/2"): r"3\frac{1}{2}",
        (l.degrees, r"90^{\circ}"): r"90^\circ ", (l.degrees, "90 degrees"): r"90^\circ ",
        (l.percent_sign, "28 percent"): "28%", (l.percent_sign, r"28\%"): "28%",
        (l.percent_sign, r"28 \text{ percent }"): "28%", (l.currency, r"\$36"): r"36\text{ dollars}",
        (l.currency, "€36"): "36", (l.conjunctions, r"2 \text{ and } 3"): "2, 3",
        (l.conjunctions, "19, 46, and 82"): "19, 46, 82", (l.upright, r"5 \mathrm{ cm}^2"): r"5 \text{ cm}^2",
        (l.upright, r"\mathbf{2340}"): " 2340 ", (l.upright, r"e^{\mathrm{i}\pi}"): r"e^{ i \pi}",
        (l.upright, r"\operatorname{cis} x"): r"\cis  x", (l.upright, r"\operatorname{arsinh} x"): r"\arsinh  x",
        (l.upright, r"7 \mu\mathrm{m}"): r"7 \text{μm}", (l.choose, r"{10 \choose 3}"): r"\binom{10 }{ 3}",
        (l.end_punctuation, " = 5."): "5",
        (l.unicode_to_latex, "αβγδθλμρστφω"): "".join(rf"\{name} " for name in GREEK_LETTERS),
        (l.unicode_to_latex, "½⅔⅞"): r"\frac{1}{2}\frac{2}{3}\frac{7}{8}",
        (l.unicode_to_latex, "１＋ｘ（～）"): "1+x(~)",
        (l.unicode_to_latex, "x ≤ 3·π"): r"x \le  3\cdot \pi ", (l.math_delimiters, "$5$ or $6$"): " 5  or  6 ",
        (l.math_delimiters, r"\[5\]"): " 5 ", (l.plain_operators, "+-3"): r"\pm 3",
        (l.plain_operators, "x +- 3"): "x +- 3", (l.plain_operators, r"\mathbb R"): r"\mathbb{R}",
        (l.plain_operators, r"f^{\prime\prime}"): "f''",
        (l.plain_operators, "x != y == z <= 2"): r"x \ne  y = z \le  2", (l.plain_functions, "abs(x)"): r"\abs (x)",
        (l.plain_functions, "abs x"): "abs x", (l.plain_functions, "sec(x)"): r"\sec (x)",
        (l.plain_functions, "5 sec"): "5 sec", (l.plain_functions, "max^2"): r"\max ^2",
        (l.plain_functions, "inf"): r"\infty ", (l.plain_functions, r"\sin x"): r"\sin x",
        (l.repeating_decimals, "12.3(45)"): r"\frac{12222}{990}",
        (l.repeating_decimals, r".\overline{12}"): r"\frac{12}{99}",
        (l.repeating_decimals, "0.1212..."): r"\frac{12}{99}", (l.separators, "1 234 567"): "1234567",
        (l.separators, "12 34"): "12 34", (l.magnitudes, r"2 \text{ billion}"): r"2 \times 10^{9}",
        (l.magnitudes, "2 trillions"): r"2 \times 10^{12}", (l.currency, r"5\$"): r"5\text{ dollars}",
        (l.currency, r"-\$5.50"): r"-5.50\text{ dollars}", (l.currency, "5¢"): r"5\text{ cents}",
        (l.currency, "5 EUR"): "5", (l.upright, r"\text{min}(a, b)"): r"\min (a, b)",
        (l.upright, r"5 \text{min}"): r"5 \text{min}", (l.upright, r"5 \text{ sec}"): r"5 \text{ sec}",
        (l.upright, r"5 \text{sin} x"): r"5 \sin  x", (l.upright, r"\text{A, B}"): "A, B",
        (l.upright, r"\text{A and B}"): "A, B", (l.upright, r"\text{5 apples}"): r" 5 \text{apples}",
        (l.upright, r"\text{(B)}"): " (B) ", (l.upright, r"\text{A1}_{16}"): "A1_{16}",
        (l.upright, r"\text{A1}"): r"\text{A1}", (l.upright, r"\text{AB}z"): r"\text{AB}z",
        (l.upright, r"5 \mathrm{m}"): r"5 \text{m}", (l.upright, r"5 \mathbf{m}"): "5  m ",
        (l.upright, r"2 \mathrm{e}"): "2  e ", (l.upright, r"5 \text{e}"): r"5 \text{e}",
        (l.upright, r"\text{Tiger}"): r"\text{Tiger}", (l.upright, r"\text{length: }5"): r"\text{length}=5",
        (l.emphasis, "5**"): "5", (l.end_punctuation, "5,;:"): "5", (l.end_punctuation, '"5"'): "5",
        (l.end_punctuation, r"5\\"): "5", (l.end_punctuation, "5\\"): "5", (l.end_punctuation, r"\approx 5"): "5",
        (l.end_punctuation, r"\text{about} 5"): "5", (l.end_punctuation, r"\approxeq 5"): r"\approxeq 5",
    }  # fmt: skip
    assert {(step, before): step(before) for step, before in spellings} == spellings


def test_what_an_answer_says_is_kept() -> None:
    texts = [r"2^{n}-1", r"\frac{35}{2}\pi", r"\sqrt{2}x", r"e^{-2t}", r"25%", r"5 \text{ cm}"]
    assert [clean(text) for text in texts] == texts


def test_texts_are_the_same_only_token_by_token() -> None:
    assert same_tokens(r"2 ^{n} - 1", "2^{n}-1")
    assert not same_tokens(r"2^{n-1}", "2^{n}-1")
    assert not same_tokens("1 2", "12")
    assert not same_tokens("+" * (MAX_TOKENS + 1), "+ " * (MAX_TOKENS + 1))
    assert not same_tokens(r"\frac12", r"\frac{1}{2}")
