"""Other ways to write a final answer, and wrong answers near it: inputs for the grader's tests and benchmark.

Nothing here calls the grader. A form is made by text alone, from what the answer looks like: `2x+3` becomes
`3+2x`, `1/2` becomes `0.5` and `\\frac{2}{4}`, `(a, b)` gets other blanks and other forms of a and b, a list is
reversed. `equal_forms` gives answers that are equal to the gold and, as text, differ from it; `wrong_forms` gives
answers that differ in value.
"""

from __future__ import annotations

import re
from fractions import Fraction

_INTEGER = re.compile(r"-?\d+")
_DECIMAL = re.compile(r"-?\d*\.\d+")
_FRACTION = re.compile(r"(-?)\\[dt]?frac\s*(?:\{(\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d))")
_GROUPED = re.compile(r"\d{1,3}(?:,(?:\\!\s?)?\d{3})+")
_WORDS = re.compile(r"\\text\{\(?([A-Za-z][A-Za-z' -]*)\)?\}|[A-Za-z]{4,}")
_BASE = re.compile(r"(-?[0-9A-Z.]+)_\{?(\d+)\}?")
_MATRIX = re.compile(r"\\begin\{pmatrix\}(.*)\\end\{pmatrix\}", re.DOTALL)
_SUMMAND_BEFORE = re.compile(r"(?<!\\cdot)(?<!\\times)(?<![*/^(=\s])\s*$")
_UNIT = re.compile(r"(.*?(?:[0-9}]|\\pi))\s*(?:\\(?:text|mbox)\{[^{}]*\}(?:\^\{?\d\}?)?|\^\{?\\circ\}?)")


def _separator(gold: str) -> str:
    """The mark between the outermost parts: a semicolon when there is one."""
    return ";" if ";" in gold else ","


def exact_part(gold: str) -> str:
    """`2/3 \\approx 0.67` without its remark; a gold that is only approximate without the sign."""
    return next(part for part in gold.split("\\approx") if part.strip())


def split_outside_brackets(s: str, separators: str) -> list[str]:
    """Parts of `s` between single-character separators that stand in no bracket."""
    parts, depth, start = [], 0, 0
    for at, character in enumerate(s):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif depth == 0 and character in separators:
            parts.append(s[start:at])
            start = at + 1
    parts.append(s[start:])
    return parts


def _number_forms(value: Fraction) -> list[str]:
    forms = []
    sign, size = ("-" if value < 0 else ""), abs(value)
    if size.denominator == 1:
        forms += [f"{sign}{size}.0", f"{sign}\\frac{{{2 * size}}}{{2}}"]
        if size >= 1000:
            forms.append(f"{sign}{int(size):,}")
        return forms
    forms += [
        f"{sign}{size.numerator}/{size.denominator}",
        f"{sign}\\frac{{{2 * size.numerator}}}{{{2 * size.denominator}}}",
        f"{sign}\\dfrac {{{size.numerator}}}{{{size.denominator}}}",
    ]
    denominator = size.denominator
    while denominator % 2 == 0:
        denominator //= 2
    while denominator % 5 == 0:
        denominator //= 5
    if denominator == 1 and size.denominator < 10**9:
        forms.append(sign + _decimal_text(size))
    return forms


def _decimal_text(size: Fraction) -> str:
    places = 0
    while (size * 10**places).denominator != 1:
        places += 1
    digits = str(int(size * 10**places)).rjust(places + 1, "0")
    return f"{digits[:-places]}.{digits[-places:]}"


def _plain_value(s: str) -> Fraction | None:
    s = s.strip()
    if _INTEGER.fullmatch(s) or _DECIMAL.fullmatch(s):
        return Fraction(s)
    if _GROUPED.fullmatch(s):
        return Fraction(re.sub(r"[^\d]", "", s))
    match = _FRACTION.fullmatch(s)
    if match is None or int(match[4] or match[5]) == 0:
        return None
    value = Fraction(int(match[2] or match[3]), int(match[4] or match[5]))
    return -value if match[1] else value


def _terms(s: str) -> list[str]:
    r"""Signed terms of a sum outside brackets; one term when there is no sum, or signs that are no sum (\pm, e^-x)."""
    if "\\pm" in s or "\\mp" in s:
        return [s]
    terms, depth, start = [], 0, 0
    for at, character in enumerate(s):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif depth == 0 and character in "+-" and _SUMMAND_BEFORE.search(s[:at]):
            terms.append(s[start:at])
            start = at
    terms.append(s[start:])
    return [term.strip() for term in terms if term.strip()]


def _reversed_sum(s: str) -> str | None:
    terms = _terms(s)
    if len(terms) < 2:
        return None
    signed = [term if term[0] in "+-" else "+" + term for term in terms][::-1]
    return " ".join(signed).removeprefix("+").strip()


def equal_forms(gold: str) -> list[str]:
    """Answers equal to `gold` that differ from it as text even when blanks are dropped; possibly none."""
    if re.fullmatch(r"\{[^{}]*\}|\\\{[^,{}]*\\\}", gold.strip()):
        return []
    if "\\phantom" in gold:
        return []
    gold = exact_part(gold)
    gold = re.sub(r"\\[,;:!]|\\quad", " ", gold) if "," in gold and "\\!" not in gold else gold
    gold = gold.strip().rstrip(".").strip()
    forms = _forms(gold)
    squeezed = re.sub(r"\s", "", gold)
    return [form for form in dict.fromkeys(forms) if re.sub(r"\s", "", form) != squeezed]


def _forms(gold: str) -> list[str]:
    value = _plain_value(gold)
    if value is not None:
        return _number_forms(value)
    for make in (
        _scientific_forms,
        _ratio_forms,
        _plus_minus_forms,
        _letters_forms,
        _order_forms,
        _money_forms,
        _base_forms,
        _word_forms,
        _unit_forms,
        _matrix_forms,
        _union_forms,
        _list_forms,
    ):
        forms = make(gold)
        if forms:
            return forms
    for make in (_bracket_forms, _relation_forms):
        forms = make(gold)
        if forms:
            return forms
    return _expression_forms(gold)


def _scientific_forms(gold: str) -> list[str]:
    match = re.fullmatch(r"([\d.]+)\s*\\times\s*10\^\{?(-?\d+)\}?", gold) or re.fullmatch(r"([\d.]+)e(-?\d+)", gold)
    if match is None:
        return []
    mantissa, exponent = match[1], int(match[2])
    return [
        f"{mantissa}e{exponent}",
        f"{mantissa}E{exponent:+03d}",
        f"{mantissa} \\cdot 10^{{{exponent}}}",
        f"{float(mantissa) * 10:.12g} \\times 10^{{{exponent - 1}}}",
    ]


def _ratio_forms(gold: str) -> list[str]:
    match = re.fullmatch(r"(\d+)\s*:\s*(\d+)", gold)
    if match is None:
        return []
    if len(match[2]) == 2:
        # Perhaps a time of day: only another way to set it.
        return [f"{match[1]}\\text{{:}}{match[2]}", f"\\text{{{match[1]}:{match[2]}}}"]
    return [f"{2 * int(match[1])}:{2 * int(match[2])}", f"\\frac{{{match[1]}}}{{{match[2]}}}"]


def _plus_minus_forms(gold: str) -> list[str]:
    if gold.count("\\pm") != 1 or "," in gold:
        return []
    lower, upper = gold.replace("\\pm", "-"), gold.replace("\\pm", "+")
    return [f"{lower}, {upper.strip().removeprefix('+')}"]


def _letters_forms(gold: str) -> list[str]:
    match = re.fullmatch(r"\\(?:text|mbox)\{([A-Za-z, 0-9]+)\}|\(\\text\{([A-Z])\}\),?", gold)
    if match is None:
        return []
    inside = match[1] or match[2]
    return [", ".join(part.strip() for part in inside.split(",")[::-1]), f"\\mathrm{{{inside}}}"]


def _order_forms(gold: str) -> list[str]:
    """s \\le t is t \\ge s."""
    match = re.fullmatch(r"(.+?)\\(le|ge)(?:q|qslant)?(?![a-z])(.+)", gold)
    if match is None or re.search(r"\\(?:le|ge)|[<>=]", match[1] + match[3]):
        return []
    flipped = {"le": "ge", "ge": "le"}[match[2]]
    return [f"{match[3].strip()} \\{flipped} {match[1].strip()}"]


def _money_forms(gold: str) -> list[str]:
    match = re.fullmatch(r"\\\$\s*([\d,.!\\]+)", gold)
    if match is None:
        return []
    plain = re.sub(r"[,!\\]", "", match[1])
    return [plain, f"{plain} dollars", f"\\${plain}"]


def _base_forms(gold: str) -> list[str]:
    match = _BASE.fullmatch(gold)
    return [f"{match[1]}_{{{match[2]}}}", f"{match[1]}_{match[2]}"] if match else []


def _word_forms(gold: str) -> list[str]:
    match = _WORDS.fullmatch(gold)
    if match is None:
        return []
    word = match[1] or match[0]
    return [word, f"\\text{{{word}}}", f"\\mathrm{{{word}}}"] + ([f"({word})"] if len(word) == 1 else [word.lower()])


def _unit_forms(gold: str) -> list[str]:
    match = _UNIT.fullmatch(gold)
    if match is None or re.search(r"\\(?:sin|cos|tan)", gold):
        return []
    return [match[1].strip(), *_forms(match[1].strip())]


def _varied(part: str) -> str:
    """The first other form of a part, or the part with a blank."""
    forms = equal_forms(part)
    return forms[0] if forms else f" {part.strip()} "


def _matrix_forms(gold: str) -> list[str]:
    match = _MATRIX.fullmatch(gold)
    if match is None:
        return []
    rows = [[_varied(cell) for cell in row.split("&")] for row in match[1].split("\\\\") if row.strip()]
    body = " \\\\ ".join(" & ".join(row) for row in rows)
    same = match[1].replace("&", " & ")
    return [f"\\begin{{bmatrix}}{body}\\end{{bmatrix}}", f"\\begin{{bmatrix}}{same}\\end{{bmatrix}}"]


def _union_forms(gold: str) -> list[str]:
    parts = gold.split("\\cup")
    if len(parts) < 2:
        return []
    return ["\\cup".join(_varied(part) for part in parts[::-1]), " \\cup ".join(parts[::-1])]


def _list_forms(gold: str) -> list[str]:
    gold = re.sub(r"\\text\{ (?:and|or) \}", ",", gold)
    parts = split_outside_brackets(gold, _separator(gold))
    if len(parts) < 2 or _GROUPED.fullmatch(gold) or any(not part.strip() for part in parts):
        return []
    parts = [part.strip() for part in parts]
    if any("=" in part for part in parts):
        return [" , ".join(parts[::-1])]
    return [", ".join(_varied(part) for part in parts), " , ".join(parts[::-1])]


def _bracket_forms(gold: str) -> list[str]:
    if ";" in gold:
        return []
    match = re.fullmatch(r"(?:\\left)?(\\?[(\[{])(.*?)(?:\\right)?(\\?[)\]}])", gold, re.DOTALL)
    if match is None:
        return []
    parts = split_outside_brackets(match[2], ",")
    if len(parts) < 2:
        return []
    inside = ", ".join(_varied(part) for part in parts)
    return [f"\\left{match[1]} {inside} \\right{match[3]}"]


def _relation_forms(gold: str) -> list[str]:
    sides = split_outside_brackets(gold, "=")
    if len(sides) != 2 or "\\ne" in gold:
        membership = re.fullmatch(r"[a-z]\s*\\in\s*(.*)", gold)
        return [membership[1]] if membership else []
    left, right = (side.strip() for side in sides)
    if re.fullmatch(r"[A-Za-z]", left):
        return [right, f"{left} = {_varied(right)}"]
    other = _reversed_sum(left)
    return ([f"{other} = {right}"] if other else []) + [f"{left} - ({right}) = 0" if right != "0" else f"0 = {left}"]


def _expression_forms(gold: str) -> list[str]:
    if re.search(
        r"\\(?:text|leq|le|ge|lt|gt|pm|in|infty|ldots|dots|begin|overline|mbox)\b|[<>=:]|(?<![\\A-Za-z])[A-Za-z]{4,}\s",
        gold,
    ):
        return []
    forms = [f"\\frac{{2({gold})}}{{2}}"]
    other = _reversed_sum(gold)
    return ([other] if other else []) + forms


def wrong_forms(gold: str) -> list[str]:
    """Answers that differ from `gold` in value: the nearest integers, a changed sign, one added, one part changed."""
    gold = exact_part(gold).strip().rstrip(".").strip()
    value = _plain_value(gold)
    if value is not None:
        negated = str(-value) if value else "7"
        return [str(value + 1), negated, str(2 * abs(value) + 3), str(10 * abs(value) + 3)]
    parts = split_outside_brackets(gold, ",")
    if len(parts) > 1 and not _GROUPED.fullmatch(gold):
        return [", ".join([*parts[:-1], "917"]), ", ".join([*parts, "917"])]
    if re.search(r"\\(?:text|begin|cup|le|ge|in|infty|pm)\b|[<>=:_]", gold) or "," in gold:
        return ["917", "\\frac{917}{3}"]
    return [f"{gold} + 1", f"\\frac{{{gold}}}{{3}}"]
