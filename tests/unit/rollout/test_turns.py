"""Conversations in a template that keeps turns, and in one that drops earlier reasoning: what was sampled stays.

Who speaks next, why an episode ends, and what the environment sees, without an engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from transformers import AutoTokenizer

from gxpo_trainer.config.tasks import EnvironmentConfig
from gxpo_trainer.data.chat import render_messages
from gxpo_trainer.environments.contract import Call, Message, Observation, Problem, Reply, Turn
from gxpo_trainer.errors import TrainingError
from gxpo_trainer.learner.models import STARTER_FOLDER
from gxpo_trainer.rollout.conversations import Conversation, Conversations
from gxpo_trainer.rollout.vllm_driver import (
    EngineDriver,
    EpisodeStart,
    Intake,
    Response,
    SampleRequest,
    SamplingSettings,
    SingleTurns,
    Weights,
    sample_seed,
)
from gxpo_trainer.types import Episode, Group, Prompt, Utterance

# As Qwen3: the reasoning of a turn is rendered only where no message of the user follows; a last turn always has some.
QWEN3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set parts = m.content.split('</think>') %}"
    "{% set thought = parts[0].split('<think>')[-1] if parts|length > 1 else '' %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>{{ thought }}</think>{% endif %}"
    "{{ parts[-1] }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FIRST, THOUGHT, PLAIN, LAST = "<think>6*7</think>42", "<think>so</think>43", "44", "<think>no</think>45"
BEGIN = Reply(Observation.of_text("6*7?"))


class ScriptedEngine(EngineDriver):
    """Samples the given turns, letter by letter, which the tokenizer would not do."""

    def __init__(self, tokenizer: Any, turns: Sequence[str]) -> None:
        self.tokenizer, self.turns = tokenizer, list(turns)
        self.weights = Weights(3, "")
        self.limits: list[int] = []
        self.sampled: list[list[int]] = []
        self.waiting: list[Response] = []
        self.seeds: list[int | None] = []

    def start(self, token_ids: Sequence[int], sampling: SamplingSettings, seeds: Any) -> list[Response]:
        self.seeds += seeds
        self.waiting.append(Response(None, len(token_ids), sampling.max_new_tokens, [(3, 0)]))
        return self.waiting[-1:]

    def _continue(self, response: Response, seed: int | None) -> None:
        self.seeds.append(seed)
        self.waiting.append(response)

    def step(self) -> list[Response]:
        finished, self.waiting = self.waiting, []
        for response in finished:
            self._sample(response)
        return finished

    def _sample(self, response: Response) -> None:
        letters = [self.tokenizer(letter, add_special_tokens=False)["input_ids"] for letter in self.turns.pop(0)]
        ids = [*(token for letter in letters for token in letter), self.tokenizer.eos_token_id]
        self.limits.append(response.max_new_tokens - response.num_sampled)
        self.sampled.append(ids)
        response.token_ids += ids
        response._logprobs.append(np.full((len(ids), 1), -1.0, np.float32))
        response.finish_reason = "stop"


class Echo:
    """An environment that answers each turn with its number, and ends after the fourth. first: to each reset."""

    def __init__(self, *first: Reply | Future[Reply]) -> None:
        self.first = iter(first or (BEGIN,))
        self.histories: list[tuple[str, ...]] = []
        self.ended = 0

    def advance(self, call: Call) -> Future[Reply]:
        assert call.episode.startswith("0.1/"), "its engine's"
        self.histories.append(call.actions)
        number = len(call.actions)
        reply = None if number else next(self.first)
        if isinstance(reply, Future):
            return reply
        future: Future[Reply] = Future()
        turn = Turn(f"again {number}", reward=float(number == 4), done=number == 4)
        future.set_result(reply or Reply(turn))
        return future

    def end(self, name: str) -> None:
        self.ended += 1


def begun(
    template: str | None, turns: Sequence[str], echo: Echo, samples: int = 1, limit: int | None = None
) -> tuple[Conversations, ScriptedEngine, Intake]:
    tokenizer: Any = AutoTokenizer.from_pretrained(STARTER_FOLDER)
    tokenizer.chat_template = template or tokenizer.chat_template
    engine, intake = ScriptedEngine(tokenizer, turns), Intake()
    environment = EnvironmentConfig(name="calculator", max_turns=5, max_observation_tokens=20)
    parts = engine, tokenizer, SamplingSettings(160), 400
    conversations = Conversations(*parts, environments=echo, config=environment, intake=intake, name="0.1/")
    start = EpisodeStart(Problem("p", "6*7?", "42", {}), 0, limit)
    conversations.begin(0, SampleRequest(Prompt("p", "6*7?", "42"), np.zeros(1, np.int32), samples, 5, episode=start))
    return conversations, engine, intake


def play(
    template: str | None, turns: Sequence[str], echo: Echo | None = None, **options: Any
) -> tuple[Group, ScriptedEngine, Any]:
    conversations, engine, intake = begun(template, turns, echo or Echo(), **options)
    while True:
        intake.run_calls(wait=False)
        complete = conversations.proceed()
        complete += conversations.finish(engine.step())
        if complete:
            return complete[0][1], engine, engine.tokenizer


def test_a_template_that_keeps_turns_makes_one_row_and_each_action_reaches_the_environment_once() -> None:
    echo, turns = Echo(), [FIRST, THOUGHT, PLAIN, LAST]
    group, engine, tokenizer = play(None, turns, echo)
    (row,) = group.samples[0].rows
    assert row.prompt_token_ids is None, "that of the group"
    answers = [f"<|user|>again {number}<|end|><|assistant|>" for number in (1, 2, 3)]
    expected = "".join(f"{turn}<|end|>{answer}" for turn, answer in zip(turns, [*answers, ""], strict=True))
    assert tokenizer.decode(row.token_ids, clean_up_tokenization_spaces=False) == expected
    assert row.token_ids[row.sampled].tolist() == [token for turn in engine.sampled for token in turn]
    assert row.logprobs.tolist() == (-1.0 * row.sampled).tolist()
    assert (row.finish_reason, row.versions, group.weights_version) == ("stop", ((3, len(row.token_ids)),), 3)
    said = [
        part
        for n, turn in enumerate(turns, start=1)
        for part in (Utterance("policy", turn), Utterance("environment", f"again {n}", float(n == 4)))
    ]
    assert group.samples[0].episode == Episode(tuple(said), "done")
    assert engine.seeds == [sample_seed(5, 0, turn) for turn in range(4)]
    assert echo.histories == [tuple(turns[:number]) for number in range(5)]
    assert echo.ended == 1


def test_all_episodes_of_a_group_begin_with_the_messages_of_its_first() -> None:
    messages = Message(role="system", content="Count."), Message(role="user", content="6*7?")
    echo = Echo(Reply(Observation(messages)), Reply(Observation.of_text("7*8?")))
    group, _, tokenizer = play(None, [PLAIN] * 4, echo, samples=2)
    assert group.prompt_token_ids.tolist() == render_messages(messages, tokenizer).tolist()
    first, other = (sample.episode for sample in group.samples)
    assert first.end == "done"
    detail = "calculator.reset returned other messages for the same problem and seed; all episodes of a group must see "
    assert other == Episode((), "error", f"{detail}the same")
    assert echo.ended == 2


@pytest.mark.parametrize(
    ("first", "limit", "end", "detail"),
    [
        (Reply(Observation((Message(role="critic", content=""),))), None, "error", "unknown role critic"),
        (BEGIN, 4, "error", "which must have 1 to 4; shorten them, or raise"),
        (Reply(None, "timeout", "no answer"), None, "timeout", "no answer"),
    ],
)
def test_an_episode_whose_first_messages_cannot_be_used_ends(
    first: Reply, limit: int | None, end: str, detail: str
) -> None:
    echo = Echo(first)
    (sample,) = play(None, [], echo, limit=limit)[0].samples
    assert sample.episode.end == end
    assert detail in sample.episode.detail
    assert (echo.ended, len(sample.token_ids)) == (1, 0)


def test_a_slow_environment_holds_up_no_other_sample() -> None:
    conversations, engine, intake = begun(None, [PLAIN] * 4, Echo(Future(), BEGIN), samples=2)
    for _ in range(4):
        intake.run_calls(wait=False)
        assert conversations.proceed() == conversations.finish(engine.step()) == []
    assert not engine.turns
    assert conversations.waiting


def test_a_stream_ends_when_no_environment_can_be_run() -> None:
    failed: Future[Reply] = Future()
    failed.set_exception(TrainingError("no environment can be run"))
    with pytest.raises(TrainingError, match="no environment can be run"):
        play(None, [], Echo(failed))


def test_closing_releases_the_environments_of_open_episodes() -> None:
    echo = Echo(BEGIN, BEGIN)
    begun(None, [], echo, samples=2)[0].close()
    assert echo.ended == 2


def test_each_rendered_history_with_what_was_sampled_after_it_is_a_row() -> None:
    group, engine, tokenizer = play(QWEN3, [FIRST, THOUGHT, PLAIN, LAST])
    (sample,) = group.samples

    def text(ids: Any) -> str:
        return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    begin = "<|user|>6*7?<|end|><|assistant|>"
    second = "<|user|>6*7?<|end|><|assistant|>42<|end|><|user|>again 1<|end|><|assistant|>"
    third = second + "43<|end|><|user|>again 2<|end|><|assistant|>"
    assert [text(row.prompt_token_ids) for row in sample.rows] == [begin, second, third]
    # The third turn has no reasoning, so that its row goes on.
    assert [text(row.token_ids) for row in sample.rows] == [
        FIRST + "<|end|>",
        THOUGHT + "<|end|>",
        PLAIN + "<|end|><|user|>again 3<|end|><|assistant|>" + LAST + "<|end|>",
    ]
    targets = [row.token_ids[row.sampled].tolist() for row in sample.rows if row.sampled is not None]
    assert targets == [engine.sampled[0], engine.sampled[1], engine.sampled[2] + engine.sampled[3]]
    assert engine.limits == [160 - sum(map(len, engine.sampled[:turn])) for turn in range(4)]
    assert sample.num_sampled == sum(map(len, engine.sampled))
    assert sample.text == "\n".join([FIRST, THOUGHT, PLAIN, LAST])
    assert (sample.episode.end, sample.episode.reward) == ("done", 1.0)


def test_a_template_that_refuses_a_later_turn_fails_the_episode_alone() -> None:
    template = "{% if messages|length > 6 %}{{ raise_exception('too many') }}{% endif %}" + QWEN3
    echo = Echo()
    (sample,) = play(template, [FIRST, THOUGHT, PLAIN], echo)[0].samples
    assert sample.episode.end == "error"
    assert sample.episode.detail == "the chat template refuses the messages of this turn (too many)"
    assert echo.ended == 1


# Why an episode ends, by hand.

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


def test_responses_of_a_group_that_finish_in_one_step_make_one_group() -> None:
    responses = [Response(None, 2, 4, [(3, 0)], token_ids=[5], finish_reason="stop") for _ in range(3)]
    for response in responses:
        response._logprobs.append(np.zeros((1, 1), dtype=np.float32))
    engine: Any = Mock(start=lambda *_: responses)
    groups = SingleTurns(engine, Mock(batch_decode=lambda ids, **_: list("abc")), SamplingSettings(4, 1.0), 8)
    groups.begin(0, SampleRequest(Prompt("p", "?", "1"), np.arange(2, dtype=np.int32), 3))
    responses[2].finish_reason = None
    assert groups.finish(responses[:1]) == []
    responses[2].finish_reason = "length"
    ((index, group),) = groups.finish(responses[1:])
    assert index == 0
    ended = [(sample.text, sample.finish_reason) for sample in group.samples]
    assert ended == [("a", "stop"), ("b", "stop"), ("c", "length")]
