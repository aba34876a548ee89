"""Course of one episode: what the policy and the environment said, and what happens next. Pure."""

from __future__ import annotations

from gxpo_trainer.environments.base import Observation, Turn
from gxpo_trainer.environments.calls import Reply
from gxpo_trainer.types import Episode, EpisodeEnd, Utterance


class Conversation:
    """Order: `opened`, then `said` and `answered` in turn, until one of them has ended the episode."""

    def __init__(self, max_turns: int) -> None:
        self._max_turns = max_turns
        self._turns: list[Utterance] = []
        self.actions: tuple[str, ...] = ()
        """What the policy wrote, turn by turn."""
        self.end: EpisodeEnd | None = None
        self._detail = ""

    def opened(self, reply: Reply) -> Observation | None:
        """The first messages; None: the episode has ended."""
        if isinstance(reply.answer, Observation):
            return reply.answer
        self._end_without_answer(reply)
        return None

    def said(self, text: str, *, complete: bool) -> bool:
        """The policy wrote a turn. complete: to its end token; a turn that was cut ends the episode.

        Returns whether the environment has to answer.
        """
        self._turns.append(Utterance("policy", text))
        self.actions = (*self.actions, text)
        if not complete:
            self.end = "length"
        return complete

    def answered(self, reply: Reply, *, room: bool) -> str | None:
        """The observation that the policy sees next; None: the episode has ended. room: for another sampled token."""
        turn = reply.answer
        if not isinstance(turn, Turn):
            self._end_without_answer(reply)
            return None
        if turn.observation or turn.reward is not None:
            self._turns.append(Utterance("environment", turn.observation, turn.reward))
        if turn.done:
            self.end = "done"
        elif len(self.actions) >= self._max_turns:
            self.end = "max_turns"
        elif not room:
            self.end = "length"
        return turn.observation if self.end is None else None

    def fail(self, detail: str) -> None:
        """End the episode because of what the environment returned."""
        self.end, self._detail = "error", detail

    @property
    def episode(self) -> Episode:
        """The record of the episode, which has ended."""
        assert self.end is not None, "the episode has not ended"
        return Episode(tuple(self._turns), self.end, self._detail)

    def _end_without_answer(self, reply: Reply) -> None:
        detail = reply.detail or f"the environment returned {type(reply.answer).__name__}"
        self.end, self._detail = reply.failure or "error", detail
