"""Words of the pages that more than one place needs, and how foreign text becomes harmless. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
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
"""A sign and a word, so that no state is told by colour alone."""
TERMINAL = frozenset({"succeeded", "failed", "cancelled"})
ACTIVE = tuple(state for state in STATES if state not in TERMINAL)

REASONS: dict[str, str] = {
    "invalid_config": "The config cannot be used. The detail names the setting; clone the run and mend it.",
    "no_resources": "The cluster can never offer what the run asks for. Lower its placement, or add machines.",
    "setup_failed": "It did not start. The log says why: often a model or data path.",
    "out_of_memory": "A process ran out of memory. Lower token_budget, prompts_per_step or max_new_tokens.",
    "disk_full": "The disk is full. The earlier checkpoint is valid; make room and retry.",
    "verifier_failed": "Too many answers could not be graded. See the samples with verdict timeout or error.",
    "weight_sync_mismatch": "Sampler and learner disagreed about the policy; nothing after that can be trusted.",
    "diverged": "Three steps in a row were not finite. Lower the learning rate, or turn the scale clamp on.",
    "lost_heartbeat": "The trainer fell silent too often. The log and the events say what happened.",
    "training_error": "The trainer stopped with an error. The log has it.",
    "steps_done": "All steps are done.",
    "budget_reached": "A bound of the budget is reached.",
}
VERDICTS = {
    "correct": "✔ correct",
    "wrong": "✘ wrong",
    "unparsed": "? no answer found",
    "timeout": "◷ grader timed out",
    "error": "! grader failed",
}
ACTIONS = {
    "cancel": ("Cancel", ":material/stop_circle:"),
    "pause": ("Pause", ":material/pause_circle:"),
    "resume": ("Resume", ":material/play_circle:"),
    "clone": ("Clone", ":material/content_copy:"),
    "retry": ("Retry", ":material/replay:"),
}
NO_RIGHT = "Your token only reads; this needs a submitter's token."

_SPECIAL = re.compile(r"([\\`*_{}\[\]()#+\-.!|~$:<>=^])")


def plain(text: object) -> str:
    """Foreign text for places that would render Markdown: shown as it is, on one line."""
    words = " ".join(str(text).split())
    # Addresses become links even when they are escaped; an invisible joiner keeps them text.
    for mark in ("://", "www.", "@"):
        words = words.replace(mark, f"{mark[:-1]}\u2060{mark[-1]}" if len(mark) > 1 else f"{mark}\u2060")
    return _SPECIAL.sub(r"\\\1", words)


def state_word(state: str) -> str:
    return STATES.get(state, state)


def why(run: Mapping[str, Any]) -> str:
    """What a run's reason means, with its detail; empty when there is none."""
    reason = run.get("reason")
    meaning = REASONS.get(reason, "") if isinstance(reason, str) else ""
    return " ".join(part for part in (meaning, str(run.get("detail") or "")) if part)


def unique_labels(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Run id → a name to show: the run's own, with its seed or the end of its id where names repeat."""
    names = {run: str(view["name"]) for run, view in runs.items()}
    labels: dict[str, str] = {}
    for run, name in names.items():
        same = [other for other in names if names[other] == name]
        seeds = {runs[other].get("seed") for other in same}
        if len(same) == 1:
            labels[run] = name
        elif len(seeds) == len(same):
            labels[run] = f"{name} (seed {runs[run].get('seed')})"
        else:
            labels[run] = f"{name} ({run[-6:]})"
    return labels
