"""Groups of conversations: an engine samples turns, and environments answer them meanwhile.

Of an episode one thing is under way at a time: a turn in the engine or a call to its environment. A turn that ends
leaves the engine, so that other requests are sampled while its environment answers; then the request continues with
everything so far as its prompt, most of which the prefix cache holds. Replies arrive in other threads and are handled
in the engine's (`proceed`), between two of its steps and never in the middle of a sync.

Tokens that the policy sampled are decoded for its environment, and never tokenized again.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gxpo_trainer.config.tasks import AgentConfig, EnvironmentConfig
from gxpo_trainer.data.chat import ObservationEncoder, chat_text, conversation, render_messages, rewrites_turns
from gxpo_trainer.environments.contract import Call, Message, Observation, Reply, Turn
from gxpo_trainer.rollout.environments import EnvironmentHandle
from gxpo_trainer.rollout.vllm_driver import (
    CompleteGroups,
    EngineDriver,
    EpisodeStart,
    Intake,
    Response,
    SampleRequest,
    SamplingSettings,
    finish_reason,
    sample_seed,
)
from gxpo_trainer.types import Episode, EpisodeEnd, Group, Sample, Utterance


class Conversation:
    """Course of one episode: what the policy and the environment wrote, and what happens next. Pure.

    Order: `open`, then `add_turn` and `add_reply` in turn, until one of them has ended the episode.
    """

    def __init__(self, max_turns: int) -> None:
        self._max_turns = max_turns
        self._turns: list[Utterance] = []
        self.actions: tuple[str, ...] = ()
        """What the policy wrote, turn by turn."""
        self.written = ""
        """Text of the sample."""
        self.end: EpisodeEnd | None = None
        self._detail = ""

    def open(self, reply: Reply) -> Observation | None:
        """The first messages; None: the episode has ended."""
        if isinstance(reply.answer, Observation):
            return reply.answer
        self._end_without_answer(reply)
        return None

    def add_turn(self, text: str, *, complete: bool) -> bool:
        """The policy wrote a turn. complete: to its end token; a turn that was cut ends the episode.

        Returns whether the environment has to answer.
        """
        self._turns.append(Utterance("policy", text))
        self.actions = (*self.actions, text)
        self.written = "\n".join(self.actions)
        if not complete:
            self.end = "length"
        return complete

    def add_reply(self, reply: Reply, *, room: bool) -> str | None:
        """The observation that the policy sees next; None: the episode has ended. room: for another sampled token."""
        turn = reply.answer
        if not isinstance(turn, Turn):
            self._end_without_answer(reply)
            return None
        if turn.observation or turn.reward is not None:
            self._turns.append(Utterance("environment", turn.observation, turn.reward))
        self.end = "done" if turn.done else self._limit(room)
        return turn.observation if self.end is None else None

    def _limit(self, room: bool) -> EpisodeEnd | None:
        """Why there is no further turn; None: there is one."""
        return "max_turns" if len(self.actions) >= self._max_turns else None if room else "length"

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


@dataclass(slots=True, eq=False)
class Row:
    """parts: (text, token ids), context first and then alternately sampled and context. response: that of the engine,
    which continues from part to part; None before the first."""

    parts: list[tuple[str, list[int]]] = field(default_factory=list)
    response: Any = None

    @property
    def length(self) -> int:
        """Number of its tokens in the engine."""
        return 0 if self.response is None else self.response.prompt_length + len(self.response.token_ids)


def place(text: str, rows: Sequence[Row], tokenizer: Any) -> tuple[Row, list[int]]:
    """The row to sample for the rendering `text`, and the tokens to add to it; of a new row its prompt. Pure.

    The context becomes a part of the row; the caller appends what is sampled.
    """
    grows, known, begin = None, list[int](), 0
    for row in rows:
        ids, end = list[int](), 0
        for number, (part, tokens) in enumerate(row.parts, start=1):
            if not text.startswith(part, end):
                break
            ids, end = ids + tokens, end + len(part)
            whole = number == len(row.parts)
            if end > begin or (end == begin and whole):
                grows, known, begin = row if whole else None, ids, end
    rest = list(tokenizer(text[begin:], add_special_tokens=False)["input_ids"])
    if grows is not None:
        grows.parts.append((text[begin:], rest))
        return grows, rest
    return Row([(text, known + rest)]), known + rest


@dataclass(slots=True, eq=False)
class OpenEpisode:
    """One sample of a group. turn_begin: tokens of the row before the present turn. rows: all sequences of tokens, of
    which `row` is the present turn's; empty before its environment has begun. messages: so far, with what of the
    observations was kept."""

    name: str
    number: int
    group: OpenGroup
    conversation: Conversation
    turn_begin: int = 0
    rows: list[Row] = field(default_factory=list)
    row: Row = field(default_factory=Row)
    messages: list[Mapping[str, Any]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class OpenGroup:
    """messages, prompt: the first messages of its episodes, None before the first reply; refusal: why they cannot be
    used."""

    index: int
    request: SampleRequest
    start: EpisodeStart
    sampling: SamplingSettings
    episodes: list[OpenEpisode] = field(default_factory=list)
    messages: tuple[Message, ...] | None = None
    prompt: npt.NDArray[np.int32] | None = None
    refusal: str = ""


class Conversations:
    """Groups whose samples are episodes in an environment, with the methods of `SingleTurns`."""

    _course: type[Conversation] = Conversation

    def __init__(
        self,
        engine: EngineDriver,
        tokenizer: Any,
        sampling: SamplingSettings,
        max_length: int,
        *,
        environments: EnvironmentHandle,
        config: EnvironmentConfig,
        intake: Intake,
        name: str = "",
    ) -> None:
        self._engine, self._tokenizer, self._sampling, self._max_length = engine, tokenizer, sampling, max_length
        self._environments, self._config, self._intake = environments, config, intake
        self._branches = isinstance(config, AgentConfig) or rewrites_turns(tokenizer)
        self._key = f"{name}{uuid.uuid4().hex}"
        self._groups: dict[int, OpenGroup] = {}
        self._in_engine: dict[int, OpenEpisode] = {}
        """By the id of their response."""
        self._replies: deque[tuple[OpenEpisode, Future[Reply]]] = deque()
        self._num_calls = 0
        """Calls whose replies were not handled yet."""

    @cached_property
    def _encoder(self) -> ObservationEncoder:
        return ObservationEncoder(self._tokenizer, self._config.max_observation_tokens)

    @property
    def waiting(self) -> bool:
        """Whether a sample waits for an environment."""
        return self._num_calls > 0

    def begin(self, index: int, request: SampleRequest) -> None:
        assert request.episode is not None, "a request to an engine with environments names no episode"
        group = OpenGroup(index, request, request.episode, request.sampling or self._sampling)
        self._groups[index] = group
        for number in range(request.num_samples):
            course = self._course(self._config.max_turns)
            group.episodes.append(OpenEpisode(f"{self._key}/{index}/{number}", number, group, course))
        for episode in group.episodes:
            self._call(episode)

    def finish(self, responses: Sequence[Response]) -> CompleteGroups:
        complete = []
        for response in responses:
            episode = self._in_engine.pop(id(response))
            turn = response.token_ids[episode.turn_begin :]
            if self._branches:
                episode.row.parts.append((self._text(turn, special=True), turn))
                episode.messages.append({"role": "assistant", "content": self._text(turn, special=False)})
            text = self._tokenizer.decode(turn, skip_special_tokens=True)
            if episode.conversation.add_turn(text, complete=finish_reason(response) == "stop"):
                self._call(episode)
            else:
                complete += self._end(episode)
        return complete

    def proceed(self) -> CompleteGroups:
        """Continue samples whose environments have replied; groups that are complete now.

        Raises what a call raised: no environment can be run at all.
        """
        complete = []
        while self._replies:
            episode, future = self._replies.popleft()
            self._num_calls -= 1
            reply = future.result()
            self._handle(episode, reply)
            if episode.conversation.end is not None:
                complete += self._end(episode)
        return complete

    def close(self) -> None:
        for group in self._groups.values():
            for episode in group.episodes:
                if episode.conversation.end is None:
                    self._environments.end(episode.name)
        self._groups.clear()

    def _call(self, episode: OpenEpisode) -> None:
        self._num_calls += 1
        start = episode.group.start
        call = Call(episode.name, start.problem, start.seed, episode.conversation.actions)
        self._environments.advance(call).add_done_callback(
            lambda future: self._intake.post(lambda: self._replies.append((episode, future)))
        )

    def _handle(self, episode: OpenEpisode, reply: Reply) -> None:
        """Start the next turn, or end the episode."""
        if episode.rows:
            self._continue(episode, reply)
        else:
            self._open(episode, reply)

    def _open(self, episode: OpenEpisode, reply: Reply) -> None:
        """The environment has begun: start the first turn."""
        observation = episode.conversation.open(reply)
        if observation is None:
            return
        group = episode.group
        if group.messages is None:
            self._render(group, observation)
        refusal = group.refusal
        if group.messages != observation.messages:
            refusal = "returned other messages for the same problem and seed; all episodes of a group must see the same"
        if refusal or group.prompt is None:
            episode.conversation.fail(f"{self._config.name}.reset {refusal}")
            return
        episode.messages = conversation(group.request.prompt.history, observation.messages)
        text = chat_text(self._tokenizer, episode.messages, opened=True) if self._branches else ""
        prompt, sampling = group.prompt.tolist(), group.sampling
        self._start_turn(episode, Row([(text, prompt)]), prompt, sampling.max_new_tokens, 0, sampling.stop)

    def _render(self, group: OpenGroup, observation: Observation) -> None:
        """Render the first messages of a group."""
        group.messages = observation.messages
        try:
            messages = conversation(group.request.prompt.history, observation.messages)
            prompt = render_messages(messages, self._tokenizer)
        except Exception as error:  # a chat template may raise anything
            group.refusal = f"returned messages that the chat template refuses ({error})"
            return
        room = self._max_length - group.sampling.max_new_tokens - self._config.observation_tokens
        limit = min(room, group.start.max_prompt_tokens or room)
        if not 0 < len(prompt) <= limit:
            group.refusal = (
                f"returned messages of {len(prompt)} tokens, which must have 1 to {limit}; shorten them, or raise "
                "data.max_prompt_tokens or model.max_length"
            )
        else:
            group.prompt = prompt

    def _continue(self, episode: OpenEpisode, reply: Reply) -> None:
        """The environment has replied: start the next turn, in a new row where the template has rewritten the last."""
        left = episode.group.sampling.max_new_tokens - sum(row.response.num_sampled for row in episode.rows)
        observation = episode.conversation.add_reply(reply, room=left > 0)
        if observation is None:
            return
        observation = self._encoder.cut(observation)
        if self._branches:
            episode.messages.append({"role": "user", "content": observation})
            try:
                text = chat_text(self._tokenizer, episode.messages, opened=True)
            except Exception as error:  # a chat template may raise anything
                episode.conversation.fail(f"the chat template refuses the messages of this turn ({error})")
                return
            row, tokens = place(text, episode.rows, self._tokenizer)
            left = min(left, self._max_length - row.length - len(tokens))
            if left <= 0:
                episode.conversation.end = "length"
                return
        else:
            row, tokens = episode.row, self._encoder.encode(observation)
        stop = episode.group.sampling.stop
        self._start_turn(episode, row, tokens, left, len(episode.conversation.actions), stop)

    def _start_turn(
        self, episode: OpenEpisode, row: Row, ids: list[int], most: int, turn: int, stop: tuple[str, ...]
    ) -> None:
        """Have the engine sample at most `most` tokens in the row, after `ids`: its prompt, or what follows."""
        group = episode.group
        seed = sample_seed(group.request.seed, episode.number, turn)
        if row.response is None:
            sampling = replace(group.sampling, max_new_tokens=most, stop=stop)
            (row.response,) = self._engine.start(ids, sampling, [seed])
            episode.rows.append(row)
        else:
            row.response.max_new_tokens = row.response.num_sampled + most
            row.response.stop = stop
            self._engine.extend(row.response, ids, seed)
        episode.row, episode.turn_begin = row, len(row.response.token_ids)
        self._in_engine[id(row.response)] = episode

    def _text(self, ids: Sequence[int], *, special: bool) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        return text

    def _end(self, episode: OpenEpisode) -> CompleteGroups:
        """Release the episode's process; its group, if it is complete now."""
        self._environments.end(episode.name)
        group = episode.group
        if any(other.conversation.end is None for other in group.episodes):
            return []
        del self._groups[group.index]
        samples = tuple(self._sample(episode) for episode in group.episodes)
        versions = [version for sample in samples for row in sample.rows for version, _ in row.versions]
        prompt = group.request.prompt_token_ids if group.prompt is None else group.prompt
        oldest = min(versions, default=self._engine.current_weights.version)
        return [(group.index, Group(group.request.prompt, prompt, samples, oldest))]

    def _sample(self, episode: OpenEpisode) -> Sample:
        conversation = episode.conversation
        reason: Literal["stop", "length"] = "length" if conversation.end == "length" else "stop"
        if not episode.rows:
            none = np.zeros(0, np.int32), np.zeros(0, np.float32)
            return Sample(conversation.written, *none, reason, (), np.zeros(0, np.bool_), conversation.episode)
        samples = []
        for row in episode.rows:
            response, prompt = row.response, np.asarray(row.parts[0][1], dtype=np.int32)
            parts = response.logprobs, reason, response.versions, response.sampled
            ids = np.asarray(response.token_ids, dtype=np.int32)
            samples.append(Sample("", ids, *parts, prompt_token_ids=prompt if self._branches else None))
        first, *others = samples
        return replace(first, text=conversation.written, episode=conversation.episode, branches=tuple(others))
