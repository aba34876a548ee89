"""Tokens of LaTeX mathematics, and the names that the expression grammar knows."""

from __future__ import annotations

import re

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
    if a == b:
        return True
    try:
        return tokenize(a) == tokenize(b)
    except Unsupported:
        return False
