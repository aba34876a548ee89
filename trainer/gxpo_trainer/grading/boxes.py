"""Boxed answers: `\boxed{...}` and its variants, alone or joined to a list."""

from __future__ import annotations

import re
from dataclasses import dataclass

TAIL_CHARS = 100_000
"""Only the end of a response is read, so that the cost is bounded."""
_BRACE = re.compile(r"\\[\\{}]|[{}]")
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*(?=\{)|\\boxed\s+(?P<bare>[^\s{$.,\\][^\s$.,\\]*)")
_CORRECTION = re.compile(
    r"\b(?:wait|no|not|actually|instead|rather|correct\w*|sorry|so|hence|thus|but|oops|mistake|should|then)\b",
    re.IGNORECASE,
)
JOINED = re.compile(
    r"\W*(?:(?:[\w()]+\s+){0,4}(?=and|or))?(?:and|or|et|ou|und|oder|y|o|e|和|或)?\W*(?:[A-Za-z]\w*\s*=\W*)?",
    re.IGNORECASE,
)
_PARTS = re.compile(r"\\text\s*\{([^{}]*)\}")
_THINK_END = "</think>"


def response_tail(response: str) -> str:
    """The end of a response: what follows the last end-of-thinking tag, when anything does."""
    head, tag, text = response.rpartition(_THINK_END)
    return (text if text.strip() or not tag else head)[-TAIL_CHARS:].strip()


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


def find_boxes(text: str) -> list[_Box]:
    """All outermost balanced boxes, in order of appearance."""
    if "box" not in text:
        return []
    pairs = matching_braces(text)
    boxes: list[_Box] = []
    for match in _BOX.finditer(text):
        closing = match.end() if match["bare"] else pairs.get(match.end())
        if closing is not None and not (boxes and match.start() < boxes[-1].end):
            content = match["bare"] or text[match.end() + 1 : closing]
            boxes.append(_Box(match.start(), closing + (not match["bare"]), content))
    return boxes


def _joined(between: str) -> bool:
    """Whether two boxes belong to one answer: nothing but a conjunction, a comma or the next name stands between."""
    if "\n\n" in between or len(between) > 60:
        return False
    words = _PARTS.sub(lambda match: match[1] or "", between)
    return (
        not re.search(r"[.!?](?:\s|\\|$)", words)
        and not _CORRECTION.search(words)
        and JOINED.fullmatch(words.replace("\\quad", " ")) is not None
    )


def boxed_answer(text: str) -> tuple[str, int] | None:
    """The last boxed answer and the position where it ends; joined boxes become a comma list."""
    boxes = find_boxes(text)
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
    return len(find_boxes(response_tail(response)))


def every_box(response: str) -> str | None:
    """All different boxed answers as one comma list; None with fewer than two."""
    boxes = find_boxes(response_tail(response))
    contents = list(dict.fromkeys(_innermost(box.content).strip() for box in boxes))
    return ", ".join(contents) if len(contents) > 1 else None


def _innermost(content: str) -> str:
    """The content of a box inside a box."""
    for _ in range(4):
        content = inner[-1].content if (inner := find_boxes(content)) else content
    return content
