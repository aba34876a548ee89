"""The course of an episode by hand: who speaks next, and why it ends."""

from __future__ import annotations

from typing import Any

import pytest

from gxpo_trainer.environments.contract import Observation, Reply, Turn
from gxpo_trainer.rollout.conversations import Conversation
from gxpo_trainer.types import Episode, Utterance

POLICY = Utterance("policy", "one")
LATE = Reply(None, "timeout", "Mine.step did not return")


@pytest.mark.parametrize(
    ("max_turns", "reply", "room", "end", "turns", "reward"),
    [
        (3, Reply(Turn(done=True)), True, "done", (POLICY,), None),
        (1, Reply(Turn(done=True)), False, "done", (POLICY,), None),
        (1, Reply(Turn("on", reward=-1.0)), True, "max_turns", (POLICY, Utterance("environment", "on", -1.0)), -1.0),
        (3, Reply(Turn("84", reward=0.5)), False, "length", (POLICY, Utterance("environment", "84", 0.5)), 0.5),
        (3, LATE, True, "timeout", (POLICY,), None),
        (3, Reply(Observation.of_text("84")), True, "error", (POLICY,), None),
    ],
)
def test_a_reply_that_ends_an_episode(
    max_turns: int, reply: Reply, room: bool, end: Any, turns: tuple[Utterance, ...], reward: float | None
) -> None:
    conversation = Conversation(max_turns)
    assert conversation.add_turn("one", complete=True)
    assert conversation.add_reply(reply, room=room) is None
    detail = reply.detail or ("the environment returned Observation" if end == "error" else "")
    assert conversation.episode == Episode(turns, end, detail)
    assert conversation.episode.reward == reward


def test_an_episode_that_does_not_begin_or_whose_turn_was_cut() -> None:
    for reply, expected in (
        (LATE, Episode((), "timeout", LATE.detail)),
        (Reply(Turn("84")), Episode((), "error", "the environment returned Turn")),
    ):
        conversation = Conversation(3)
        assert conversation.open(reply) is None
        assert conversation.episode == expected
    conversation = Conversation(3)
    assert not conversation.add_turn("one", complete=False)
    assert conversation.episode == Episode((POLICY,), "length")
