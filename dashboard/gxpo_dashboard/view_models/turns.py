"""Turns of a response in an environment. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gxpo_client.formats import signed

SPEAKERS = {"policy": "Policy", "environment": "Environment"}
ENDS = {
    "done": "ended by the environment",
    "max_turns": "turn limit reached",
    "length": "token limit reached",
    "timeout": "environment timed out",
    "error": "environment failed",
}
LONG_TURN = 1500
"""Characters of a turn that are shown at first."""


@dataclass(frozen=True, slots=True)
class TurnRow:
    """A turn to show. heading: speaker, number and reward. text: untrusted. cut: its beginning if it is long."""

    heading: str
    text: str
    cut: str | None


def turn_rows(item: Mapping[str, Any]) -> list[TurnRow]:
    """The turns of a sample in order; none for a response of a single turn."""
    rows, exchange = [], 0
    for turn in item.get("turns") or []:
        exchange += turn["speaker"] == "policy"
        reward = turn.get("reward")
        given = "" if reward is None else f", reward {signed(reward)}"
        text = turn["text"]
        cut = f"{text[:LONG_TURN]}…" if len(text) > LONG_TURN else None
        rows.append(TurnRow(f"{SPEAKERS.get(turn['speaker'], 'Unknown')}, turn {exchange}{given}", text, cut))
    return rows


def episode_facts(item: Mapping[str, Any]) -> str:
    """How the episode ended, what the policy wrote of it, and where its reward came from; empty for a single turn."""
    if item.get("end") is None:
        return ""
    rewarded = any(turn.get("reward") is not None for turn in item.get("turns") or [])
    source = "environment" if rewarded else "verifier"
    facts = [ENDS.get(item["end"], item["end"]), f"{item['sampled_length']} of {item['length']} tokens by the policy"]
    return ", ".join([*facts, *([] if item.get("reward") is None else [f"reward from the {source}"])])
