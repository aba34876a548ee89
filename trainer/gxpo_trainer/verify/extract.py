"""Finding the final answer in a response.

Order of trust: the last balanced ``\\boxed{...}`` or a "final answer is" sentence, whichever comes later; then
``####``; then "the answer is ..." in one of the languages of `words.toml`; then a response that is nothing but an
answer; then the last formula or number of the last line. Boxes with nothing but "and", "or" or a comma between them
make one list; of others the last one counts, for it corrects the earlier ones. Only the last `TAIL_CHARS` characters
are read, so that the cost is bounded whatever the response holds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from gxpo_trainer.verify.tokens import FUNCTIONS
from gxpo_trainer.verify.units import parse_unit
from gxpo_trainer.verify.words import phrases

TAIL_CHARS = 100_000
MAX_ANSWER_CHARS = 4_000

Source = Literal["boxed", "final", "hashes", "answer", "bare", "formula", "number", "choice"]


@dataclass(frozen=True, slots=True)
class Extraction:
    """The final answer as written, and where it was found."""

    text: str
    source: Source


_PLAIN = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)} | {ord(c): " " for c in "\u00a0\u2009\u202f"}
"""Full-width characters and special blanks as plain ones."""
_BRACE = re.compile(r"\\[\\{}]|[{}]")
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*(?=\{)|\\boxed\s+(?=[^\s{])")
_CORRECTION = re.compile(
    r"\b(?:wait|no|not|actually|instead|rather|correct\w*|sorry|so|hence|thus|but|oops|mistake|should|then)\b",
    re.IGNORECASE,
)
_JOINED = re.compile(
    r"\W*(?:(?:[\w()]+\s+){0,4}(?=and|or))?(?:and|or|et|ou|und|oder|y|o|e|和|或)?\W*(?:[A-Za-z]\w*\s*=\W*)?",
    re.IGNORECASE,
)
_PARTS = re.compile(r"\\text\s*\{([^{}]*)\}")
_IS = rf"(?<![A-Za-zÀ-ÿ])(?:{phrases('is')})(?![A-Za-zÀ-ÿ])|[:：=]"
_FINAL = re.compile(rf"final\s+answer\b[^.\n$\\]{{0,100}}?(?:{_IS})\s*:?", re.IGNORECASE)
_ANSWER = re.compile(
    rf"(?<![A-Za-zÀ-ÿ])(?:{phrases('answer')})(?![A-Za-zÀ-ÿ])[^.。\n:：$=0-9\\]{{0,80}}?(?:\*\*|</?b>)?\s*(?:{_IS})\s*(?:\*\*)?\s*:?"
    r"|<answer>",
    re.IGNORECASE,
)
_CHOICE = re.compile(r"(?<![A-Za-z0-9\\$'{])\(?([A-J])(?![A-Za-z0-9'’])\)?")
_CHOICE_ANCHOR = re.compile(
    rf"(?<![A-Za-zÀ-ÿ])(?:{phrases('answer')}|option|choice|opción|选项)(?![A-Za-zÀ-ÿ])"
    r"|\b(?:therefore|so|it's|it is)\b",
    re.IGNORECASE,
)
_TRAILING_ANCHORS = 4
_VERB = re.compile(r"\b(?:is|are|equals)\s")
_REMARK = re.compile(
    r"(?<=[\w$%}*)])\s*"
    r"(?:\((?=[^()]*[a-z]{2})|,?\s*(?:(?:which|because|since|that is|where|out of)\b|i\.e\.))",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"(?<!i\.e)(?<!e\.g)[.!?]\s|。|\n")
_SAID = re.compile(r"(?=(?:\b(?:is|are|has|have)\s+|\*\*)([^.*\n]+)\**\.?\s*$)")
_NEGATED = re.compile(r"\bnot\s+(?:\w+\s+)?$", re.IGNORECASE)
_OTHER_SCRIPT = re.compile(r"[\u0400-\u1fff\u3040-\uffef]")
_HASHES = re.compile(r"(?:^[ \t]*|\s)#{4,}[ \t]*(?P<rest>[^\n#]+)$", re.MULTILINE)
_FORMULA = re.compile(
    r"\$\$(?P<a>(?:[^$\\]|\\.){1,1500}?)\$\$|\\\[(?P<b>(?:[^\\]|\\(?!\])){1,1500}?)\\\]"
    r"|\\\((?P<c>(?:[^\\]|\\(?!\))){1,1500}?)\\\)|(?<!\\)\$(?P<d>(?:[^$\\\n]|\\.){1,1500}?)(?<!\\)\$",
    re.DOTALL,
)
_NUMBER = re.compile(
    r"(?<![A-Za-z0-9_.,])[-+]?(?:\d+\s*/\s*\d+|[$€£¥₹]?\s?"
    r"(?:\d{1,3}(?:[ ,]\d{3})+(?!\d)|\d{1,2}(?:,\d{2})+,\d{3}(?!\d)|\d+)(?:[.,]\d+)?(?:[eE][-+]?\d+)?|\.\d+)"
    r"(?:\s*(?:%|\\%|percent\b|pct\b))?"
    r"|\(\s*-?[\d./]+(?:\s*,\s*-?[\d./]+)+\s*\)|[-+]?\d*√\s?\d+"
    r"|[-+]?\d*\\(?:[dt]?frac\s*\{[^{}]*\}\s*\{[^{}]*\}|sqrt\s*(?:\[\d\])?\s*\{[^{}]*\})"
)
_THINK_END = "</think>"
_CLOSING = re.compile(r"\s*(?:<\|[^|>]{1,40}\|>\s*\w*|</s>|I hope it is correct\.?|\[/?INST\])\s*$", re.IGNORECASE)
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-zÀ-ÿ]{2,}")
_TEXT_COMMAND = re.compile(
    r"\\(?:begin|end|text|mathrm|mbox|textbf|mathbf|textnormal|operatorname|textit)\s*\{[^{}]*\}|\\[A-Za-z]+"
)
_MATH_WORDS = FUNCTIONS | set("and or percent pct percentage pi inf infty in dx dy dt degrees".split())


def extract_answer(response: str) -> Extraction | None:
    """The final answer of a response, or None when it states none."""
    text = _after_thinking(response)[-TAIL_CHARS:]
    text = _without_closing(text).translate(_PLAIN)
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
    if "box" not in text:
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
    """Whether two boxes belong to one answer: nothing but a conjunction, a comma or the next name stands between."""
    if "\n\n" in between or len(between) > 60:
        return False
    words = _PARTS.sub(lambda match: match[1] or "", between)
    return (
        not re.search(r"[.!?](?:\s|\\|$)", words)
        and not _CORRECTION.search(words)
        and _JOINED.fullmatch(words.replace("\\quad", " ")) is not None
    )


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
    """The last `#### 42`; a heading with several words is none."""
    found = [match["rest"].strip() for match in _HASHES.finditer(text)]
    found = [rest for rest in found if len(_words(rest)) <= 3]
    return Extraction(found[-1], "hashes") if found else None


def _answer_sentence(text: str) -> Extraction | None:
    for anchor in reversed(list(_ANSWER.finditer(text))[-_TRAILING_ANCHORS:]):
        answer = _sentence_answer(text[anchor.end() : anchor.end() + MAX_ANSWER_CHARS])
        if answer:
            return Extraction(answer, "answer")
    return None


def _sentence_answer(rest: str) -> str:
    """The answer at the head of `rest`: its formulas when it has some, else its first number, else its words."""
    rest = re.sub(
        r"^(?:[\"'`\s*]|<answer>)+|^\\(?=[\"'])", "", rest.partition("\n\n")[0].partition("</answer>")[0]
    ).strip("\"' ")
    if re.match(r"not\b", rest, re.IGNORECASE):
        return ""
    rest = _without_remark(rest)
    rest = _after_verb(rest)
    formulas = _joined_formulas(rest)
    if formulas is not None:
        return formulas
    sentence = re.split(r"\.(?=\s|$)|。|\n|;\s(?=[A-Z])", rest, maxsplit=1)[0].strip().strip("*\"' ")
    if len(_words(sentence)) <= 2 and not re.match(r"either\b", sentence) and not _OTHER_SCRIPT.search(sentence):
        return sentence
    return _numbers_of(sentence) or sentence


def _numbers_of(sentence: str) -> str:
    """The first number, or the numbers of "3 or 4"; behind a sum (`3 + 4 = 7`) its result."""
    numbers = list(_NUMBER.finditer(sentence))
    if not numbers:
        return ""
    parts = [numbers[0]]
    for number in numbers[1:]:
        between = sentence[parts[-1].end() : number.start()]
        if re.fullmatch(r"\s*(?:,|,?\s*or|,?\s*and)\s*", between):
            parts.append(number)
        elif re.fullmatch(r"[^,;]{0,3}[-+*/×÷=][^,;]{0,40}", between):
            parts = [number]
        else:
            break
    return ", ".join(_with_unit(sentence, part) for part in parts)


def _without_remark(rest: str) -> str:
    """The text up to a remark in parentheses or a clause, when a number or formula stands before it."""
    for remark in _REMARK.finditer(rest[:400]):
        if re.search(r"[0-9$\\]", rest[: remark.start()]) and not re.search(
            r"\\\(?$|\$[^$]*$", rest[: remark.start() + 1].replace("\\$", "")
        ):
            return rest[: remark.start()]
    return rest


def _after_verb(rest: str) -> str:
    """`The largest $n$ is 34. ...` -> `34. ...`: what the first sentence says after its last "is" or "are"."""
    sentence_end = re.search(r"\.(?:\s|$)", rest)
    for verb in reversed(list(_VERB.finditer(rest, 0, sentence_end.start() if sentence_end else len(rest)))):
        if re.search(r"[0-9$\\]", rest[verb.end() :]):
            return rest[verb.end() :]
    return rest


def extract_choice(response: str) -> Extraction | None:
    """The choice letter that a response without a box names in prose; None when it has a box or names none."""
    text = _without_closing(_after_thinking(response)[-TAIL_CHARS:])
    if not text or _boxes(text):
        return None
    head = re.match(r"\W*([A-J])(?=\W|$|[^\x00-\x7f])(?!\s*['’])(?!\s+[a-z])", text)
    for anchor in reversed(list(_CHOICE_ANCHOR.finditer(text))[-_TRAILING_ANCHORS:]):
        sentence = re.split(r"\.(?=\s+[A-Z])|\n\n", text[anchor.end() : anchor.end() + 200], maxsplit=1)[0]
        for letter in _CHOICE.finditer(sentence):
            is_article = letter[1] in ("A", "I") and re.match(r"\s+[a-z]", sentence[letter.end() :]) is not None
            if not _NEGATED.search(sentence[: letter.start()]) and (not is_article or ")" in letter.group()):
                return _choice(sentence, letter)
    first = None if head is None else _CHOICE.search(text, max(0, head.start(1) - 1))
    if first is not None:
        return _choice(text, first)
    letters = {letter[1] for letter in _CHOICE.finditer(text.rsplit("\n", 1)[-1])}
    return Extraction(letters.pop(), "choice") if len(letters) == 1 and len(text) < 400 else None


def _choice(sentence: str, letter: re.Match[str]) -> Extraction:
    """The letter, with the others that "A or B", "(A), (C)" join to it."""
    found = [letter[1]]
    end = letter.end()
    while (
        further := re.match(
            r"\s*(?:,|/|\bor\b|\band\b)\s*(?:and\s+|or\s+)?\(?([A-J])(?![A-Za-z0-9])\)?", sentence[end:]
        )
    ) is not None:
        found.append(further[1])
        end += further.end()
    return Extraction(", ".join(found), "choice")


def _joined_formulas(text: str) -> str | None:
    """The first formula of `text` with those joined to it by "and", "or" or a comma; None without formulas."""
    parts: list[str] = []
    end = 0
    for match in _FORMULA.finditer(text):
        between = text[end : match.start()]
        if parts and not (len(between) <= 20 and _JOINED.fullmatch(between)):
            break
        if len(_words(_formula_text(match))) > 2:
            continue
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
    if re.search(r"[A-Za-zÀ-ÿ]{2,}\s*:", prose) or _OTHER_SCRIPT.search(prose):
        return None
    return Extraction(text, "bare") if len(_words(prose)) <= (1 if prose == text else 0) else None


def _last_line(text: str) -> Extraction | None:
    """The last formula, or else the last number, of the last line that has one; short words stand as they are."""
    text = text[-8_000:]
    formulas = [match for match in _FORMULA.finditer(text) if len(_words(_formula_text(match))) <= 2]
    tail = max(0, len(text) - 2_000)
    start = max((match.end() for match in _SENTENCE_END.finditer(text[:-1])), default=0)
    remark = next((match for match in _REMARK.finditer(text, start) if "which" not in match.group()), None)
    end = len(text) if remark is None else remark.start()
    stated = [number for number in _NUMBER.finditer(text, tail) if not _NEGATED.search(text[: number.start()])]
    numbers = [number for number in stated if number.end() <= end] or stated
    last_formula = formulas[-1] if formulas else None
    last_number = numbers[-1] if numbers else None
    if last_formula is not None and (last_number is None or last_number.start() < last_formula.end()):
        return Extraction(_joined_tail(text, formulas), "formula")
    if last_number is not None:
        listed = re.search(r"(?:[-\d.]+、)+$", text[: last_number.start()])
        return Extraction((listed.group() if listed else "") + _with_unit(text, last_number), "number")
    line = text.rsplit("\n", 1)[-1].strip()
    said = list(_SAID.finditer(line))
    if said and len(said[-1][1].split()) <= 4 < len(line.split()):
        return Extraction(said[-1][1].strip("* "), "bare")
    return Extraction(line, "bare") if len(line) <= 200 else None


def _with_unit(text: str, number: re.Match[str]) -> str:
    """The number with the unit behind it, so that 7 days and 7 weeks differ."""
    unit = re.match(r"\s?[A-Za-zμΩ]+(?:\s?/\s?[A-Za-z]+)?(?![A-Za-z])", text[number.end() : number.end() + 40])
    known = unit is not None and parse_unit(unit.group()) is not None and len(unit.group().strip()) > 1
    return (number.group() + (unit.group() if known and unit is not None else "")).strip()


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
