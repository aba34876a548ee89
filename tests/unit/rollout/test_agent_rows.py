"""Rows of an agent's episode: what was sampled stays as it was, and every sampled token is a target once."""

from __future__ import annotations

import json
import os
import re
import unicodedata
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from transformers import AutoTokenizer

from gxpo_trainer.config.tasks import AgentConfig
from gxpo_trainer.data.chat import chat_text
from gxpo_trainer.environments.contract import Call, ChatRequest, Problem, Reply, Turn
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.learner.models import STARTER_FOLDER
from gxpo_trainer.rollout.agents import AgentConversation, AgentConversations, parsed_calls, tool_parser
from gxpo_trainer.rollout.conversations import Row, place
from gxpo_trainer.rollout.vllm_driver import EpisodeStart, Intake, SampleRequest, SamplingSettings
from gxpo_trainer.types import Prompt

CHATML = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ m.role if m.role != 'tool' else 'user' }}|>\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments | tojson }}</tool_call>{% endfor %}"
    "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
TRIMMING = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n\n{{ m.content | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n\n{% endif %}"
)
WITHOUT_THOUGHTS = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{{ m.content.split('=')[-1] if m.role == 'assistant' and not loop.last else m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEMPLATES = {"starter": None, "chatml": CHATML, "trimming": TRIMMING, "without_thoughts": WITHOUT_THOUGHTS}
FOLDER = os.environ.get("GXPO_TEST_TEMPLATES")
"""Templates of vendors, which are theirs to give: `qwen3.jinja`, … (docs/tests.md)."""
VENDORS = {file.stem: file.read_text() for file in sorted(Path(FOLDER).glob("*.jinja"))} if FOLDER else {}
TOOL = {"type": "function", "function": {"name": "calc", "parameters": {"type": "object", "properties": {}}}}
CALLS = 'Let me see. <tool_call>{"name":"calc",  "arguments":{"e":"1+1"}}</tool_call>'
THOUGHT = "<think>\nhm \u00e9\U0001f642\n</think>\n\nso "


def tokenizer_of(template: str | None) -> Any:
    """The starter's, which has all bytes, with a template and the marks in it."""
    tokenizer: Any = AutoTokenizer.from_pretrained(STARTER_FOLDER)
    marks = sorted(set(re.findall(r"<\|\w+\|>", template or "")))
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.eos_token = next((mark for mark in ("<|im_end|>", "<|eot_id|>") if mark in marks), tokenizer.eos_token)
    if template:
        tokenizer.chat_template = template
    return tokenizer


TOKENIZERS = {name: tokenizer_of(template) for name, template in (TEMPLATES | VENDORS).items()}
TOKENIZER = TOKENIZERS["starter"]
END = TOKENIZER.eos_token_id
ORDINARY = [i for i in range(len(TOKENIZER)) if i not in TOKENIZER.all_special_ids]


def text_of(ids: list[int], tokenizer: Any = TOKENIZER, *, special: bool = True) -> str:
    text = tokenizer.decode(ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False)
    return str(text)


@dataclass
class Bench:
    """An episode in which `sample` stands for the engine: it writes given tokens after what the policy sees."""

    tokenizer: Any = TOKENIZER
    rows: list[Row] = field(default_factory=list)
    sampled: list[list[int]] = field(default_factory=list)
    agent: AgentConversation = field(default_factory=lambda: AgentConversation(1000))

    def sample(self, messages: list[dict[str, Any]], ids: list[int], tools: bool = False) -> dict[str, Any]:
        """The message that the agent gets."""
        request = ChatRequest(tuple(messages), (TOOL,) if tools else ())
        rendered = chat_text(self.tokenizer, self.agent.rendered(request), opened=True, tools=request.tools)
        row, _ = place(rendered, self.rows, self.tokenizer)
        if row not in self.rows:
            self.rows.append(row)
        # The policy sees exactly the rendering, composed as its tokenizer reads text that it did not sample itself.
        seen = text_of([token for _, part in row.parts for token in part], self.tokenizer)
        assert unicodedata.normalize("NFC", seen) == unicodedata.normalize("NFC", rendered)
        row.parts.append((text_of(ids, self.tokenizer), ids))
        self.sampled.append(ids)
        text = text_of(ids, self.tokenizer, special=False)
        calls = parsed_calls(tool_parser("hermes"), self.tokenizer, text, request) if tools else None
        message = calls or {"role": "assistant", "content": text}
        self.agent.ask(request)
        self.agent.answer(message, text, "stop", (1, 1))
        return message


WORDS = st.lists(st.sampled_from(ORDINARY), max_size=8)
TURN = st.tuples(WORDS, st.sampled_from(["", "", THOUGHT, CALLS]), st.booleans())
STEP = st.tuples(
    st.sampled_from(["continue", "continue", "retry", "edit", "compact", "other", "elsewhere"]),
    TURN,
    st.text("ab 1=\n\u00e9\U0001f642<"),
)


@settings(max_examples=int(os.environ.get("GXPO_TEST_HISTORIES", "150")), deadline=None)
@given(st.sampled_from(sorted(TOKENIZERS)), st.booleans(), st.lists(STEP, min_size=1, max_size=8))
def test_sampled_tokens_are_kept_and_each_is_a_target_in_one_row(template: str, tools: bool, steps: list[Any]) -> None:
    tokenizer = TOKENIZERS[template]
    bench = Bench(tokenizer)
    histories: list[list[dict[str, Any]]] = [[{"role": "user", "content": "begin"}]]
    for kind, (ids, words, complete), text in steps:
        history = histories[-1]
        if kind == "edit":
            history[len(history) // 2] = {**history[len(history) // 2], "content": text}
        elif kind == "compact":
            history[:] = [{"role": "user", "content": text}]
        elif kind == "other":
            histories.append([{"role": "user", "content": text}])
        elif kind == "elsewhere":
            histories.append(histories.pop(0))
        history = histories[-1]
        turn = [*tokenizer(words, add_special_tokens=False)["input_ids"], *ids] or [ORDINARY[0]]
        with_tools = tools and "tools" in tokenizer.chat_template
        message = bench.sample(history, [*turn, tokenizer.eos_token_id] if complete else turn, with_tools)
        if kind == "retry":
            continue
        calls = message.get("tool_calls", ())
        answers = [{"role": "tool", "content": text, "tool_call_id": call["id"]} for call in calls]
        history += [message, *(answers or [{"role": "user", "content": text}])]
    targets = [part for row in bench.rows for _, part in row.parts[1::2]]
    assert sorted(targets) == sorted(bench.sampled)
    assert all(len(row.parts) % 2 == 0 for row in bench.rows)


@pytest.mark.parametrize(
    ("template", "tools"),
    [("starter", False), *((name, tools) for name in (*sorted(VENDORS), "chatml") for tools in (False, True))],
)
def test_a_conversation_that_goes_on_is_one_row_whatever_its_tokens(template: str, tools: bool) -> None:
    bench = Bench(TOKENIZERS[template])
    history: list[dict[str, Any]] = [{"role": "user", "content": "begin"}]
    for number in range(4):
        words = CALLS if tools else f"on \u00e9 {number}"
        # Letter by letter: the tokenizer would write the text otherwise.
        ids = [token for letter in words for token in bench.tokenizer(letter, add_special_tokens=False)["input_ids"]]
        message = bench.sample(history, [*ids, bench.tokenizer.eos_token_id], tools)
        calls = message.get("tool_calls", ())
        assert bool(calls) == tools
        answers = [{"role": "tool", "content": "2", "tool_call_id": call["id"]} for call in calls]
        history += [message, *(answers or [{"role": "user", "content": "on"}])]
    (row,) = bench.rows
    assert [part for _, part in row.parts[1::2]] == bench.sampled


def test_a_branch_begins_with_the_tokens_of_what_it_shares() -> None:
    bench = Bench()
    history: list[dict[str, Any]] = [{"role": "user", "content": "begin"}]
    for turn in ("1+1=2", "so"):
        ids = [*TOKENIZER(turn, add_special_tokens=False)["input_ids"], END]
        history += [bench.sample(history, ids), {"role": "user", "content": "on"}]
    shared = [token for _, part in bench.rows[0].parts[:2] for token in part]
    bench.sample([*history[:2], {"role": "user", "content": "another question"}], [ORDINARY[0], END])
    assert len(bench.rows) == 2
    assert bench.rows[1].parts[0][1][: len(shared)] == shared


def test_tool_calls_come_back_as_calls_and_are_rendered_as_they_were_sampled() -> None:
    request = ChatRequest(({"role": "user", "content": "x"},), (TOOL,))
    message = parsed_calls(tool_parser("hermes"), TOKENIZER, CALLS, request)
    assert message["content"] == "Let me see. "
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "calc", "arguments": '{"e": "1+1"}'}
    assert parsed_calls(tool_parser("hermes"), TOKENIZER, "<tool_call>{", request) is None
    conversation = AgentConversation(4)
    conversation.ask(request)
    conversation.answer(message, CALLS, "tool_calls", (3, 2))
    answer = {"role": "tool", "content": "2", "tool_call_id": call["id"]}
    again = ChatRequest((*request.messages, {**message, "refusal": ""}, answer))
    assert conversation.rendered(again)[1] == {"role": "assistant", "content": CALLS}
    edited = ChatRequest((*request.messages, {**message, "content": "Hm."}))
    assert conversation.rendered(edited)[1]["tool_calls"][0]["function"]["arguments"] == {"e": "1+1"}
    conversation.ask(again)
    assert [turn.text for turn in conversation._turns] == ["user: x", CALLS, "tool: 2"]
    with pytest.raises(
        ConfigError, match=r"environment.tool_parser = 'x' is not a parser of vLLM; use one of .*hermes"
    ):
        tool_parser("x")


def test_a_request_whose_tool_calls_no_parser_could_read_is_refused() -> None:
    request = ChatRequest(({"role": "user", "content": "x"},), ({"type": "function", "name": "calc"},))
    calls: list[Call] = []

    def advance(call: Call) -> Future[Reply]:
        calls.append(call)
        future: Future[Reply] = Future()
        if not call.actions:
            future.set_result(Reply(request))
        return future

    intake, environments = Intake(), SimpleNamespace(advance=advance)
    config = AgentConfig(command=("agent",), tool_parser="hermes")
    parts: Any = Mock(), TOKENIZERS["chatml"], SamplingSettings(8), 400
    conversations = AgentConversations(*parts, environments=environments, config=config, intake=intake)
    start = EpisodeStart(Problem("p", "x", "", {}), 0)
    conversations.begin(0, SampleRequest(Prompt("p", "x", ""), np.zeros(1, np.int32), 1, None, episode=start))
    intake.run_calls(wait=False)
    assert conversations.proceed() == []
    error = "tools.0.function: Field required; write messages and tools as in OpenAI's API"
    assert [json.loads(action) for action in calls[-1].actions] == [{"error": error, "code": "invalid_value"}]


def test_an_agent_that_dies_because_its_first_request_is_too_long_is_truncated() -> None:
    replies = [Reply(ChatRequest(({"role": "user", "content": "x " * 500},))), Reply(None, "error", "exit code 1")]

    def advance(call: Call) -> Future[Reply]:
        future: Future[Reply] = Future()
        future.set_result(replies[len(call.actions)])
        return future

    intake, environments = Intake(), SimpleNamespace(advance=advance, end=lambda _: None)
    engine = SimpleNamespace(current_weights=SimpleNamespace(version=3))
    parts: Any = engine, TOKENIZERS["chatml"], SamplingSettings(8), 400
    config = AgentConfig(command=("agent",))
    conversations = AgentConversations(*parts, environments=environments, config=config, intake=intake)
    start = EpisodeStart(Problem("p", "x", "", {}), 0)
    conversations.begin(0, SampleRequest(Prompt("p", "x", ""), np.zeros(1, np.int32), 1, None, episode=start))
    while not (complete := conversations.proceed()):
        intake.run_calls(wait=False)
    ((_, group),) = complete
    assert [(sample.truncated, sample.num_sampled) for sample in group.samples] == [(True, 0)]


def played(*replies: Reply, cut: bool = False, room: bool = True) -> AgentConversation:
    conversation = AgentConversation(2)
    for reply in replies:
        conversation.add_reply(reply, room=room)
        if conversation.end is None:
            assert isinstance(reply.answer, ChatRequest)
            conversation.ask(reply.answer, cut=cut)
            conversation.answer({"role": "assistant", "content": "a"}, "a", "length" if cut else "stop", (1, 1))
    return conversation


ASKS = Reply(ChatRequest(({"role": "user", "content": "x"},), reward=0.5))
DONE = Reply(Turn(reward=0.25, done=True))


@pytest.mark.parametrize(
    ("conversation", "end", "reward"),
    [
        (played(ASKS, DONE), "done", 0.75),
        (played(ASKS, DONE, cut=True), "length", 0.75),
        (played(ASKS, ASKS, ASKS), "max_turns", 1.5),
        (played(ASKS, room=False), "length", 0.5),
        (played(ASKS, Reply(None, "error", "exit code 1")), "error", 0.5),
        (played(ASKS, Reply(None, "timeout", "late")), "timeout", 0.5),
    ],
)
def test_an_episode_ends_for_a_reason(conversation: AgentConversation, end: str, reward: float) -> None:
    assert conversation.end == end
    assert conversation.episode.reward == reward


def test_an_agent_that_dies_of_a_full_context_ended_by_length() -> None:
    conversation = played(ASKS)
    conversation.refuse("no room", "context_length_exceeded")
    assert json.loads(conversation.actions[-1]) == {"error": "no room", "code": "context_length_exceeded"}
    conversation.add_reply(Reply(None, "error", "exit code 1"), room=True)
    assert conversation.end == "length"


def test_an_agent_that_dies_after_it_has_shortened_a_full_context_has_failed() -> None:
    conversation = played(ASKS)
    conversation.refuse("no room", "context_length_exceeded")
    conversation.add_reply(ASKS, room=True)
    conversation.ask(ASKS.answer)  # type: ignore[arg-type]
    conversation.answer({"role": "assistant", "content": "a"}, "a", "stop", (1, 1))
    conversation.add_reply(Reply(None, "error", "exit code 1"), room=True)
    assert (conversation.end, conversation.episode.failed) == ("error", True)
