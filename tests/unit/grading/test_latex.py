"""One spelling of LaTeX: each variation by its own function."""

from __future__ import annotations

import pytest

from gxpo_trainer.grading import latex as l
from gxpo_trainer.grading.latex import MAX_TOKENS, clean, same_tokens

GREEK_LETTERS = "alpha beta gamma delta theta lambda mu rho sigma tau phi omega".split()


@pytest.mark.parametrize(
    ("step", "before", "after"),
    [
        (l.unicode_to_latex, "½", r"\frac{1}{2}"), (l.unicode_to_latex, "x²", "x^{2}"),
        (l.unicode_to_latex, "3√2", r"3\sqrt{2}"), (l.unicode_to_latex, "∛(x+1)", r"\sqrt[3]{x+1}"),
        (l.unicode_to_latex, "≤", r"\le "), (l.unicode_to_latex, "（１２，３）", "(12,3)"),
        (l.math_delimiters, r"$5$", " 5 "), (l.math_delimiters, r"\(5\)", " 5 "), (l.math_delimiters, r"\$5", r"\$5"),
        (l.math_delimiters, "$5", r"\$5"), (l.emphasis, "**B**", "B"), (l.emphasis, r"\text{A, B}", "A, B"),
        (l.emphasis, "64 + 67 = **131**", "64 + 67 = 131"), (l.emphasis, "x**2 + y**2", "x**2 + y**2"),
        (l.double_backslashes, r"\\frac{1}{2}", r"\frac{1}{2}"),
        (l.double_backslashes, r"\\begin{matrix}1\\end{matrix}", r"\begin{matrix}1\end{matrix}"),
        (l.double_backslashes, r"\begin{matrix}1\\a\end{matrix}", r"\begin{matrix}1\\a\end{matrix}"),
        (l.command_names, r"\dfrac{1}{2} \leq \tfrac12", r"\frac{1}{2} \le \frac12"),
        (l.command_names, r"x \lt 3", "x < 3"), (l.presentation, r"\left(1\right)\bigl[2\bigr]", "(1)[2]"),
        (l.presentation, r"\leftarrow", r"\leftarrow"), (l.presentation, r"\color{red}{5}", "{5}"),
        (l.presentation, r"x = \boxed{5}", "x = {5}"), (l.spacing, r"32,\!349", "32349"),
        (l.spacing, r"14{,}916", "14916"), (l.spacing, r"a\,b\quad c~d", "a b c d"), (l.spacing, r"1 \\ 2", r"1 \\ 2"),
        (l.plain_operators, "x**2 >= 3", r"x^2 \ge  3"), (l.plain_operators, r"f^{\prime}(x)", "f'(x)"),
        (l.plain_functions, "sqrt(3)", r"\sqrt (3)"), (l.plain_functions, "np.arcsin(x)", r"\arcsin (x)"),
        (l.plain_functions, "2pi", r"2\pi "), (l.plain_functions, "5 min", "5 min"),
        (l.plain_functions, "min(a, b)", r"\min (a, b)"), (l.repeating_decimals, r"0.\overline{3}", r"\frac{3}{9}"),
        (l.repeating_decimals, r"0.1\overline{6}", r"\frac{15}{90}"), (l.repeating_decimals, "0.(3)", r"\frac{3}{9}"),
        (l.repeating_decimals, r"0.\dot3", r"\frac{3}{9}"), (l.repeating_decimals, r"0.1666\ldots", r"\frac{15}{90}"),
        (l.repeating_decimals, r"1.4142\ldots", r"1.4142\ldots"), (l.separators, "1.234.567", "1234567"),
        (l.separators, "1.234,56", "1234.56"), (l.separators, "1 234,5", "1234.5"), (l.separators, "1'234.5", "1234.5"),
        (l.separators, "1,234.5", "1234.5"), (l.separators, "12,34,567", "1234567"), (l.separators, "1,234", "1,234"),
        (l.separators, "1.234", "1.234"), (l.mixed_numbers, "3 1/2", r"3\frac{1}{2}"),
        (l.degrees, r"90^{\circ}", r"90^\circ "), (l.degrees, "90 degrees", r"90^\circ "),
        (l.percent_sign, "28 percent", "28%"), (l.percent_sign, r"28\%", "28%"),
        (l.percent_sign, r"28 \text{ percent }", "28%"), (l.currency, r"\$36", r"36\text{ dollars}"),
        (l.currency, "€36", "36"), (l.conjunctions, r"2 \text{ and } 3", "2, 3"),
        (l.conjunctions, "19, 46, and 82", "19, 46, 82"), (l.upright, r"5 \mathrm{ cm}^2", r"5 \text{ cm}^2"),
        (l.upright, r"\mathbf{2340}", " 2340 "), (l.upright, r"e^{\mathrm{i}\pi}", r"e^{ i \pi}"),
        (l.upright, r"\operatorname{cis} x", r"\cis  x"), (l.upright, r"\operatorname{arsinh} x", r"\arsinh  x"),
        (l.upright, r"\mathbf{i}-2\hat{\jmath}", r"\vec{i}-2\vec{j}"), (l.upright, r"7 \mu\mathrm{m}", r"7 \text{μm}"),
        (l.choose, r"{10 \choose 3}", r"\binom{10 }{ 3}"), (l.choose, "C(5, 2)", r"\binom{5}{2}"),
        (l.magnitudes, "3.5 million", r"3.5 \times 10^{6}"), (l.end_punctuation, " = 5.", "5"),
        (l.unicode_to_latex, "αβγδθλμρστφω", "".join(rf"\{name} " for name in GREEK_LETTERS)),
        (l.unicode_to_latex, "½⅔⅞", r"\frac{1}{2}\frac{2}{3}\frac{7}{8}"),
        (l.unicode_to_latex, "x⁻¹²y₁₀", "x^{-12}y_{10}"),
        (l.unicode_to_latex, "√3x√(a+b)√{c}∛8", r"\sqrt{3}x\sqrt{a+b}\sqrt{c}\sqrt[3]{8}"),
        (l.unicode_to_latex, "１＋ｘ（～）", "1+x(~)"), (l.unicode_to_latex, "x ≤ 3·π", r"x \le  3\cdot \pi "),
        (l.math_delimiters, "$5$ or $6$", " 5  or  6 "), (l.math_delimiters, r"\[5\]", " 5 "),
        (l.plain_operators, "+-3", r"\pm 3"), (l.plain_operators, "x +- 3", "x +- 3"),
        (l.plain_operators, r"\mathbb R", r"\mathbb{R}"), (l.plain_operators, r"f^{\prime\prime}", "f''"),
        (l.plain_operators, "x != y == z <= 2", r"x \ne  y = z \le  2"), (l.plain_functions, "abs(x)", r"\abs (x)"),
        (l.plain_functions, "abs x", "abs x"), (l.plain_functions, "sec(x)", r"\sec (x)"),
        (l.plain_functions, "5 sec", "5 sec"), (l.plain_functions, "max^2", r"\max ^2"),
        (l.plain_functions, "inf", r"\infty "), (l.plain_functions, "sine", "sine"),
        (l.plain_functions, r"\sin x", r"\sin x"), (l.repeating_decimals, "12.3(45)", r"\frac{12222}{990}"),
        (l.repeating_decimals, r"0.1\dot{2}3\dot{4}", r"\frac{1233}{9990}"),
        (l.repeating_decimals, r".\overline{12}", r"\frac{12}{99}"),
        (l.repeating_decimals, "0.1212...", r"\frac{12}{99}"), (l.separators, "1,234,567.5", "1234567.5"),
        (l.separators, "1 234 567", "1234567"), (l.separators, "12 34", "12 34"),
        (l.separators, "1.234.56", "1.234.56"), (l.choose, "{}_5C_2", r"\binom{5}{2}"),
        (l.choose, "^{5}C_{2}", r"\binom{5}{2}"), (l.choose, "_5P_2", r"\frac{5!}{(5-2)!}"),
        (l.magnitudes, "2 thousand", r"2 \times 10^{3}"), (l.magnitudes, r"2 \text{ billion}", r"2 \times 10^{9}"),
        (l.magnitudes, "2 trillions", r"2 \times 10^{12}"), (l.currency, r"5\$", r"5\text{ dollars}"),
        (l.currency, r"-\$5.50", r"-5.50\text{ dollars}"), (l.currency, "5¢", r"5\text{ cents}"),
        (l.currency, "5 EUR", "5"), (l.upright, r"\text{min}(a, b)", r"\min (a, b)"),
        (l.upright, r"5 \text{min}", r"5 \text{min}"), (l.upright, r"5 \text{ sec}", r"5 \text{ sec}"),
        (l.upright, r"5 \text{sin} x", r"5 \sin  x"), (l.upright, r"\text{A, B}", "A, B"),
        (l.upright, r"\text{A and B}", "A, B"), (l.upright, r"\text{5 apples}", r" 5 \text{apples}"),
        (l.upright, r"\text{(B)}", " (B) "), (l.upright, r"\text{A1}_{16}", "A1_{16}"),
        (l.upright, r"\text{A1}", r"\text{A1}"), (l.upright, r"\text{AB}z", r"\text{AB}z"),
        (l.upright, r"\mathrm{x}", " x "), (l.upright, r"5 \mathrm{m}", r"5 \text{m}"),
        (l.upright, r"5 \mathbf{m}", "5  m "), (l.upright, r"2 \mathrm{e}", "2  e "),
        (l.upright, r"5 \text{e}", r"5 \text{e}"), (l.upright, r"\text{Tiger}", r"\text{Tiger}"),
        (l.upright, r"5 \frac{\text{km}}{\text{h}}", r"5 \text{km}/\text{h}"),
        (l.upright, r"\text{length: }5", r"\text{length}=5"), (l.emphasis, "__x__", "x"),
        (l.emphasis, "**5** apples", "5 apples"), (l.emphasis, "5**", "5"), (l.end_punctuation, "5,;:", "5"),
        (l.end_punctuation, '"5"', "5"), (l.end_punctuation, r"5\\", "5"), (l.end_punctuation, "5\\", "5"),
        (l.end_punctuation, r"\approx 5", "5"), (l.end_punctuation, r"\text{about} 5", "5"),
        (l.end_punctuation, r"\approxeq 5", r"\approxeq 5"),
    ],
)  # fmt: skip
def test_each_variation_has_one_spelling(step: object, before: str, after: str) -> None:
    assert callable(step)
    assert step(before) == after


@pytest.mark.parametrize("text", [r"2^{n}-1", r"\frac{35}{2}\pi", r"\sqrt{2}x", r"e^{-2t}", r"25%", r"5 \text{ cm}"])
def test_what_an_answer_says_is_kept(text: str) -> None:
    assert clean(text) == text


def test_texts_are_the_same_only_token_by_token() -> None:
    assert same_tokens(r"2 ^{n} - 1", "2^{n}-1")
    assert not same_tokens(r"2^{n-1}", "2^{n}-1")
    assert not same_tokens("1 2", "12")
    assert not same_tokens("+" * (MAX_TOKENS + 1), "+ " * (MAX_TOKENS + 1))
    assert not same_tokens(r"\frac12", r"\frac{1}{2}")
