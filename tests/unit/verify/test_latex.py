"""One spelling of LaTeX: each variation by its own function."""

from __future__ import annotations

import pytest

from gxpo_trainer.verify import latex as l
from gxpo_trainer.verify.latex import clean


@pytest.mark.parametrize(
    ("step", "before", "after"),
    [
        (l.unicode_to_latex, "½", r"\frac{1}{2}"),
        (l.unicode_to_latex, "x²", "x^{2}"),
        (l.unicode_to_latex, "3√2", r"3\sqrt{2}"),
        (l.unicode_to_latex, "∛(x+1)", r"\sqrt[3]{x+1}"),
        (l.unicode_to_latex, "≤", r"\le "),
        (l.unicode_to_latex, "（１２，３）", "(12,3)"),
        (l.math_delimiters, r"$5$", " 5 "),
        (l.math_delimiters, r"\(5\)", " 5 "),
        (l.math_delimiters, r"\$5", r"\$5"),
        (l.math_delimiters, "$5", r"\$5"),
        (l.emphasis, "**B**", "B"),
        (l.emphasis, r"\text{A, B}", "A, B"),
        (l.emphasis, "64 + 67 = **131**", "64 + 67 = 131"),
        (l.emphasis, "x**2 + y**2", "x**2 + y**2"),
        (l.double_backslashes, r"\\frac{1}{2}", r"\frac{1}{2}"),
        (l.double_backslashes, r"\begin{matrix}1\\a\end{matrix}", r"\begin{matrix}1\\a\end{matrix}"),
        (l.command_names, r"\dfrac{1}{2} \leq \tfrac12", r"\frac{1}{2} \le \frac12"),
        (l.command_names, r"x \lt 3", "x < 3"),
        (l.presentation, r"\left(1\right)\bigl[2\bigr]", "(1)[2]"),
        (l.presentation, r"\leftarrow", r"\leftarrow"),
        (l.presentation, r"\color{red}{5}", "{5}"),
        (l.presentation, r"x = \boxed{5}", "x = {5}"),
        (l.spacing, r"32,\!349", "32349"),
        (l.spacing, r"14{,}916", "14916"),
        (l.spacing, r"a\,b\quad c~d", "a b c d"),
        (l.spacing, r"1 \\ 2", r"1 \\ 2"),
        (l.plain_operators, "x**2 >= 3", r"x^2 \ge  3"),
        (l.plain_operators, r"f^{\prime}(x)", "f'(x)"),
        (l.plain_functions, "sqrt(3)", r"\sqrt (3)"),
        (l.plain_functions, "np.arcsin(x)", r"\arcsin (x)"),
        (l.plain_functions, "2pi", r"2\pi "),
        (l.plain_functions, "5 min", "5 min"),
        (l.plain_functions, "min(a, b)", r"\min (a, b)"),
        (l.repeating_decimals, r"0.\overline{3}", r"\frac{3}{9}"),
        (l.repeating_decimals, r"0.1\overline{6}", r"\frac{15}{90}"),
        (l.repeating_decimals, "0.(3)", r"\frac{3}{9}"),
        (l.repeating_decimals, r"0.\dot3", r"\frac{3}{9}"),
        (l.repeating_decimals, r"0.1666\ldots", r"\frac{15}{90}"),
        (l.repeating_decimals, r"1.4142\ldots", r"1.4142\ldots"),
        (l.separators, "1.234.567", "1234567"),
        (l.separators, "1.234,56", "1234.56"),
        (l.separators, "1 234,5", "1234.5"),
        (l.separators, "1'234.5", "1234.5"),
        (l.separators, "1,234.5", "1234.5"),
        (l.separators, "12,34,567", "1234567"),
        (l.separators, "1,234", "1,234"),
        (l.separators, "1.234", "1.234"),
        (l.mixed_numbers, "3 1/2", r"3\frac{1}{2}"),
        (l.degrees, r"90^{\circ}", r"90^\circ "),
        (l.degrees, "90 degrees", r"90^\circ "),
        (l.percent_sign, "28 percent", "28%"),
        (l.percent_sign, r"28\%", "28%"),
        (l.currency, r"\$36", r"36\text{ dollars}"),
        (l.currency, "€36", "36"),
        (l.conjunctions, r"2 \text{ and } 3", "2, 3"),
        (l.conjunctions, "19, 46, and 82", "19, 46, 82"),
        (l.upright, r"5 \mathrm{ cm}^2", r"5 \text{ cm}^2"),
        (l.upright, r"\mathbf{2340}", " 2340 "),
        (l.upright, r"e^{\mathrm{i}\pi}", r"e^{ i \pi}"),
        (l.upright, r"\operatorname{cis} x", r"\cis  x"),
        (l.upright, r"\operatorname{arsinh} x", r"\arsinh  x"),
        (l.upright, r"\mathbf{i}-2\hat{\jmath}", r"\vec{i}-2\vec{j}"),
        (l.upright, r"7 \mu\mathrm{m}", r"7 \text{μm}"),
        (l.choose, r"{10 \choose 3}", r"\binom{10 }{ 3}"),
        (l.choose, "C(5, 2)", r"\binom{5}{2}"),
        (l.magnitudes, "3.5 million", r"3.5 \times 10^{6}"),
        (l.end_punctuation, " = 5.", "5"),
    ],
)
def test_each_variation_has_one_spelling(step: object, before: str, after: str) -> None:
    assert callable(step)
    assert step(before) == after


@pytest.mark.parametrize("text", [r"2^{n}-1", r"\frac{35}{2}\pi", r"\sqrt{2}x", r"e^{-2t}", r"25%", r"5 \text{ cm}"])
def test_what_an_answer_says_is_kept(text: str) -> None:
    assert clean(text) == text
