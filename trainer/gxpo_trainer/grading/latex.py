r"""Normalizes LaTeX: one function, str -> str, for each variation in how mathematics is written.

`clean` applies them in order. None of them changes the meaning of an answer: words and units stay, as
`\text{...}`, and what a value may be read as (percent, degrees, thousands or a list) is decided later.

Also the tokens of LaTeX mathematics, and the names that the expression grammar knows.
"""

from __future__ import annotations

import contextlib
import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction

from gxpo_trainer.grading.units import number_from_words

MAX_TOKENS = 2_000
MAX_NESTING = 60


class Unsupported(Exception):
    """The text is outside the grammar."""


class TooLarge(Exception):
    """The magnitude is beyond anything that is computed here."""


FUNCTIONS = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan arccot arcsec arccsc sinh cosh tanh coth arcsinh arccosh arctanh "
    "arsinh arcosh artanh ln log lg exp sqrt cis abs".split()
)
OPAQUE = frozenset("fghFGHPQ")
"""Letters that name functions when a parenthesis follows."""
GREEK = frozenset(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho varrho sigma tau "
    "upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega hbar ell".split()
)
_TOKEN = re.compile(
    r"(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,6}(?![0-9.]))?|\\[A-Za-z]+|\\.?|[^\s\\]", re.DOTALL
)
_THOUSANDS = re.compile(r"(?<![0-9.])([1-9][0-9]{0,2})((?:(?:\{,\}|,)[0-9]{3})+)(?![0-9])")


def tokenize(text: str) -> list[str]:
    """Tokens: numbers (`1,000` and `1e-3` included), single characters, commands with their backslash.

    Raises Unsupported.
    """
    tokens = _TOKEN.findall(_THOUSANDS.sub(lambda match: match[1] + re.sub(r"[{},]", "", match[2]), text))
    if len(tokens) > MAX_TOKENS:
        raise Unsupported("too long")
    return tokens


def same_tokens(a: str, b: str) -> bool:
    """Whether two texts are the same but for blanks (`1 2` is not `12`, `2^{n}-1` is not `2^{n-1}`)."""
    try:
        return a == b or tokenize(a) == tokenize(b)
    except Unsupported:
        return False


_UNICODE = {
    "−": "-", "–": "-", "—": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "∕": "/", "⁄": "/",
    "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "⩽": r"\le ", "≥": r"\ge ", "⩾": r"\ge ", "≠": r"\ne ",
    "≈": r"\approx ", "±": r"\pm ", "∓": r"\mp ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ",
    "°": r"^\circ ", "º": r"^\circ ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}",
    "⟨": "(", "⟩": ")", "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ",
    "′": "'", "’": "'", "“": '"', "”": '"', "\u00a0": " ", "\u2009": " ", "\u202f": " ", "，": ",", "：": ":",
    "。": ".", "、": ",", "∠": r"\angle ",
    "ε": r"\epsilon ", "Ω": r"\Omega ", "∧": r"\text{ and }",
}  # fmt: skip
FULL_WIDTH = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}
"""Full-width digits, letters and signs of East Asian texts as plain ones."""
_VULGAR = {c: Fraction(unicodedata.numeric(c)).limit_denominator(10) for c in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}
_UNICODE_TABLE = FULL_WIDTH | str.maketrans(
    _UNICODE
    | {letter: f"\\{unicodedata.name(letter).split()[-1].lower()} " for letter in "αβγδθμρστφω"}
    | {"λ": "\\lambda "}  # whose name in Unicode is LAMDA
    | {c: f"\\frac{{{value.numerator}}}{{{value.denominator}}}" for c, value in _VULGAR.items()}
)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_RENAMED = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "nicefrac": "frac", "sfrac": "frac",
    "leq": "le", "leqslant": "le", "leqq": "le", "geq": "ge",
    "geqslant": "ge", "geqq": "ge", "neq": "ne", "lbrace": "{", "rbrace": "}", "infin": "infty",
    "varnothing": "emptyset", "vert": "|", "mid": "|", "lVert": "|", "rVert": "|", "lvert": "|", "rvert": "|",
    "degree": "circ", "dbinom": "binom", "tbinom": "binom", "colon": ":", "backslash": "setminus",
    "simeq": "approx", "thickapprox": "approx", "tg": "tan", "ctg": "cot", "arctg": "arctan",
    "land": "text{ and }", "wedge": "text{ and }", "lor": "text{ or }", "vee": "text{ or }",
    "lt": "<", "gt": ">", "dots": "ldots", "cdots": "ldots", "dotsc": "ldots", "implies": "Rightarrow",
    "lbrack": "[", "rbrack": "]", "langle": "(", "rangle": ")", "iff": "Leftrightarrow", "varphi": "phi",
    "varepsilon": "epsilon", "vartheta": "theta",
}  # fmt: skip
_RENAMED = {name: new if new in "|:<>[]()" else "\\" + new for name, new in _RENAMED.items()}
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_UPRIGHT = re.compile(
    r"\\(?:text(?:bf|it|rm|normal|tt|sf|up)?|mbox|hbox|math(?:rm|bf|it|sf|tt|normal)|operatorname\*?|bm|boldsymbol|rm|bf)"
    r"(?:\s*\{([^{}]*)\}|(?![A-Za-z])\s*([0-9A-Za-z](?![0-9A-Za-z])))"
)
_FUNCTION_WORDS = FUNCTIONS | {"pi", "infty", "max", "min"}
_FUNCTION = "|".join(sorted(_FUNCTION_WORDS))
_QUANTITY = re.compile(
    r"(?:[0-9]|[0-9]\s*\\frac\s*\{(?:[^{}]|\{[^{}]*\})*(?:\}\s*\{)?|10\s*\^\s*\{[-+]?[0-9]+\}|\\mu|\\(?:text|math|mbox|operatorname)[a-z]*\s*\{[^{}]*\}(?:\s*\^\s*\{?-?[0-9]\}?)?(?:\s*\\cdot)?)$"
)
_BETWEEN = re.compile(
    r"^\s*([A-Za-z])\s*([<>]|\\[gl]e(?![A-Za-z]))\s*([^<>=,]+?)\s*(?:\\text\{\s*and\s*\}|\band\b)"
    r"\s*\1\s*([<>]|\\[gl]e(?![A-Za-z]))\s*([^<>=,]+?)\s*$"
)
_REPEATING = re.compile(
    r"([0-9]*)\.([0-9]*?)(?:\\(?:overline|bar)\s*(\{[0-9]{1,50}\}|[0-9])|(\([0-9]{1,50}\))(?![0-9])"
    r"|([0-9]{1,6}?)(?:\5)+\s*(?:\\ldots(?![A-Za-z])|\.{3}|…))"
)


def unicode_to_latex(s: str) -> str:
    """Unicode signs, vulgar fractions, superscripts, roots and full-width characters as LaTeX: ½, x², √3, ≤, ∪, １."""
    if s.isascii():
        return s
    s = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+", lambda m: "^{" + m.group().translate(_SUPERSCRIPTS) + "}", s)
    s = re.sub("[₀₁₂₃₄₅₆₇₈₉]+", lambda m: "_{" + m.group().translate(_SUBSCRIPTS) + "}", s)
    s = re.sub(r"√\s*(?:\(([^()]*)\)|\{([^{}]*)\}|([0-9.]+|[A-Za-zπ]))", r"\\sqrt{\1\2\3}", s)
    return s.translate(_UNICODE_TABLE)


def double_backslashes(s: str) -> str:
    r"""`\\frac` written with an escaped backslash; in a matrix `\\` ends a row and stays."""
    if "\\\\begin{" in s:
        return s.replace("\\\\", "\\")
    return s if "\\begin" in s else re.sub(r"\\\\(?=[A-Za-z{}%$,;!])", r"\\", s)


def math_delimiters(s: str) -> str:
    r"""Drop $...$, \(...\) and \[...\]; `\$` stays for `currency`. A price like `$5` keeps its sign."""
    if s.count("$") == 1:
        s = re.sub(r"(?<!\\)\$(?=\s*[0-9])", r"\\$", s)
    return re.sub(r"(?<!\\)(?:\$|\\[()\[\]])", " ", s)


def emphasis(s: str) -> str:
    r"""**bold** or \text{...} around a whole answer, and stars left over at its ends."""
    s = re.sub(r"^\s*\\(?:text(?:bf|it|rm|normal)?|mbox|mathrm|mathbf)\s*\{([^{}\\]*)\}\s*$", r"\1", s)
    return re.sub(r"^[\s*]*\*\*|\*\*[\s.]*$", "", s)


def command_names(s: str) -> str:
    r"""One name for synonyms: \dfrac, \tfrac -> \frac; \leq -> \le; \neq -> \ne; \lt -> <."""
    return _COMMAND.sub(lambda match: _RENAMED.get(match[1], match.group()), s)


def presentation(s: str) -> str:
    r"""Drop \left, \right, \big..., \displaystyle, \color and other commands that only change the look."""
    s = re.sub(r"\\[hv]?phantom\s*(?:\{[^{}]*\}|[^\s{])", "", s)
    s = re.sub(r"\\(?:left|right|middle|[bB]ig{1,2}[lrm]?)(?![A-Za-z])(?:\s*\.)?", "", s)
    s = re.sub(r"\\(?:textcolor|colorbox|color)\s*(?:\[[^\]]*\])?\s*\{[^{}]*\}", "", s)
    s = re.sub(r"\\(?:boxed|fbox|framebox|underline|mathstrut|ensuremath|cancelto)\s*(?=\{)", "", s)
    return re.sub(
        r"\\(?:tiny|small|normalsize|large|Large|LARGE|huge|Huge|(?:bf|rm|it|sf)(?!\s*\{)|displaystyle|textstyle|scriptstyle|limits|nolimits|hfill|nonumber|mathstrut|strut|hline|qed"
        r"|blacksquare|square|Box|tag\*?\s*\{[^{}]*\})(?![A-Za-z])",
        "",
        s,
    )


def spacing(s: str) -> str:
    r"""Drop \! and turn \, \; \: \quad ~ and escaped blanks into one blank; `{,}` joins digits."""
    s = re.sub(r"(?<=[0-9])(?:\{,\}|,\\!)\s*(?=[0-9]{3}(?![0-9]))", "", s)
    s = re.sub(r"(?<!\\)\\!", "", s).replace("{,}", ",")
    s = re.sub(r"(?<!\\)\\[,;:> ]|\\q?quad(?![A-Za-z])|~|\\(?:h|v)space\*?\{[^{}]*\}|\\(?:hskip|thinspace)", " ", s)
    return re.sub(r"\s+", " ", s)


def plain_operators(s: str) -> str:
    """Programmers' signs: **, <=, >=, !=, ==, `3 x 10^8`; `negative 5` is -5."""
    s = re.sub(r"(?<=[0-9])\s*x\s*(?=10\s*\^)", "\\\\times ", s)
    s = re.sub(r"^\s*(?:\\text\s*\{\s*)?(?:negative|minus)\s*\}?\s*(?=[0-9\\])", "-", s, flags=re.IGNORECASE)
    s = s.replace("**", "^").replace("<=", "\\le ").replace(">=", "\\ge ").replace("!=", "\\ne ").replace("==", "=")
    s = re.sub(r"\^\s*(?:\{\s*((?:\\prime\s*)+)\}|(\\prime))", lambda match: "'" * match.group().count("prime"), s)
    return s.replace("+-", "\\pm ") if s.startswith("+-") else re.sub(r"\\mathbb\s*([A-Z])", r"\\mathbb{\1}", s)


def conjunctions(s: str) -> str:
    r"""`a and b`, `a or b`, `a, and b`, `\text{ or }` join answers as a comma does; `x > 2 and x < 5` is 2 < x < 5."""
    s = _BETWEEN.sub(_between, s)
    s = re.sub(r",?\s*\\text\{\s*(?:,\s*)?(?:and|or)\s*\}\s*,?", ", ", s, flags=re.IGNORECASE)
    return re.sub(r"\s*,?\s*(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])\s*,?\s*(?![^{}]*\})", ", ", s, flags=re.IGNORECASE)


def _between(match: re.Match[str]) -> str:
    name, *bounds = match.groups()
    (lower, low), (upper, high) = sorted((bounds[:2], bounds[2:]), key=lambda pair: pair[0] in ("<", "\\le"))
    if lower in ("<", "\\le") or upper in (">", "\\ge"):
        return match.group()
    with contextlib.suppress(ValueError):
        if float(low) >= float(high):  # no number is in both: a union is meant
            return match.group()
    return f"{low} {lower.replace('>', '<').replace('g', 'l')} {name} {upper} {high}"


def choose(s: str) -> str:
    r"""{n \choose k} -> \binom{n}{k}."""
    return re.sub(r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}", r"\\binom{\1}{\2}", s)


def magnitudes(s: str) -> str:
    r"""3.5 million -> 3.5 \times 10^{6}."""
    return re.sub(
        r"(?<=[0-9])\s*(?:\\text\{\s*)?(hundred|thousand|million|billion|trillion)s?(?![A-Za-z])(?:\s*\})?",
        lambda match: f" \\times 10^{{{len(str(number_from_words(match[1]))) - 1}}}",
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
    names = "percent|percentage|per cent|pct|percentage points|pour cent|Prozent|por ciento|por cento|per cento"
    return re.sub(rf"\s*(?:\\text\{{\s*(?:{names})\s*\}}|(?<![A-Za-z\\])(?:{names})(?![A-Za-z]))", "%", s)


def currency(s: str) -> str:
    r"""`\$5` and `5 USD` are `5 \text{ dollars}`, so that 5 dollars and 5 cents differ; other signs are dropped."""
    s = re.sub(r"(?<=[0-9])\s*¢", r"\\text{ cents}", s)
    s = re.sub(r"(-?)\\\$\s*(-?)([0-9][0-9.,]*[0-9]|[0-9])", r"\1\2\3\\text{ dollars}", s)
    return re.sub(r"\\\$|[€£¥₹]|(?<=[0-9])\s*(?:EUR|GBP)\b", "", re.sub(r"([0-9])\s*\\\$", r"\1\\text{ dollars}", s))


def upright(s: str) -> str:
    r"""\mathrm{...}, \textbf{...} and their kin: functions, letters and numbers set upright are themselves, the rest is
    \text{...}."""
    s = re.sub(r"\\(?:text|mbox|math)[a-z]*\s*\{\s*(\\(?:text|mbox|math)[a-z]*\s*\{[^{}]*\})\s*\}", r"\1", s)
    s = _UPRIGHT.sub(_upright, re.sub(r"\\text\{([^{}:]+):\s*\}(?=\s*[-0-9\\])", r"\\text{\1}=", s))
    s = re.sub(
        r"\\frac\s*\{\s*(\\text\{[^{}]*\}(?:\^\{?\d\}?)?)\s*\}\s*\{\s*(\\text\{[^{}]*\}\s*(?:\^\{?\d\}?)?)\s*\}",
        r"\1/\2",
        s,
    )
    return re.sub(r"\\mu\s*\\text\{\s*|\\text\{\\mu\s*\}\s*\\text\{|\\text\{\\mu\s*", r"\\text{μ", s)


def _upright(match: re.Match[str]) -> str:
    body = match[1] if match[1] is not None else match[2]
    inside = body.strip()
    if inside in _FUNCTION_WORDS and not (inside in ("sec", "min") and _behind_quantity(match)):
        return f"\\{inside} "
    if (counted := re.fullmatch(r"(-?[0-9][0-9.,]*)\s*([^0-9{}]*)", inside)) is not None and counted[2].strip("%"):
        return f" {counted[1]} \\text{{{counted[2]}}}"
    if re.fullmatch(r"\(?[A-J]\)?(?:\s*(?:,|and|or)\s*\(?[A-J]\)?)+", inside):
        return re.sub(r"\s*(?:and|or)\s*", ", ", inside)
    if re.fullmatch(r"-?[0-9][0-9.,]*%?|\(?[A-Z]\)", inside) or "\\" in inside:
        return f" {inside} "
    if re.fullmatch(r"[0-9A-Z]{2,}", inside) and match.string[match.end() : match.end() + 1] == "_":
        return inside
    if re.fullmatch("[A-Za-z]", inside) and not _behind_quantity(match):
        return f" {inside} "
    return f"\\text{{{body}}}"


def _behind_quantity(match: re.Match[str]) -> bool:
    r"""A letter set upright behind a number, a power of ten or another unit is a unit: `5 \text{ m}`."""
    before = match.string[: match.start()].rstrip(" /")
    if match.group().startswith(("\\mathbf", "\\mathit")):
        return False
    upright_e = match.group().startswith("\\math") and (match[1] or match[2]).strip() in ("e", "i", "d")
    return not upright_e and _QUANTITY.search(before) is not None


def plain_functions(s: str) -> str:
    """sqrt(3), sqrt3, sin(x), pi, inf without backslash, also with a module prefix as in np.sqrt."""
    s = re.sub(r"\bAbs(?=\()", "abs", re.sub(r"\b(?:np|math|sympy)\.", "", s))
    s = re.sub(r"(?<![A-Za-z\\])[+]?(?:infinity|infty|inf)(?![A-Za-z])", r"\\infty ", s, flags=re.IGNORECASE)
    return re.sub(rf"(?<![A-Za-z\\])({_FUNCTION})(?![A-Za-z])", _function, s)


def _function(match: re.Match[str]) -> str:
    # `5 min` is a time, `min(a, b)` a function.
    name = match[1]
    if name in ("min", "max", "sec", "abs") and match.string[match.end() : match.end() + 1] not in ("(", "{", "^"):
        return match.group()
    return f"\\{name} "


def repeating_decimals(s: str) -> str:
    r"""0.\overline{3}, 0.(3), 0.333\ldots are 1/3: the repeating part over nines."""

    def as_fraction(match: re.Match[str]) -> str:
        whole, fixed, *groups = match.groups(default="")
        repeated = re.sub(r"[^0-9]", "", "".join(groups))
        nines = (10 ** len(repeated) - 1) * 10 ** len(fixed)
        return f"\\frac{{{int(whole + fixed + repeated) - int('0' + whole + fixed)}}}{{{nines}}}"

    return _REPEATING.sub(as_fraction, s)


def separators(s: str) -> str:
    """Groups of three digits with blanks between them: 1 234 567."""
    return re.sub(r"(?<![\d.,])[1-9]\d{0,2}(?: \d{3})+(?!\d)", lambda match: match.group().replace(" ", ""), s)


def mixed_numbers(s: str) -> str:
    r"""`3 1/2` is 3\frac{1}{2}."""
    return re.sub(r"(?<![0-9.^/])([0-9]+) +([0-9]+)/([0-9]+)(?![0-9./])", r"\1\\frac{\2}{\3}", s)


def end_punctuation(s: str) -> str:
    """Drop a full stop, comma, semicolon, colon or quotes at the end, and "=", \\approx or quotes at the start."""
    s = s.strip().strip('"`').strip()
    while s[-1:] in (".", ",", ";", ":", "。") or s.endswith("\\\\") or (s.endswith("\\") and not s.endswith("\\\\")):
        s = s[:-1].rstrip()
    return re.sub(r"^(?:=|\\approx(?![A-Za-z])|\\text\{\s*(?:approximately|about|approx\.?)\s*\})\s*", "", s)


STEPS: tuple[Callable[[str], str], ...] = (
    *(unicode_to_latex, double_backslashes, math_delimiters, emphasis, command_names, presentation, spacing),
    *(plain_operators, conjunctions, choose, magnitudes, degrees, percent_sign, repeating_decimals, separators),
    *(mixed_numbers, currency, upright, plain_functions, end_punctuation),
)


def clean(text: str) -> str:
    for step in STEPS:
        text = step(text)
    return re.sub(r"\s+", " ", text).strip()
