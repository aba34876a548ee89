"""Turns of a sample as rows to show."""

from __future__ import annotations

from typing import Any

from gxpo_dashboard.view_models.tables import LONG_TURN, TurnRow, episode_facts, turn_rows


def item(turns: list[dict[str, Any]] | None, **fields: Any) -> dict[str, Any]:
    return {"turns": turns, "end": "done", "length": 20, "sampled_length": 15, "reward": 1.0, **fields}


def turn(speaker: str, text: str, reward: float | None = None) -> dict[str, Any]:
    return {"speaker": speaker, "text": text, "reward": reward}


def test_a_row_says_who_spoke_and_which_reward_it_gave() -> None:
    turns = [
        turn("policy", "<calc>2+2</calc>"),
        turn("environment", "4", -0.25),
        turn("policy", "\\boxed{4}"),
        turn("environment", "", 1.0),
    ]
    assert turn_rows(item(turns)) == [
        TurnRow("Policy, turn 1", "<calc>2+2</calc>", None),
        TurnRow("Environment, turn 1, reward −0.25", "4", None),
        TurnRow("Policy, turn 2", "\\boxed{4}", None),
        TurnRow("Environment, turn 2, reward +1.00", "", None),
    ]


def test_a_long_turn_has_a_beginning_and_a_turn_at_the_limit_has_none() -> None:
    at_limit, longer = turn_rows(item([turn("policy", "x" * LONG_TURN), turn("environment", "x" * LONG_TURN + "y")]))
    assert at_limit.cut is None
    assert longer.cut == "x" * LONG_TURN + "…"
    assert longer.text.endswith("y")


def test_a_response_of_a_single_turn_has_neither_rows_nor_facts() -> None:
    old = {"response": "5", "length": 1, "reward": 1.0}
    assert (turn_rows(old), episode_facts(old)) == ([], "")
    new = item(None, end=None, sampled_length=None)
    assert (turn_rows(new), episode_facts(new)) == ([], "")


def test_facts_say_how_it_ended_and_where_the_reward_came_from() -> None:
    policy = [turn("policy", "\\boxed{4}")]
    assert episode_facts(item(policy)) == (
        "ended by the environment, 15 of 20 tokens by the policy, reward from the verifier"
    )
    rewarded = [*policy, turn("environment", "", 0.0)]
    assert episode_facts(item(rewarded, end="max_turns")) == (
        "turn limit reached, 15 of 20 tokens by the policy, reward from the environment"
    )
    assert episode_facts(item(policy, end="timeout", reward=None)) == (
        "environment timed out, 15 of 20 tokens by the policy"
    )


def test_an_unknown_speaker_or_end_is_shown_without_its_text_as_a_label() -> None:
    (row,) = turn_rows(item([turn("**tool**", "x")]))
    assert row.heading == "Unknown, turn 0"
