"""Finding the final answer in a response.

Order of trust: the last balanced ``\\boxed{...}`` or a "final answer is" sentence, whichever comes later; then
``####``; then "answer: ..."; then a response that is nothing but an answer; then the last formula or number of
the last line. Boxes that are joined by "and", "or" or a comma make one list. Only the last `TAIL_CHARS`
characters are read, so that the cost is bounded whatever the response holds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

TAIL_CHARS = 100_000
MAX_ANSWER_CHARS = 4_000

Source = Literal["boxed", "final", "hashes", "answer", "bare", "formula", "number"]


@dataclass(frozen=True, slots=True)
class Extraction:
    """The final answer as written, and where it was found."""

    text: str
    source: Source


_BRACE = re.compile(r"\\[\\{}]|[{}]")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)|\\boxed\s+(?=[^\s{])")
_JOINED = re.compile(r"(?:,|;|\b(?:and|or)\b|^\W*$)", re.IGNORECASE)
_FINAL = re.compile(r"final\s+answer\b[^.\n$\\]{0,100}?(?:\bis\b|[:=])\s*:?", re.IGNORECASE)
_ANSWER = re.compile(
    r"\banswer\b(?:\s+(?:to|of|for)\b[^.\n:$]{0,80}?)?\s*(?:\*\*|</?b>)?\s*(?:\bis\b|[:=])\s*(?:\*\*)?\s*:?|<answer>",
    re.IGNORECASE,
)
_TRAILING_ANCHORS = 4
_VERB = re.compile(r"\b(?:is|are|equals)\s")
_HASHES = re.compile(r"^[ \t]*#{4,}[ \t]*(?P<rest>[^\n]+)$", re.MULTILINE)
_FORMULA = re.compile(
    r"\$\$(?P<a>(?:[^$\\]|\\.){1,1500}?)\$\$|\\\[(?P<b>(?:[^\\]|\\(?!\])){1,1500}?)\\\]"
    r"|\\\((?P<c>(?:[^\\]|\\(?!\))){1,1500}?)\\\)|(?<!\\)\$(?P<d>(?:[^$\\\n]|\\.){1,1500}?)(?<!\\)\$",
    re.DOTALL,
)
_NUMBER = re.compile(
    r"(?<![\w.,])[-+]?(?:(?P<fraction>\d+\s*/\s*\d+)|[$€£¥]?\s?(?:\d{1,3}(?:[ ,]\d{3})+(?!\d)|\d+)(?:[.,]\d+)?|\.\d+)"
    r"(?:\s*(?:%|\\%|percent\b|pct\b))?"
)
_THINK_END = "</think>"
_CLOSING = re.compile(r"\s*(?:<\|[^|>]{1,40}\|>\s*\w*|</s>|I hope it is correct\.?|\[/?INST\])\s*$", re.IGNORECASE)
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-zÀ-ÿ]{2,}")
_TEXT_COMMAND = re.compile(
    r"\\(?:begin|end|text|mathrm|mbox|textbf|mathbf|textnormal|operatorname|textit)\s*\{[^{}]*\}|\\[A-Za-z]+"
)
_MATH_WORDS = frozenset(
    re.findall(
        r"[A-Za-z]+",
        "and or percent pct percentage sin cos tan cot sec csc ln log exp sqrt pi inf infty in dx dy dt degrees",
    )
)


def extract_answer(response: str) -> Extraction | None:
    """The final answer of a response, or None when it states none."""
    text = _after_thinking(response)[-TAIL_CHARS:]
    text = _without_closing(text)
    if not text:
        return None
    for find in (_boxed_or_final, _hashes, _answer_sentence, _bare, _last_line):
        found = find(text)
        if found is not None and found.text:
            return found
    return None


def _after_thinking(response: str) -> str:
    """What follows the last end-of-thinking tag, when anything does."""
    head, tag, tail = response.rpartition(_THINK_END)
    return tail if tag and tail.strip() else (response if not tag else head)


def _without_closing(text: str) -> str:
    """The text without chat-template markers and politeness at its end."""
    text = text.strip()
    while (match := _CLOSING.search(text, max(0, len(text) - 200))) is not None:
        text = text[: match.start()].rstrip()
    return text


def matching_braces(text: str) -> dict[int, int]:
    """Position of each balanced opening brace -> position of its closing one; escaped braces do not count."""
    pairs: dict[int, int] = {}
    opened: list[int] = []
    for match in _BRACE.finditer(text):
        token = match.group()
        if token == "{":
            opened.append(match.start())
        elif token == "}" and opened:
            pairs[opened.pop()] = match.start()
    return pairs


@dataclass(frozen=True, slots=True)
class _Box:
    start: int
    end: int
    content: str


def _boxes(text: str) -> list[_Box]:
    """All outermost balanced boxes, in order of appearance."""
    if "boxed" not in text and "\\fbox" not in text:
        return []
    pairs = matching_braces(text)
    boxes: list[_Box] = []
    for match in _BOX.finditer(text):
        if boxes and match.start() < boxes[-1].end:
            continue
        if text.startswith("{", match.end()):
            closing = pairs.get(match.end())
            if closing is not None:
                boxes.append(_Box(match.start(), closing + 1, text[match.end() + 1 : closing]))
        else:
            token = re.compile(r"[^\s$.,\\]+").match(text, match.end())
            if token is not None:
                boxes.append(_Box(match.start(), token.end(), token.group()))
    return boxes


def _joined(between: str) -> bool:
    """Whether two boxes belong to one answer: a short gap that holds only a conjunction, no new sentence."""
    if len(between) > 60 or "\n\n" in between or re.search(r"[.!?](?:\s|\\|$)", between):
        return False
    return _JOINED.search(between.strip("$ \\()[]\n")) is not None


def boxed_answer(text: str) -> tuple[str, int] | None:
    """The last boxed answer and the position where it ends; joined boxes become a comma list."""
    boxes = _boxes(text)
    if not boxes:
        return None
    parts = [boxes[-1]]
    for box in reversed(boxes[:-1]):
        if not _joined(text[box.end : parts[0].start]):
            break
        parts.insert(0, box)
    contents = [_innermost(box.content) for box in parts]
    return ", ".join(content.strip() for content in contents), boxes[-1].end


def count_boxes(response: str) -> int:
    """Outermost balanced boxes behind the end of the thinking, if any."""
    return len(_boxes(_after_thinking(response)[-TAIL_CHARS:]))


def every_box(response: str) -> str | None:
    """All different boxed answers as one comma list; None with fewer than two."""
    boxes = _boxes(_after_thinking(response)[-TAIL_CHARS:])
    contents = list(dict.fromkeys(_innermost(box.content).strip() for box in boxes))
    return ", ".join(contents) if len(contents) > 1 else None


def _innermost(content: str) -> str:
    """The content of a box inside a box."""
    for _ in range(4):
        inner = _boxes(content)
        if not inner:
            break
        content = inner[-1].content
    return content


def _boxed_or_final(text: str) -> Extraction | None:
    boxed = boxed_answer(text)
    for anchor in reversed(list(_FINAL.finditer(text))[-_TRAILING_ANCHORS:]):
        if boxed is not None and anchor.start() < boxed[1]:
            break
        answer = _sentence_answer(text[anchor.end() : anchor.end() + MAX_ANSWER_CHARS])
        if answer and (boxed is None or re.search(r"[\d$\\]", answer)):
            return Extraction(answer, "final")
    return None if boxed is None else Extraction(boxed[0].strip(), "boxed")


def _hashes(text: str) -> Extraction | None:
    found = None
    for found in _HASHES.finditer(text):  # noqa: B007 - the last match is wanted
        pass
    return None if found is None else Extraction(found.group("rest").strip(), "hashes")


def _answer_sentence(text: str) -> Extraction | None:
    for anchor in reversed(list(_ANSWER.finditer(text))[-_TRAILING_ANCHORS:]):
        answer = _sentence_answer(text[anchor.end() : anchor.end() + MAX_ANSWER_CHARS])
        if answer:
            return Extraction(answer, "answer")
    return None


def _sentence_answer(rest: str) -> str:
    """The answer at the head of `rest`: its formulas when it has some, else up to the end of the sentence."""
    rest = re.sub(r"^[\"'`\s*]+|^\\(?=[\"'])", "", rest.partition("\n\n")[0].partition("</answer>")[0]).strip("\"' ")
    rest = _after_verb(rest)
    formulas = _joined_formulas(rest)
    if formulas is not None:
        return formulas
    sentence = re.split(r"\.(?=\s|$)|\n|;\s(?=[A-Z])", rest, maxsplit=1)[0].strip().strip("*\"' ")
    if len(_words(sentence)) <= 2:
        return sentence
    numbers = list(_NUMBER.finditer(sentence))
    return numbers[-1].group().strip() if numbers else sentence


def _after_verb(rest: str) -> str:
    """`The largest $n$ is 34. ...` -> `34. ...`: what the first sentence says after its last "is" or "are"."""
    sentence_end = re.search(r"\.(?:\s|$)", rest)
    for verb in reversed(list(_VERB.finditer(rest, 0, sentence_end.start() if sentence_end else len(rest)))):
        if re.search(r"[0-9$\\]", rest[verb.end() :]):
            return rest[verb.end() :]
    return rest


def _joined_formulas(text: str) -> str | None:
    """The first formula of `text` with those joined to it by "and", "or" or a comma; None without formulas."""
    parts: list[str] = []
    end = 0
    for match in _FORMULA.finditer(text):
        between = text[end : match.start()]
        if parts and not (len(between) <= 20 and _JOINED.search(between.strip(" \"'"))):
            break
        parts.append(_formula_text(match))
        end = match.end()
    if not parts:
        return None
    after = re.match(r"\s*(?:\\?%|percent\b|pct\b)", text[end:])
    return ", ".join(parts) + (after.group() if after else "")


def _formula_text(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group is not None).strip()


def _words(text: str) -> list[str]:
    """Words of natural language: no commands, no text inside formulas, no function names."""
    return [word for word in _WORD.findall(_TEXT_COMMAND.sub(" ", text)) if word.lower() not in _MATH_WORDS]


def _bare(text: str) -> Extraction | None:
    """A response that is nothing but an answer: one line, hardly a word of prose."""
    if len(text) > 400 or "\n\n" in text:
        return None
    prose = _FORMULA.sub(" ", text)
    if re.search(r"[A-Za-zÀ-ÿ]{2,}\s*:", prose):
        return None
    return Extraction(text, "bare") if len(_words(prose)) <= (1 if prose == text else 0) else None


def _last_line(text: str) -> Extraction | None:
    """The last formula, or else the last number, of the last line that has one; short words stand as they are."""
    text = text[-8_000:]
    formulas = list(_FORMULA.finditer(text))
    numbers = list(_NUMBER.finditer(text, max(0, len(text) - 2_000)))
    last_formula = formulas[-1] if formulas else None
    last_number = numbers[-1] if numbers else None
    if last_formula is not None and (last_number is None or last_number.start() < last_formula.end()):
        return Extraction(_joined_tail(text, formulas), "formula")
    if last_number is not None:
        return Extraction(last_number.group().strip(), "number")
    line = text.rsplit("\n", 1)[-1].strip()
    return Extraction(line, "bare") if len(line) <= 200 else None


def _joined_tail(text: str, formulas: list[re.Match[str]]) -> str:
    """The last formula together with those joined to it."""
    parts = [formulas[-1]]
    for match in reversed(formulas[:-1]):
        between = text[match.end() : parts[0].start()]
        if not re.fullmatch(r"\s*(?:,|,?\s*and|,?\s*or)\s*", between):
            break
        parts.insert(0, match)
    after = re.match(r"\s*(?:\\?%|percent\b|pct\b)", text[parts[-1].end() :])
    return ", ".join(_formula_text(part) for part in parts) + (after.group() if after else "")
