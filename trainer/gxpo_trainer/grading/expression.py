r"""A small parser for closed-form answers in (normalised) LaTeX: text -> expression tree.

The grammar covers what final answers consist of: numbers, letters with subscripts, the four operations, powers, roots,
fractions, mixed numbers, elementary functions, binomials, factorials, absolute values, floor and ceiling. Everything
else (sums, integrals, matrices, prose) raises `Unsupported` and is left to math-verify.

Conventions, where LaTeX leaves a choice: `a/bc` is (a/b)c; `-x^2` is -(x^2); `2^10` is 2^{10}; `2\frac{1}{3}` is the
mixed number 7/3; `\sin 2x` takes the factors up to the next +, -, relation or function; `f(x)`, `g(x)`, ... are
applications of an unknown function, `x(x+1)` is a product; `e` and `i` are the constants; letters side by side
multiply.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from gxpo_trainer.grading.latex import FUNCTIONS, GREEK, OPAQUE, TooLarge, Unsupported, tokenize

MAX_DEPTH = 60
MAX_EXPONENT = 10_000


@dataclass(frozen=True, slots=True)
class Node:
    """One operation. kind: num, sym, const, add, mul, div, pow, neg, call, apply; `name` for symbols and calls."""

    kind: str
    args: tuple[Node, ...] = ()
    name: str = ""
    value: Fraction = Fraction(0)


_OPENING = {"(": ")", "[": "]", "{": "}"}
_END_OF_ARGUMENT = frozenset(["(", "[", *(f"\\{name}" for name in FUNCTIONS - {"sqrt"})])
_MARKS = ("dot", "ddot", "bar", "hat", "vec", "tilde", "overline", "overrightarrow", "overbrace", "underline")
_DERIVATIVE = re.compile(
    r"\{(?:d|\\partial)(?:\^.*)?[A-Za-z\\].*\}\{(?:d|\\partial)[A-Za-z\\].*\}|\{(?:d|\\partial)\}\{(?:d|\\partial).*\}"
)


def parse_expression(text: str) -> Node:
    """The tree of a closed-form expression. Raises Unsupported, TooLarge."""
    parser = _Parser(tokenize(text))
    node = parser.sum()
    if parser.peek():
        raise Unsupported(f"unexpected {parser.peek()!r}")
    return node


def number(value: int | Fraction) -> Node:
    return Node("num", value=Fraction(value))


class _Parser:
    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._at = 0
        self._depth = 0

    def peek(self, ahead: int = 0) -> str:
        """The next token; empty at the end."""
        index = self._at + ahead
        return self._tokens[index] if index < len(self._tokens) else ""

    def take(self, expected: str | None = None) -> str:
        token = self.peek()
        if not token or (expected is not None and token != expected):
            raise Unsupported(f"expected {expected or 'more'}, found {token!r}")
        self._at += 1
        return token

    def accept(self, token: str) -> bool:
        """Whether the next token is this one, which is then taken."""
        accepted = self.peek() == token
        self._at += accepted
        return accepted

    def sum(self) -> Node:
        terms = [self._signed(self._product)]
        while self.peek() in ("+", "-"):
            terms.append(self._signed(self._product))
        return terms[0] if len(terms) == 1 else Node("add", tuple(terms))

    def _signed(self, parse: Callable[[], Node]) -> Node:
        negative = False
        while self.peek() in ("+", "-"):
            negative ^= self.take() == "-"
        node = parse()
        return Node("neg", (node,)) if negative else node

    def _product(self) -> Node:
        node = self._power()
        while True:
            token = self.peek()
            if token in ("*", "\\cdot", "\\times", "\\ast"):
                self.take()
                factors = (node, self._signed(self._power))
                cross = token == "\\times" and all(factor.name.startswith("vec ") for factor in factors)
                node = Node("apply" if cross else "mul", factors, "\\times" if cross else "")
            elif self.accept("/") or self.accept("\\div"):
                node = Node("div", (node, self._signed(self._power)))
            elif self._starts_factor():
                node = self._implicit(node)
            else:
                return node

    def _implicit(self, left: Node) -> Node:
        """A factor written right after another: a product, or the fraction of a mixed number."""
        token = self.peek()
        if left.kind == "num" and re.match(r"[0-9.]", token):
            raise Unsupported("two numbers side by side")
        factor = self._power()
        whole = token == "\\frac" and left.kind == "num" and left.value.denominator == 1
        if whole and factor.kind == "div" and all(arg.kind == "num" for arg in factor.args):
            numerator, denominator = (arg.value for arg in factor.args)
            if numerator.denominator == denominator.denominator == 1 and 0 < numerator < denominator:
                return Node("add", (left, factor))
        return Node("mul", (left, factor))

    def _starts_factor(self) -> bool:
        token = self.peek()
        if token[:1] == "\\":
            return any(token[1:] in known for known in (FUNCTIONS, GREEK, _COMMANDS))
        return token in ("(", "[", "{") or token[:1].isalnum() or token[:1] == "."

    def _power(self) -> Node:
        node = self._primary()
        while self.accept("!"):
            node = Node("call", (node,), "factorial2" if self.accept("!") else "factorial")
        if not self.accept("^"):
            return node
        if self.accept("\\circ"):
            return Node("div", (Node("mul", (node, Node("const", name="pi"))), number(180)))
        # 2^2^3, which LaTeX forbids and programmers write, is 2^(2^3).
        powers = [node, self._exponent()]
        while self.accept("^"):
            powers.append(self._exponent())
        if len(powers) > MAX_DEPTH:
            raise Unsupported("nested too deeply")
        return functools.reduce(lambda exponent, base: Node("pow", (base, exponent)), reversed(powers))

    def _exponent(self) -> Node:
        """A braced group or a single token; 10^12 and 10^-12, which LaTeX sets otherwise, are those of programmers."""
        return Node("neg", (self._exponent(),)) if self.accept("-") else self._primary()

    def argument(self) -> Node:
        """The argument of \\frac or \\sqrt: a braced group, or a single token (one digit of a number)."""
        token = self.peek()
        if token[:1].isdecimal() and len(token) > 1:
            self._tokens[self._at] = token[1:]
            return number(int(token[0]))
        return Node("neg", (self.argument(),)) if self.accept("-") else self._primary()

    def _primary(self) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Unsupported("nested too deeply")
        node = self._atom(self.take())
        self._depth -= 1
        return node

    def _atom(self, token: str) -> Node:
        if token in _OPENING:
            node = self.sum()
            self.take(_OPENING[token])
            return node
        if token[0].isdecimal() or (token[0] == "." and len(token) > 1):
            # The name of a decimal, and of e-notation, is ".".
            mantissa, _, exponent = token.lower().partition("e")
            if exponent and abs(int(exponent)) > MAX_EXPONENT:
                raise TooLarge(f"10^{exponent}")
            value = Fraction(mantissa) * Fraction(10) ** int(exponent or 0)
            return Node("num", value=value, name="." if "." in mantissa or exponent else "")
        if token == "|":
            return self.enclosed("|", "abs")
        if token[0] == "\\":
            return self._command(token[1:])
        if token.isalpha() and token.isascii():
            return self._letter(token)
        raise Unsupported(f"unexpected {token!r}")

    def _letter(self, letter: str) -> Node:
        name = letter + self._subscript()
        if name in ("e", "i"):
            return Node("const", name=name)
        # `I(0)`, `x(t)`: a letter before a lone number or the letter t is a function's value, not a product.
        value = self.peek(2) == ")" and (self.peek(1)[0].isdecimal() or self.peek(1) == "t")
        if self.peek() == "(" and (letter in OPAQUE or value):
            return Node("apply", self.call_arguments(), name)
        return Node("sym", name=name)

    def call_arguments(self) -> tuple[Node, ...]:
        self.take("(")
        arguments = [self.sum()]
        while self.accept(","):
            arguments.append(self.sum())
        self.take(")")
        return tuple(arguments)

    def _subscript(self) -> str:
        suffix = ""
        while self.peek() in ("_", "'"):
            suffix += self.take()
            if suffix[-1] == "_":
                start, depth = self._at, 0
                while self._at == start or depth:
                    depth += {"{": 1, "}": -1}.get(self.take(), 0)
                suffix += "".join(self._tokens[start : self._at]).removeprefix("{").removesuffix("}")
        return suffix

    def _command(self, name: str) -> Node:
        if name in FUNCTIONS and name != "sqrt":
            return self._function(name)
        if name in GREEK:
            return Node("sym", name="\\" + name + self._subscript())
        if name not in _COMMANDS:
            raise Unsupported(f"\\{name}")
        return _COMMANDS[name](self)

    def fraction(self) -> Node:
        start = self._at
        arguments = self.argument(), self.argument()
        tokens = "".join(self._tokens[start : self._at])
        # dv/dt is one quantity: as a quotient of products its d would cancel.
        return Node("sym", name=tokens) if _DERIVATIVE.fullmatch(tokens) else Node("div", arguments)

    def decorated(self, mark: str) -> Node:
        r"""\dot{x}, \bar{x}, ...: a separate symbol."""
        start = self._at
        self.argument()
        letter = "".join(self._tokens[start : self._at]).strip("{}")
        return Node("sym", name=f"{mark} {letter}" + self._subscript())

    def root(self) -> Node:
        if not self.accept("["):
            return Node("call", (self.argument(),), "sqrt")
        index = self.sum()
        self.take("]")
        return Node("pow", (self.argument(), Node("div", (number(1), index))))

    def enclosed(self, closing: str, name: str) -> Node:
        inside = self.sum()
        self.take(closing)
        return Node("call", (inside,), name)

    def _function(self, name: str) -> Node:
        """A named function with its optional base or power and its argument."""
        base: tuple[Node, ...] = ()
        power = None
        for _ in range(2):
            if name == "log" and self.accept("_"):
                base = (self.argument(),)
            elif self.accept("^"):
                power = self.argument()
        argument = self._function_argument()
        if power is not None and power.kind == "neg" and name in ("sin", "cos", "tan", "cot", "sinh", "cosh", "tanh"):
            return Node("call", (argument,), "arc" + name)
        call = Node("call", (argument, *base), "log" if name == "lg" else name)
        return call if power is None else Node("pow", (call, power))

    def _function_argument(self) -> Node:
        """What a function is applied to: a group, or the factors that follow up to an operator or a function."""
        if self.peek() in _OPENING:
            return self._primary()
        if self.accept("-"):
            return Node("neg", (self._function_argument(),))
        node = self._power()
        while self._starts_factor() and self.peek() not in _END_OF_ARGUMENT:
            node = Node("mul", (node, self._power()))
        if self.peek() == "/":
            # `\sin \pi/4` reads both as sin(pi)/4 and as sin(pi/4).
            raise Unsupported("ambiguous division after a function")
        return node


_COMMANDS: dict[str, Callable[[_Parser], Node]] = {
    **{mark: functools.partial(_Parser.decorated, mark=mark) for mark in _MARKS},
    "frac": _Parser.fraction,
    "sqrt": _Parser.root,
    "binom": lambda parser: Node("call", (parser.argument(), parser.argument()), "binomial"),
    "max": lambda parser: Node("call", parser.call_arguments(), "max"),
    "min": lambda parser: Node("call", parser.call_arguments(), "min"),
    "pi": lambda parser: Node("const", name="pi"),
    "lfloor": lambda parser: parser.enclosed("\\rfloor", "floor"),
    "lceil": lambda parser: parser.enclosed("\\rceil", "ceil"),
}
