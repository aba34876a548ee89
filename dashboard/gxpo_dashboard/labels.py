"""Labels and messages of the pages, and escaping of untrusted text. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from itertools import takewhile
from typing import Any

STATES: dict[str, str] = {
    "queued": "◔ queued",
    "starting": "◑ starting",
    "running": "▶ running",
    "recovering": "↻ recovering",
    "pausing": "‖ pausing",
    "paused": "‖ paused",
    "cancelling": "■ cancelling",
    "succeeded": "✔ succeeded",
    "failed": "✘ failed",
    "cancelled": "■ cancelled",
}
"""A symbol and a word: colour is never the only cue."""
NO_HEARTBEAT = "! no heartbeat"
STATE_COLORS: dict[str, str] = {
    **dict.fromkeys(("queued", "cancelling", "cancelled"), "gray"),
    **dict.fromkeys(("starting", "running"), "blue"),
    **dict.fromkeys(("recovering", "pausing", "paused"), "orange"),
    "succeeded": "green",
    "failed": "red",
}
TERMINAL = frozenset({"succeeded", "failed", "cancelled"})

REASONS: dict[str, str] = {
    "invalid_config": "Invalid config. The message names the setting; clone the run and fix it.",
    "no_resources": "The cluster is too small for the run. Lower its placement, or add machines.",
    "setup_failed": "The run did not start; see the log. A common cause is a wrong model or data path.",
    "out_of_memory": "A process ran out of memory. Lower token_budget, prompts_per_step or max_new_tokens.",
    "disk_full": "The disk is full. The last checkpoint is valid; free space and retry.",
    "verifier_failed": "Too many responses have no reward. Samples of the last step have the reasons.",
    "weight_sync_mismatch": "Sampler and learner have different weights; later results would be invalid.",
    "diverged": "Three consecutive steps were not finite. Lower the learning rate, or enable the scale clamp.",
    "lost_heartbeat": "The trainer was lost too often. See the log and the events.",
    "stalled": "A phase made no progress within its time-out. The message names the phase; the log has the stacks.",
    "training_error": "The trainer failed with an error; see the log.",
    "steps_done": "All steps are done.",
    "budget_reached": "A budget limit is reached.",
}
VERDICT_COLORS = {"correct": "green", "wrong": "red", "unparsed": "orange", "timeout": "orange", "error": "orange"}
VERDICTS = {
    "correct": "✔ correct",
    "wrong": "✘ wrong",
    "unparsed": "? no answer found",
    "timeout": "◷ grader timed out",
    "error": "! grader failed",
    "ungraded": "– no answer to compare with",
}
ACTIONS = {
    "cancel": ("Cancel", ":material/stop_circle:"),
    "pause": ("Pause", ":material/pause_circle:"),
    "resume": ("Resume", ":material/play_circle:"),
    "clone": ("Clone", ":material/content_copy:"),
    "retry": ("Retry", ":material/replay:"),
}
NO_RIGHT = "Your token is read-only. Use a token with role submitter."

_FORMULA = re.compile(
    # None contains its own opening: the search for its end would restart at each. `\\[2pt]` ends a row.
    r"\\\(((?:(?!\\\().)+?)\\\)|(?<!\\)\\\[((?:(?!(?<!\\)\\\[).)+?)\\\]"
    r"|\$\$(.+?)\$\$|\$(?!\s)([^$\n]{1,400}?)(?<!\s)\$(?!\d)",
    re.DOTALL,
)
_UNSAFE = re.compile(r"\\(href|url|html\w*|includegraphics|def|gdef|xdef|newcommand|renewcommand|let|input|include)\b")
_WORD = re.compile(r"\w+|\s+|[^\w\s]")
_MOST_COMPARED = 300
"""Words, blanks and marks of two texts whose differences are looked for. The time grows with the third power of their
number where they repeat themselves, and no other page is drawn meanwhile."""
_SPECIAL = re.compile(r"([\\`*_{}\[\]()#+\-.!|~$:<>=^&])")
_TYPESET = re.compile(r"(?<!\S)(?:<->|->|<-|--|>=|<=|~=)(?!\S)")
"""What Streamlit replaces with a symbol, such as an arrow."""


def plain(text: object) -> str:
    """Untrusted text, escaped for Markdown, on one line."""
    words = " ".join(str(text).split())
    # URLs become links, and marks become symbols, even when escaped; a word joiner prevents it.
    for mark in ("://", "www.", "@"):
        words = words.replace(mark, f"{mark[:-1]}\u2060{mark[-1]}" if len(mark) > 1 else f"{mark}\u2060")
    words = _TYPESET.sub(lambda match: f"{match[0][0]}\u2060{match[0][1:]}", words)
    return _SPECIAL.sub(r"\\\1", words)


def with_formulas(text: str) -> str | None:
    """Untrusted text with its TeX formulas for Markdown and everything else escaped; None without a formula.

    A formula that could end early or load something stays text: KaTeX runs with `trust` off, and of the commands that
    it has then none leaves the formula.
    """
    parts, end = [], 0
    for match in _FORMULA.finditer(text):
        body = next(part for part in match.groups() if part is not None).strip()
        if not body or "$" in body or "`" in body or _UNSAFE.search(body):
            continue
        parts += [_escaped_lines(text[end : match.start()]), f"${' '.join(body.split())}$"]
        end = match.end()
    return "".join([*parts, _escaped_lines(text[end:])]) if parts else None


def differing(text: str, other: str) -> str:
    """Untrusted text, escaped for Markdown, with a background under the words that `other` does not have there; without
    any where the first difference is far from the last."""
    words, others = (_WORD.findall(part) for part in (text, other))
    first = _num_shared(words, others)
    last = _num_shared(words[first:][::-1], others[first:][::-1])
    before, after = words[:first], words[len(words) - last :]
    words, others = words[first : len(words) - last], others[first : len(others) - last]
    if max(len(words), len(others)) > _MOST_COMPARED:
        return _escaped_lines(text)
    parts = [_escaped_lines("".join(before))]
    for kind, _, _, begin, end in SequenceMatcher(None, others, words, autojunk=False).get_opcodes():
        part = "".join(words[begin:end])
        marked = part.strip() and kind != "equal"
        left, right = (" " if blank.isspace() else "" for blank in (part[:1], part[-1:]))
        parts.append(f"{left}:orange-background[{plain(part)}]{right}" if marked else _escaped_lines(part))
    return "".join([*parts, _escaped_lines("".join(after))])


def _num_shared(words: Sequence[str], others: Sequence[str]) -> int:
    """The number of words with which both begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(words, others, strict=False)))


def _escaped_lines(text: str) -> str:
    """Each line escaped, with a blank where it begins or ends with one."""
    return "  \n".join(
        f"{' ' if line[:1].isspace() else ''}{plain(line)}{' ' if line.strip() and line[-1:].isspace() else ''}"
        for line in text.split("\n")
    )


def state_chip(state: str) -> str:
    """The state as a coloured badge in Markdown."""
    return f":{STATE_COLORS.get(state, 'gray')}-badge[{plain(STATES.get(state, state))}]"


def unique_labels(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Run id → unique label: the name, with the seed or the end of the id where names repeat."""
    labels: dict[str, str] = {}
    seeds_of: dict[str, list[Any]] = {}
    for view in runs.values():
        seeds_of.setdefault(view["name"], []).append(view.get("seed"))
    for run, view in runs.items():
        seeds = seeds_of[view["name"]]
        told_by_seed = len(set(seeds)) == len(seeds)
        mark = "" if len(seeds) == 1 else f" (seed {view.get('seed')})" if told_by_seed else f" ({run[-6:]})"
        labels[run] = f"{view['name']}{mark}"
    if len(set(labels.values())) < len(labels):  # a name looks like the label of another run
        labels = {run: f"{view['name']} ({run[-6:]})" for run, view in runs.items()}
    return labels
