"""A small parser for closed-form answers in (normalised) LaTeX: text -> expression tree.

It knows what final answers are made of: numbers, letters with subscripts, the four operations, powers, roots,
fractions, mixed numbers, elementary functions, binomials, factorials, absolute values, floor and ceiling. Whatever
it does not know (sums, integrals, matrices, prose) raises `Unsupported`, and math-verify is asked instead.

Conventions, where LaTeX leaves a choice: `a/bc` is (a/b)c; `-x^2` is -(x^2); `2\\frac{1}{3}` is the mixed number
7/3; `\\sin 2x` takes the factors up to the next +, -, relation or function; `f(x)`, `g(x)`, ... are applications
of an unknown function, `x(x+1)` is a product; `e` and `i` are the constants; letters side by side multiply.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from gxpo_trainer.verify.tokens import FUNCTIONS, GREEK, OPAQUE, TooLarge, Unsupported, tokenize

__all__ = ["Node", "Unsupported", "number", "parse_expression"]

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
_MARKS = ("dot", "ddot", "bar", "hat", "vec", "tilde", "overline", "overrightarrow", "overbrace", "underline")
_DERIVATIVE = re.compile(
    r"\{(?:d|\\partial)(?:\^.*)?[A-Za-z\\].*\}\{(?:d|\\partial)[A-Za-z\\].*\}|\{(?:d|\\partial)\}\{(?:d|\\partial).*\}"
)


def parse_expression(text: str) -> Node:
    """The tree of a closed-form expression. Raises Unsupported, TooLarge."""
    parser = _Parser(tokenize(text))
    node = parser.sum()
    if parser.peek() is not None:
        raise Unsupported(f"unexpected {parser.peek()!r}")
    return node


def number(value: int | Fraction) -> Node:
    return Node("num", value=Fraction(value))


class _Parser:
    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._at = 0
        self._depth = 0

    def peek(self, ahead: int = 0) -> str | None:
        index = self._at + ahead
        return self._tokens[index] if index < len(self._tokens) else None

    def take(self, expected: str | None = None) -> str:
        token = self.peek()
        if token is None or (expected is not None and token != expected):
            raise Unsupported(f"expected {expected or 'more'}, found {token!r}")
        self._at += 1
        return token

    def sum(self) -> Node:
        terms = [self._signed_product()]
        while self.peek() in ("+", "-"):
            terms.append(self._signed_product())
        return terms[0] if len(terms) == 1 else Node("add", tuple(terms))

    def _signed_product(self) -> Node:
        negative = False
        while self.peek() in ("+", "-"):
            negative ^= self.take() == "-"
        product = self._product()
        return Node("neg", (product,)) if negative else product

    def _product(self) -> Node:
        node = self._power()
        while True:
            token = self.peek()
            if token in ("*", "\\cdot", "\\times", "\\ast"):
                self.take()
                factors = (node, self._signed_factor())
                cross = token == "\\times" and all(factor.name.startswith("vec ") for factor in factors)
                node = Node("apply" if cross else "mul", factors, "\\times" if cross else "")
            elif token in ("/", "\\div"):
                self.take()
                node = Node("div", (node, self._signed_factor()))
            elif self._starts_factor():
                node = self._implicit(node)
            else:
                return node

    def _signed_factor(self) -> Node:
        if self.peek() in ("-", "+"):
            sign = self.take()
            factor = self._signed_factor()
            return Node("neg", (factor,)) if sign == "-" else factor
        return self._power()

    def _implicit(self, left: Node) -> Node:
        """A factor written right after another: a product, or the fraction of a mixed number."""
        token, is_digit = self.peek(), re.match(r"[0-9.]", self.peek() or "")
        if is_digit and left.kind == "num":
            raise Unsupported("two numbers side by side")
        factor = self._power()
        mixed = token == "\\frac" and left.kind == "num" and left.value.denominator == 1
        if mixed and factor.kind == "div" and all(arg.kind == "num" for arg in factor.args):
            numerator, denominator = (arg.value for arg in factor.args)
            if numerator.denominator == denominator.denominator == 1 and 0 < numerator < denominator:
                return Node("add", (left, factor))
        return Node("mul", (left, factor))

    def _starts_factor(self) -> bool:
        token = self.peek()
        if token is None:
            return False
        if token[0] == "\\":
            name = token[1:]
            return name in FUNCTIONS or name in GREEK or name in _COMMANDS
        return token in ("(", "[", "{") or token[0].isalnum() or token[0] == "."

    def _power(self) -> Node:
        base = self._postfix()
        if self.peek() == "^":
            self.take()
            if self.peek() == "\\circ":
                self.take()
                return Node("div", (Node("mul", (base, Node("const", name="pi"))), number(180)))
            return Node("pow", (base, self._exponent()))
        return base

    def _exponent(self) -> Node:
        """2^2^3, which LaTeX forbids and programmers write, is 2^(2^3)."""
        exponent = self._argument()
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Unsupported("nested too deeply")
        if self.peek() == "^":
            self.take()
            exponent = Node("pow", (exponent, self._exponent()))
        self._depth -= 1
        return exponent

    def _postfix(self) -> Node:
        node = self._primary()
        while self.peek() == "!":
            self.take()
            double = self.peek() == "!"
            if double:
                self.take()
            node = Node("call", (node,), "factorial2" if double else "factorial")
        return node

    def _argument(self) -> Node:
        """The argument of ^, \\frac or \\sqrt: a braced group, or a single token (one digit of a number)."""
        token = self.peek()
        if token == "{":
            return self._group()
        if token is not None and token[0].isdigit() and len(token) > 1:
            self._tokens[self._at] = token[1:]
            return number(int(token[0]))
        if token == "-":
            self.take()
            return Node("neg", (self._argument(),))
        return self._primary()

    def _group(self) -> Node:
        closing = _OPENING[self.take()]
        node = self.sum()
        self.take(closing)
        return node

    def _primary(self) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Unsupported("nested too deeply")
        node = self._atom()
        self._depth -= 1
        return node

    def _atom(self) -> Node:
        token = self.peek()
        if token is None:
            raise Unsupported("ends too early")
        if token in _OPENING:
            return self._group()
        if token[0].isdigit() or (token[0] == "." and len(token) > 1):
            self.take()
            return _number_token(token)
        if token == "|":
            return self._bars("|")
        if token[0] == "\\":
            return self._command(self.take()[1:])
        if token.isalpha() and token.isascii():
            return self._letter(self.take())
        raise Unsupported(f"unexpected {token!r}")

    def _bars(self, closing: str) -> Node:
        self.take()
        inside = self.sum()
        self.take(closing)
        return Node("call", (inside,), "abs")

    def _letter(self, letter: str) -> Node:
        name = letter + self._subscript()
        if name == "e":
            return Node("const", name="e")
        if name == "i":
            return Node("const", name="i")
        if self.peek() == "(" and (letter in OPAQUE or self._value_in_parentheses()):
            return Node("apply", self.call_arguments(), name)
        return Node("sym", name=name)

    def _value_in_parentheses(self) -> bool:
        """`I(0)`, `x(t)`: a letter before a lone number or the letter t is a function's value, not a product."""
        inside, closing = self.peek(1), self.peek(2)
        return closing == ")" and inside is not None and (inside[0].isdigit() or inside == "t")

    def call_arguments(self) -> tuple[Node, ...]:
        self.take("(")
        arguments = [self.sum()]
        while self.peek() == ",":
            self.take()
            arguments.append(self.sum())
        self.take(")")
        return tuple(arguments)

    def _subscript(self) -> str:
        suffix = ""
        while self.peek() in ("_", "'"):
            if self.take() == "'":
                suffix += "'"
            elif self.peek() == "{":
                depth, start = 0, self._at
                while True:
                    depth += {"{": 1, "}": -1}.get(self.take(), 0)
                    if depth == 0:
                        break
                suffix += "_" + "".join(self._tokens[start + 1 : self._at - 1])
            else:
                suffix += "_" + self.take()
        return suffix

    def _command(self, name: str) -> Node:
        if name in FUNCTIONS and name != "sqrt":
            return self._function(name)
        if name in GREEK:
            return Node("sym", name="\\" + name + self._subscript())
        handler = _COMMANDS.get(name)
        if handler is None:
            raise Unsupported(f"\\{name}")
        return handler(self)

    def fraction(self) -> Node:
        start = self._at
        numerator, denominator = self._argument(), self._argument()
        tokens = "".join(self._tokens[start : self._at])
        if _DERIVATIVE.fullmatch(tokens):
            # dv/dt is one quantity: as a quotient of products its d would cancel.
            return Node("sym", name=tokens)
        return Node("div", (numerator, denominator))

    def decorated(self, mark: str) -> Node:
        r"""\dot{x}, \bar{x}, ...: a letter of its own."""
        start = self._at
        self._argument()
        letter = "".join(self._tokens[start : self._at]).strip("{}")
        return Node("sym", name=f"{mark} {letter}" + self._subscript())

    def root(self) -> Node:
        index = None
        if self.peek() == "[":
            self.take()
            index = self.sum()
            self.take("]")
        radicand = self._argument()
        return Node("call", (radicand,) if index is None else (radicand, index), "sqrt")

    def binomial(self) -> Node:
        return Node("call", (self._argument(), self._argument()), "binomial")

    def _function(self, name: str) -> Node:
        """A named function with its optional base or power and its argument."""
        base = power = None
        for _ in range(2):
            if self.peek() == "_" and name == "log":
                self.take()
                base = self._argument()
            elif self.peek() == "^":
                self.take()
                power = self._argument()
        if name == "log" and base is None and self.peek() == "(" and (pair := self._base_behind()) is not None:
            return Node("call", pair, "log")
        argument = self._function_argument()
        if power is not None and power.kind == "neg" and name in ("sin", "cos", "tan", "cot", "sinh", "cosh", "tanh"):
            return Node("call", (argument,), "arc" + name)
        call = Node("call", (argument,) if base is None else (argument, base), "log" if name == "lg" else name)
        return call if power is None else Node("pow", (call, power))

    def _base_behind(self) -> tuple[Node, ...] | None:
        """The two arguments of log(x, 10)."""
        start = self._at
        arguments = self.call_arguments()
        if len(arguments) == 2:
            return arguments
        self._at = start
        return None

    def _function_argument(self) -> Node:
        """What a function is applied to: a group, or the factors that follow up to an operator or a function."""
        if self.peek() in _OPENING:
            return self._group()
        if self.peek() == "-":
            self.take()
            return Node("neg", (self._function_argument(),))
        node = self._power()
        while self._starts_factor() and not self._at_function() and self.peek() not in ("(", "["):
            node = Node("mul", (node, self._power()))
        if self.peek() == "/":
            # `\sin \pi/4` reads both as sin(pi)/4 and as sin(pi/4).
            raise Unsupported("ambiguous division after a function")
        return node

    def _at_function(self) -> bool:
        token = self.peek()
        return token is not None and token[0] == "\\" and token[1:] in FUNCTIONS and token != "\\sqrt"

    def enclosed(self, closing: str, name: str) -> Node:
        inside = self.sum()
        self.take(closing)
        return Node("call", (inside,), name)


def _number_token(token: str) -> Node:
    """A number as written; `name` is "." for a decimal or e-notation."""
    mantissa, _, exponent = token.lower().partition("e")
    if exponent and abs(int(exponent)) > MAX_EXPONENT:
        raise TooLarge(f"10^{exponent}")
    value = Fraction(mantissa) * Fraction(10) ** int(exponent or 0)
    return Node("num", value=value, name="." if "." in mantissa or exponent else "")


def _constant(name: str) -> Node:
    return Node("const", name=name)


_COMMANDS: dict[str, Callable[[_Parser], Node]] = {
    **{mark: functools.partial(_Parser.decorated, mark=mark) for mark in _MARKS},
    "frac": _Parser.fraction,
    "sqrt": _Parser.root,
    "binom": _Parser.binomial,
    "max": lambda parser: Node("call", parser.call_arguments(), "max"),
    "min": lambda parser: Node("call", parser.call_arguments(), "min"),
    "pi": lambda parser: _constant("pi"),
    "lfloor": lambda parser: parser.enclosed("\\rfloor", "floor"),
    "lceil": lambda parser: parser.enclosed("\\rceil", "ceil"),
    "lvert": lambda parser: parser.enclosed("\\rvert", "abs"),
}
