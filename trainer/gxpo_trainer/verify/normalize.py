"""Spelling of answers: every quirk of how people and models write mathematics is one small function, str -> str.

`normalize` applies them in order. None of them changes what an answer says; what a *value* may be read as
(percent, degrees, thousands or a list) is decided later, in `scalar.py` and `compare.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from gxpo_trainer.verify.units import POWER_OF_TEN

_UNICODE = {
    "−": "-", "–": "-", "—": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "∕": "/", "⁄": "/",
    "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "⩽": r"\le ", "≥": r"\ge ", "⩾": r"\ge ", "≠": r"\ne ",
    "≈": r"\approx ", "±": r"\pm ", "∓": r"\mp ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ",
    "°": r"^\circ ", "º": r"^\circ ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}",
    "⟨": r"\langle ", "⟩": r"\rangle ", "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ",
    "′": "'", "’": "'", "“": '"', "”": '"', "\u00a0": " ", "\u2009": " ", "\u202f": " ", "，": ",", "：": ":",
    "（": "(", "）": ")", "％": "%", "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "δ": r"\delta ",
    "θ": r"\theta ", "λ": r"\lambda ", "μ": r"\mu ", "ρ": r"\rho ", "σ": r"\sigma ", "τ": r"\tau ",
    "φ": r"\phi ", "ω": r"\omega ", "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}",
    "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "⅕": r"\frac{1}{5}", "⅖": r"\frac{2}{5}", "⅗": r"\frac{3}{5}",
    "⅘": r"\frac{4}{5}", "⅙": r"\frac{1}{6}", "⅚": r"\frac{5}{6}", "⅛": r"\frac{1}{8}", "⅜": r"\frac{3}{8}",
    "⅝": r"\frac{5}{8}", "⅞": r"\frac{7}{8}",
}  # fmt: skip
_UNICODE_TABLE = str.maketrans(_UNICODE)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_RENAMED = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "leq": "le", "leqslant": "le", "leqq": "le", "geq": "ge",
    "geqslant": "ge", "geqq": "ge", "neq": "ne", "lbrace": "{", "rbrace": "}", "infin": "infty",
    "varnothing": "emptyset", "vert": "|", "mid": "|", "lVert": "|", "rVert": "|", "lvert": "|", "rvert": "|",
    "degree": "circ", "dbinom": "binom", "tbinom": "binom", "colon": ":", "backslash": "setminus",
    "simeq": "approx", "thickapprox": "approx", "tg": "tan", "ctg": "cot", "arctg": "arctan",
    "operatorname": "mathrm", "land": "text{ and }", "wedge": "text{ and }", "lor": "text{ or }", "vee": "text{ or }",
    "lt": "<", "gt": ">", "dots": "ldots", "cdots": "ldots", "dotsc": "ldots", "implies": "Rightarrow",
}  # fmt: skip
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_TEXT = re.compile(
    r"\\(?:text|mbox|textbf|textit|textrm|textnormal|texttt|textsf|hbox|mathrm|mathbf|mathit|mathsf|rm|bf)\s*\{([^{}]*)\}"
)
_FUNCTION_WORDS = re.findall(
    r"[A-Za-z]+",
    "arcsin arccos arctan sin cos tan cot sec csc sinh cosh tanh ln log exp sqrt pi infty",
)


def unicode_to_latex(s: str) -> str:
    """Unicode signs, vulgar fractions, superscripts and roots as LaTeX: ½, x², √3, ≤, ∪."""
    if s.isascii():
        return s
    s = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+", lambda m: "^{" + m.group().translate(_SUPERSCRIPTS) + "}", s)
    s = re.sub("[₀₁₂₃₄₅₆₇₈₉]+", lambda m: "_{" + m.group().translate(_SUBSCRIPTS) + "}", s)
    s = re.sub(r"([√∛])\s*(\([^()]*\)|\{[^{}]*\}|[0-9.]+|[A-Za-zπ])", _unicode_root, s)
    return s.translate(_UNICODE_TABLE)


def _unicode_root(match: re.Match[str]) -> str:
    index = "[3]" if match[1] == "∛" else ""
    radicand = match[2][1:-1] if match[2][0] in "({" else match[2]
    return f"\\sqrt{index}{{{radicand}}}"


def math_delimiters(s: str) -> str:
    r"""Drop $...$, \(...\) and \[...\]; `\$` stays for `currency`."""
    return re.sub(r"(?<!\\)(?:\$|\\[()\[\]])", " ", s)


def emphasis(s: str) -> str:
    """**bold** of a whole answer."""
    return re.sub(r"^\s*(\*{1,2}|__)(.+?)\1[\s.]*$", r"\2", s, flags=re.DOTALL)


def double_backslashes(s: str) -> str:
    r"""`\\frac` written with an escaped backslash; in a matrix `\\` ends a row and stays."""
    if "\\\\begin{" in s:
        return s.replace("\\\\", "\\")
    return s if "\\begin" in s else re.sub(r"\\\\(?=[A-Za-z{}%$,;!])", r"\\", s)


def command_names(s: str) -> str:
    r"""One name for synonyms: \dfrac, \tfrac -> \frac; \leq -> \le; \neq -> \ne; \lt -> <; \operatorname -> \mathrm."""

    def rename(match: re.Match[str]) -> str:
        name = _RENAMED.get(match[1])
        if name is None:
            return match.group()
        return name if name in ("|", ":", "<", ">") else "\\" + name

    return _COMMAND.sub(rename, s) if "\\" in s else s


def sizing(s: str) -> str:
    r"""Drop \left, \right, \big..., \displaystyle and other commands that only change the look."""
    if "\\" not in s:
        return s
    s = re.sub(r"\\[hv]?phantom\s*(?:\{[^{}]*\}|[^\s{])", "", s)
    s = re.sub(r"\\(?:left|right|middle|[bB]ig{1,2}[lrm]?)(?![A-Za-z])\s*\.?", "", s)
    return re.sub(
        r"\\(?:displaystyle|textstyle|limits|nolimits|hfill|nonumber|mathstrut|strut|boldsymbol)(?![A-Za-z])", "", s
    )


def spacing(s: str) -> str:
    r"""Drop \! and turn \, \; \: \quad ~ and escaped blanks into one blank; `{,}` becomes a comma."""
    s = re.sub(r"(?<!\\)\\!", "", s).replace("{,}", ",")
    s = re.sub(r"(?<!\\)\\[,;: ]|\\q?quad(?![A-Za-z])|~|\\(?:h|v)space\*?\{[^{}]*\}|\\hskip", " ", s)
    return re.sub(r"\s+", " ", s)


def plain_operators(s: str) -> str:
    """Programmers' signs: **, <=, >=, !=, ==, ·."""
    return s.replace("**", "^").replace("<=", "\\le ").replace(">=", "\\ge ").replace("!=", "\\ne ").replace("==", "=")


def plain_functions(s: str) -> str:
    """sqrt(3), sqrt3, sin(x), pi, inf without backslash, also with a module prefix as in np.sqrt."""
    if not re.search("sqrt|sin|cos|tan|log|ln|exp|pi|inf|cot|sec|csc", s):
        return s
    s = re.sub(r"\b(?:np|math|sympy)\.", "", s)
    s = re.sub(r"(?<![A-Za-z\\])[+]?(?:infinity|infty|inf)(?![A-Za-z])", r"\\infty ", s, flags=re.IGNORECASE)
    s = re.sub(r"(?<![A-Za-z\\])(" + "|".join(_FUNCTION_WORDS) + r")(?![A-Za-z])", r"\\\1 ", s)
    return _parenthesised_roots(s)


def _parenthesised_roots(s: str) -> str:
    r"""\sqrt(x+1) -> \sqrt{x+1}."""
    while (match := re.search(r"\\sqrt\s*\(", s)) is not None:
        depth, end = 1, match.end()
        while end < len(s) and depth:
            depth += {"(": 1, ")": -1}.get(s[end], 0)
            end += 1
        if depth:
            return s
        s = s[: match.start()] + "\\sqrt{" + s[match.end() : end - 1] + "}" + s[end:]
    return s


def repeating_decimals(s: str) -> str:
    r"""0.\overline{3} is 1/3: the repeating part over nines."""

    def as_fraction(match: re.Match[str]) -> str:
        whole, fixed, repeated = match[1] or "0", match[2] or "", match[3]
        scale = 10 ** len(fixed)
        nines = (10 ** len(repeated) - 1) * scale
        numerator = int(whole + fixed + repeated) - int(whole + fixed)
        return f"\\frac{{{numerator}}}{{{nines}}}"

    return re.sub(r"([0-9]*)\.([0-9]*)\\(?:overline|bar|dot)\s*\{([0-9]{1,50})\}", as_fraction, s) if "\\" in s else s


def choose(s: str) -> str:
    r"""{n \choose k} -> \binom{n}{k}."""
    return re.sub(r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}", r"\\binom{\1}{\2}", s)


def magnitudes(s: str) -> str:
    r"""3.5 million -> 3.5 \times 10^{6}."""
    words = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
    return re.sub(
        r"(?<=[0-9])\s*(?:\\text\{\s*)?(thousand|million|billion|trillion)s?(?![A-Za-z])(?:\s*\})?",
        lambda match: f" \\times 10^{{{words[match[1].lower()]}}}",
        s,
        flags=re.IGNORECASE,
    )


def degrees(s: str) -> str:
    r"""^\circ, ^{\circ}, \circ and the words degrees, degree -> `^\circ` at the end of the number."""
    s = re.sub(r"\^\s*\{\s*\\circ\s*\}|\^\s*\\circ|(?<=[0-9}])\s*\\circ", r"^\\circ ", s)
    return re.sub(r"\s*(?:\\text\{\s*degrees?\s*\}|(?<![A-Za-z\\])degrees?(?![A-Za-z]))", r"^\\circ ", s)


def percent_sign(s: str) -> str:
    r"""\%, percent, percentage, pct -> `%`."""
    s = s.replace("\\%", "%")
    return re.sub(
        r"\s*(?:\\text\{\s*(?:percent|percentage|pct)\s*\}|(?<![A-Za-z\\])(?:percent|percentage|pct)(?![A-Za-z]))",
        "%",
        s,
    )


def currency(s: str) -> str:
    r"""Drop \$, €, £, ¥ and the words dollars and cents' sign before or after a number."""
    return re.sub(r"\\\$|[€£¥₹]|(?<=[0-9])\s*(?:USD|EUR)\b", "", s)


def conjunctions(s: str) -> str:
    r"""`a and b`, `a or b`, `a, and b`, `\text{ or }` join answers as a comma does."""
    s = re.sub(r",?\s*\\text\{\s*(?:,\s*)?(?:and|or)\s*\}\s*,?", ", ", s, flags=re.IGNORECASE)
    return re.sub(r"\s*,?\s*(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])\s*,?\s*", ", ", s, flags=re.IGNORECASE)


def text_commands(s: str) -> str:
    r"""\text{...} and its kin: words beside mathematics (units, remarks) go, words alone stay as words."""
    if "\\" not in s:
        return s
    s = re.sub(r"\\mathrm\s*\{(" + "|".join(_FUNCTION_WORDS) + r")\}", r"\\\1 ", s)
    s = re.sub(r"\\(?:mathrm|mathbf|mathit|mathsf|text|textbf|textit)\s*\{\s*([A-Za-z])\s*\}", _single_letter, s)
    s = re.sub(
        r"\\(?:text|mathrm|mathbf|mathit|textbf|mathsf)\s*\{\s*(-?[0-9][0-9.,]*|[0-9A-Z]+(?=\}_))\s*\}", r"\1", s
    )
    outside = _TEXT.sub("", s)
    if _has_mathematics(outside):
        return re.sub(r"/?\s*" + _TEXT.pattern + r"\s*(?:\^\s*(?:\{-?[0-9]+\}|[0-9]))?", _beside_mathematics, s)
    return _TEXT.sub(lambda match: f" {match[1]} ", s)


def _single_letter(match: re.Match[str]) -> str:
    """A letter set upright is a letter, unless it follows a number, where it is a unit (5 \\text{ m})."""
    before = match.string[: match.start()].rstrip()
    quantity = before[-1:].isdigit() or POWER_OF_TEN.search(before) is not None
    return match.group() if quantity and match.group().startswith("\\text") else f" {match[1]} "


def _beside_mathematics(match: re.Match[str]) -> str:
    if (half := re.fullmatch(r"\s*([AaPp])\.?\s?[Mm]\.?\s*", match[1])) is not None:
        return f" {half[1]}m"
    if re.fullmatch(r"\s*\([A-J]\)\s*", match[1]):
        return match[1]
    return " " if re.search(r"[^\W_]", match[1]) else f" {match[1]} "


def _has_mathematics(s: str) -> bool:
    return re.search(r"[0-9]|\\[A-Za-z]|[A-Za-z]", s) is not None


def end_punctuation(s: str) -> str:
    """Drop a full stop, comma, semicolon, colon or quotes at the end, and "=", \\approx or quotes at the start."""
    s = s.strip().strip('"`').strip()
    while s[-1:] in (".", ",", ";", ":") or s.endswith("\\\\") or (s.endswith("\\") and not s.endswith("\\\\")):
        s = s[:-1].rstrip()
    return re.sub(r"^(?:=|\\approx(?![A-Za-z]))\s*", "", s)


def inner_boxes(s: str) -> str:
    r"""\boxed{x} inside an answer is x."""
    return re.sub(r"\\(?:boxed|fbox)\s*(?=\{)", "", s)


STEPS: tuple[Callable[[str], str], ...] = (
    unicode_to_latex,
    double_backslashes,
    math_delimiters,
    emphasis,
    command_names,
    sizing,
    spacing,
    inner_boxes,
    plain_operators,
    conjunctions,
    choose,
    magnitudes,
    degrees,
    percent_sign,
    currency,
    text_commands,
    plain_functions,
    repeating_decimals,
    end_punctuation,
)


def normalize(text: str) -> str:
    """All steps, in order."""
    for step in STEPS:
        text = step(text)
    return text.strip()
