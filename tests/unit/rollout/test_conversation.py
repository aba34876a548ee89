"""The course of an episode by hand: who speaks next, and why it ends."""

from __future__ import annotations

import pytest

from gxpo_trainer.environments.contract import Observation, Reply, Turn
from gxpo_trainer.rollout.conversations import Conversation
from gxpo_trainer.types import Episode, Utterance


def opened(max_turns: int = 3) -> Conversation:
    conversation = Conversation(max_turns)
    assert conversation.open(Reply(Observation.of_text("12 * 7?"))) == Observation.of_text("12 * 7?")
    assert conversation.end is None
    return conversation


def test_an_episode_that_the_environment_ends() -> None:
    conversation = opened()
    assert conversation.add_turn("<calc>12*7</calc>", complete=True)
    assert conversation.add_reply(Reply(Turn("84", reward=0.25)), room=True) == "84"
    assert conversation.add_turn("It is 84.", complete=True)
    assert conversation.actions == ("<calc>12*7</calc>", "It is 84.")
    assert conversation.add_reply(Reply(Turn(reward=1.0, done=True)), room=True) is None
    expected = (
        Utterance("policy", "<calc>12*7</calc>"),
        Utterance("environment", "84", 0.25),
        Utterance("policy", "It is 84."),
        Utterance("environment", "", 1.0),
    )
    assert conversation.episode == Episode(expected, "done")
    assert conversation.episode.reward == 1.25


def test_an_end_without_observation_or_reward_adds_no_turn() -> None:
    conversation = opened()
    conversation.add_turn("84", complete=True)
    assert conversation.add_reply(Reply(Turn(done=True)), room=True) is None
    assert conversation.episode == Episode((Utterance("policy", "84"),), "done")
    assert conversation.episode.reward is None


def test_the_environment_rewards_the_last_allowed_turn() -> None:
    conversation = opened(max_turns=2)
    assert conversation.add_turn("one", complete=True)
    assert conversation.add_reply(Reply(Turn("again")), room=True) == "again"
    assert conversation.add_turn("two", complete=True)
    assert conversation.add_reply(Reply(Turn("and again", reward=-1.0)), room=True) is None
    assert conversation.episode.end == "max_turns"
    assert conversation.episode.reward == -1.0


def test_an_environment_that_ends_the_last_allowed_turn_has_ended_it() -> None:
    conversation = opened(max_turns=1)
    conversation.add_turn("one", complete=True)
    assert conversation.add_reply(Reply(Turn(done=True)), room=False) is None
    assert conversation.episode.end == "done"


def test_a_turn_that_was_cut_is_not_shown_to_the_environment() -> None:
    conversation = opened()
    assert not conversation.add_turn("12 * 7 is", complete=False)
    assert conversation.episode == Episode((Utterance("policy", "12 * 7 is"),), "length")


def test_an_observation_without_room_for_another_token_ends_the_episode() -> None:
    conversation = opened()
    conversation.add_turn("one", complete=True)
    assert conversation.add_reply(Reply(Turn("84", reward=0.5)), room=False) is None
    assert conversation.episode.end == "length"
    assert conversation.episode.reward == 0.5


@pytest.mark.parametrize("failure", ["timeout", "error"])
def test_a_failed_call_ends_the_episode_with_its_reason(failure: str) -> None:
    reply = Reply(None, failure, "Mine.step raised KeyError")  # type: ignore[arg-type]
    first = Conversation(3)
    assert first.open(reply) is None
    assert first.episode == Episode((), failure, "Mine.step raised KeyError")  # type: ignore[arg-type]
    later = opened()
    later.add_turn("one", complete=True)
    assert later.add_reply(reply, room=True) is None
    assert later.episode.failed
    assert later.episode.detail == "Mine.step raised KeyError"
    assert later.episode.turns == (Utterance("policy", "one"),)


def test_an_answer_of_the_wrong_kind_is_an_error() -> None:
    conversation = Conversation(3)
    assert conversation.open(Reply(Turn("84"))) is None
    assert conversation.episode == Episode((), "error", "the environment returned Turn")
    conversation = opened()
    conversation.add_turn("one", complete=True)
    assert conversation.add_reply(Reply(Observation.of_text("84")), room=True) is None
    assert conversation.episode.detail == "the environment returned Observation"
