"""The calculator's loop with OpenAI's client, imported once, as at the top of an agent of one's own."""

from __future__ import annotations

from typing import Any

from openai import OpenAI

from benchmarks.agent_programs import Messages, calculator


def play(problem: dict[str, Any]) -> None:
    client = OpenAI()

    def ask(messages: Messages) -> tuple[str, bool]:
        choice = client.chat.completions.create(model="policy", messages=messages).choices[0]
        return choice.message.content or "", choice.finish_reason == "length"

    calculator(problem, ask)
