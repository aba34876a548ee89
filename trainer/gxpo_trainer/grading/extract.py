r"""Finding the final answer in a response.

Order of trust: the last balanced `\boxed{...}` or a "final answer is" sentence, whichever comes later; then
`####`; then "the answer is ..." in one of the languages of `words.toml`; then a response that is nothing but an
answer; then the last formula or number of the last line. Boxes with nothing but "and", "or" or a comma between them
make one list; of others the last one counts, for it corrects the earlier ones. Only the last `TAIL_CHARS` characters
are read, so that the cost is bounded whatever the response holds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gxpo_trainer.grading.latex import FULL_WIDTH, FUNCTIONS
from gxpo_trainer.grading.units import PHRASES, WORDS, parse_unit

MAX_ANSWER_CHARS = 4_000
TAIL_CHARS = 100_000
"""Only the end of a response is read, so that the cost is bounded."""
_BRACE = re.compile(r"\\[\\{}]|[{}]")
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*(?=\{)|\\boxed\s+(?P<bare>[^\s{$.,\\][^\s$.,\\]*)")
_JOINED = re.compile(
    r"[^\w.!?]*(?:(?:[\w()]+\s+){0,4}(?:and|or))?[^\w.!?]*(?:[A-Za-z]\w*\s*=[^\w.!?]*)?", re.IGNORECASE
)
_PARTS = re.compile(r"\\text\s*\{([^{}]*)\}")
_THINK_END = "</think>"
_PLAIN = FULL_WIDTH | dict.fromkeys(map(ord, "\u00a0\u2009\u202f"), " ")
"""Full-width characters and special blanks as plain ones."""
_IS = rf"(?<![A-Za-zÀ-ÿ])(?:{PHRASES['is']})(?![A-Za-zÀ-ÿ])|[:：=]"
_FINAL = re.compile(rf"final\s+answer\b[^.\n$\\]{{0,100}}?(?:{_IS})\s*:?", re.IGNORECASE)
_ANSWER = re.compile(
    rf"(?<![A-Za-zÀ-ÿ])(?:{PHRASES['answer']})(?![A-Za-zÀ-ÿ])[^.。\n:：$=0-9\\]{{0,80}}?(?:\*\*|</?b>)?\s*(?:{_IS})\s*(?:\*\*)?\s*:?"
    r"|<answer>",
    re.IGNORECASE,
)
_TRAILING_ANCHORS = 4
_VERB = re.compile(r"\b(?:is|are|equals)\s")
_REMARK = re.compile(
    r"(?<=[\w$%}*)])\s*"
    r"(?:\((?=[^()]*[a-z]{2}|i\.e|e\.g)|,?\s*(?:(?:which|because|since|that is|where|out of)\b|i\.e\.))",
    re.IGNORECASE,
)
_ASIDE = re.compile(
    r"(?<=[\w$%}*)]),?\s+(?:because|since|which|that is|i\.e)\b|(?<=\d),?\s+as\b|,\s*not\s"
    r"|(?<=[\d$%}*)])\s+\((?:i\.e|e\.g|(?:because|since|which|that is)\b"
    rf"|(?:{'|'.join(WORDS['numbers']['small'].split())})\s+(?:squared|cubed)\))",
    re.IGNORECASE,
)
"""A remark behind a short answer, to be cut. Other words in brackets stay, as they may be a factor, a unit, a condition
or a modulus."""
_CONCLUSION = re.compile(r",?\s(?:so(?!\sthat\b)|hence|thus|therefore)\s(?=.*[\d=])", re.IGNORECASE)
_SENTENCE_END = re.compile(r"(?<!i\.e)(?<!e\.g)[.!?]\s|。|\n")
_NEGATED = re.compile(r"\b(?:not|cannot|never)\s+(?:\w+\s+)?$", re.IGNORECASE)
_OTHER_SCRIPT = re.compile(r"[\u0400-\u1fff\u3040-\uffef]")
_HASHES = re.compile(r"(?:^[ \t]*|\s)#{4,}[ \t]*(?P<rest>[^\n#]+)$", re.MULTILINE)
_FORMULA = re.compile(
    r"\$\$(?P<a>(?:[^$\\]|\\.){1,1500}?)\$\$|\\\[(?P<b>(?:[^\\]|\\(?!\])){1,1500}?)\\\]"
    r"|\\\((?P<c>(?:[^\\]|\\(?!\))){1,1500}?)\\\)|(?<!\\)\$(?P<d>(?:[^$\\\n]|\\.){1,1500}?)(?<!\\)\$",
    re.DOTALL,
)
_PI = r"(?:π|\\pi(?![A-Za-z])|(?<![A-Za-z])pi\b)"
_NUMBER = re.compile(
    r"(?:(?<!\d)[-+]?\d*(?:√\s?\d+|\\(?:[dt]?frac\s*\{[^{}]*\}\s*\{[^{}]*\}|sqrt\s*(?:\[\d\])?\s*\{[^{}]*\}))"
    r"|(?<![A-Za-z0-9_.,])[-+]?(?:\d+\s*/\s*\d+|[$€£¥₹]?\s?"
    r"(?:\d{1,3}(?:[ ,]\d{3})+(?!\d)|\d{1,2}(?:,\d{2})+,\d{3}(?!\d)|\d+)(?:[.,]\d+)?(?:[eE][-+]?\d+)?|\.\d+)"
    r"(?:\s*(?:%|\\%|percent\b|pct\b))?"
    rf"|\(\s*-?[\d./]+(?:\s*,\s*-?[\d./]+)+\s*\))(?:\s*{_PI}(?:\s*/\s*\d+)?)?|[-+]?{_PI}\s*/\s*\d+"
)
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-zÀ-ÿ]{2,}")
_TEXT_COMMAND = re.compile(
    r"\\(?:begin|end|text|mathrm|mbox|textbf|mathbf|textnormal|operatorname|textit)\s*\{[^{}]*\}|\\[A-Za-z]+"
)
_MATH_WORDS = FUNCTIONS | set("and or percent pct percentage pi inf infty in dx dy dt degrees".split())


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
    words = _PARTS.sub(lambda match: match[1] or "", between).replace("\\quad", " ")
    return "\n\n" not in between and len(between) <= 60 and _JOINED.fullmatch(words) is not None


def boxed_answer(text: str) -> tuple[str, int] | None:
    """The last boxed answer and the position where it ends; joined boxes become a comma list."""
    boxes = find_boxes(text)
    if not boxes:
        return None
    parts, start = [boxes[-1].content.strip()], boxes[-1].start
    for box in reversed(boxes[:-1]):
        between, content = text[box.end : start], box.content.strip()
        if not _joined(between):
            break
        if content != parts[0] or re.search("[,;A-Za-z]", between):  # else the same answer twice
            parts.insert(0, content)
        start = box.start
    return ", ".join(parts), boxes[-1].end


def every_box(response: str) -> str | None:
    """All different boxed answers as one comma list; None with fewer than two."""
    boxes = find_boxes(response_tail(response))
    contents = list(dict.fromkeys(box.content.strip() for box in boxes))
    return ", ".join(contents) if len(contents) > 1 else None


def extract_answer(response: str) -> str:
    """The final answer of a response; empty when it states none."""
    text = response_tail(response).translate(_PLAIN)
    finders = (_boxed_or_final, _hashes, _answer_sentence, _bare, _last_line)
    return next((answer for find in finders if (answer := find(text))), "")


def extract_box(response: str) -> str:
    """The last boxed answer of a response; empty when it has none."""
    boxed = boxed_answer(response_tail(response).translate(_PLAIN))
    return "" if boxed is None else boxed[0].strip()


def _boxed_or_final(text: str) -> str:
    boxed = boxed_answer(text)
    for anchor in reversed(list(_FINAL.finditer(text))[-_TRAILING_ANCHORS:]):
        if boxed is not None and anchor.start() < boxed[1]:
            break
        answer = _sentence_answer(text[anchor.end() : anchor.end() + MAX_ANSWER_CHARS])
        if answer and (boxed is None or re.search(r"[\d$\\]", answer)):
            return answer
    return "" if boxed is None else boxed[0].strip()


def _hashes(text: str) -> str:
    """The last `#### 42`; a heading with several words is none."""
    answers = [rest for match in _HASHES.finditer(text) if len(_words(rest := match["rest"].strip())) <= 3]
    return _concluded(answers[-1]) if answers else ""


def _answer_sentence(text: str) -> str:
    ends = [anchor.end() for anchor in _ANSWER.finditer(text)][: -_TRAILING_ANCHORS - 1 : -1]
    return next((answer for end in ends if (answer := _sentence_answer(text[end : end + MAX_ANSWER_CHARS]))), "")


def _sentence_answer(rest: str) -> str:
    """The answer at the head of `rest`: its formulas when it has some, else its first number, else its words."""
    rest = re.sub(
        r"^(?:[\"'`\s*]|<answer>)+|^\\(?=[\"'])", "", rest.partition("\n\n")[0].partition("</answer>")[0]
    ).strip("\"' ")
    if re.match(r"not\b", rest, re.IGNORECASE):
        return ""
    rest = _after_verb(rest)
    groups = _formula_groups(rest)
    if groups:
        return _listed(rest, groups[0])
    sentence = re.split(r"\.(?=\s|$)|。|\n|;\s(?=[A-Z])", rest, maxsplit=1)[0].strip().strip("*\"' ")
    if len(_words(sentence)) <= 2 and not re.match(r"either\b", sentence) and not _OTHER_SCRIPT.search(sentence):
        return _concluded(sentence)
    return _numbers_of(sentence) or sentence


def _concluded(text: str) -> str:
    """`2x = 18 so x = 9` -> `x = 9`; `42 because 6*7=42` -> `42`: without steps before and remarks behind."""
    return _ASIDE.split(_CONCLUSION.split(text)[-1], maxsplit=1)[0]


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


def _after_verb(rest: str) -> str:
    """`The largest $n$ is 34. ...` -> `34. ...`: what the first sentence says after its last "is" or "are"."""
    sentence_end = re.search(r"\.(?:\s|$)", rest)
    for verb in reversed(list(_VERB.finditer(rest, 0, sentence_end.start() if sentence_end else len(rest)))):
        if re.search(r"[0-9$\\]", rest[verb.end() :]):
            return rest[verb.end() :]
    return rest


def _formula_groups(text: str) -> list[list[re.Match[str]]]:
    """The formulas of `text`, those joined by "and", "or" or a comma together; prose between dollar signs is none."""
    groups: list[list[re.Match[str]]] = []
    for match in _FORMULA.finditer(text):
        if len(_words(match.group())) > 2:
            continue
        between = text[groups[-1][-1].end() : match.start()] if groups else ""
        if groups and len(between) <= 20 and _JOINED.fullmatch(between):
            groups[-1].append(match)
        else:
            groups.append([match])
    return groups


def _listed(text: str, group: list[re.Match[str]]) -> str:
    """A group of formulas as one comma list, with the percent sign behind it."""
    percent = re.match(r"\s*(?:\\?%|percent\b|pct\b)", text[group[-1].end() :])
    formulas = ("".join(filter(None, match.groups())).strip() for match in group)
    return ", ".join(formulas) + (percent.group() if percent else "")


def _words(text: str) -> list[str]:
    """Words of natural language: no commands, no text inside formulas, no function names."""
    return [word for word in _WORD.findall(_TEXT_COMMAND.sub(" ", text)) if word.lower() not in _MATH_WORDS]


def _bare(text: str) -> str:
    """A response that is nothing but an answer: one line, hardly a word of prose."""
    if len(text) > 400 or "\n\n" in text:
        return ""
    prose = _FORMULA.sub(" ", text)
    if re.search(r"[A-Za-zÀ-ÿ]{2,}\s*:", prose) or _OTHER_SCRIPT.search(prose):
        return ""
    return _concluded(text) if len(_words(prose)) <= (1 if prose == text else 0) else ""


def _last_line(text: str) -> str:
    """The last formula, or else the last number, of the last line that has one; short words stand as they are."""
    text = text[-8_000:]
    groups = _formula_groups(text)
    start = max((match.end() for match in _SENTENCE_END.finditer(text[:-1])), default=0)
    end = next((match.start() for match in _REMARK.finditer(text, start) if "which" not in match.group()), len(text))
    candidates = _NUMBER.finditer(text, max(0, len(text) - 2_000))
    stated = [number for number in candidates if not _NEGATED.search(text, max(0, number.start() - 40), number.start())]
    numbers = [number for number in stated if number.end() <= end] or stated
    if groups and not (numbers and numbers[-1].start() >= groups[-1][-1].end()):
        return _listed(text, groups[-1])
    if numbers:
        return _with_unit(text, numbers[-1])
    line = text.rsplit("\n", 1)[-1].strip()
    return line if len(line) <= 200 else ""


def _with_unit(text: str, number: re.Match[str]) -> str:
    """The number with the unit behind it, so that 7 days and 7 weeks differ."""
    unit = re.match(r"\s?[A-Za-zμΩ]+(?:\s?/\s?[A-Za-z]+)?(?![A-Za-z])", text[number.end() : number.end() + 40])
    known = unit is not None and parse_unit(unit.group()) is not None and len(unit.group().strip()) > 1
    return (number.group() + (unit.group() if known and unit is not None else "")).strip()
