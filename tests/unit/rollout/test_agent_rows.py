"""Rows of an agent's episode: what was sampled stays as it was, and every sampled token is a target once."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from gxpo_trainer.data.chat import chat_text
from gxpo_trainer.environments.contract import ChatRequest, Reply, Turn
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.learner.models import STARTER_FOLDER
from gxpo_trainer.rollout.agents import AgentConversation, parsed_calls, tool_parser
from gxpo_trainer.rollout.conversations import Row, place

CHATML = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ m.role if m.role != 'tool' else 'user' }}|>{{ m.content }}"
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
TOKENIZER: Any = AutoTokenizer.from_pretrained(STARTER_FOLDER)
STARTER_TEMPLATE = TOKENIZER.chat_template
END = TOKENIZER.eos_token_id
ORDINARY = [i for i in range(len(TOKENIZER)) if i not in TOKENIZER.all_special_ids]


def text_of(ids: list[int]) -> str:
    return TOKENIZER.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


@dataclass
class Bench:
    """An episode in which `sample` stands for the engine: it writes given tokens after what the policy sees."""

    rows: list[Row] = field(default_factory=list)
    sampled: list[list[int]] = field(default_factory=list)

    def sample(self, messages: list[dict[str, Any]], ids: list[int]) -> str:
        rendered = chat_text(TOKENIZER, messages, opened=True)
        row, _ = place(rendered, self.rows, TOKENIZER)
        if row not in self.rows:
            self.rows.append(row)
        # The policy sees exactly the rendering.
        assert text_of([token for _, part in row.parts for token in part]) == rendered
        row.parts.append((text_of(ids), ids))
        self.sampled.append(ids)
        return str(TOKENIZER.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


TURN = st.tuples(st.lists(st.sampled_from(ORDINARY), min_size=1, max_size=8), st.booleans())
STEP = st.tuples(
    st.sampled_from(["continue", "continue", "retry", "edit", "compact", "other", "elsewhere"]),
    TURN,
    st.text("ab 1=\n"),
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(TEMPLATES)), st.lists(STEP, min_size=1, max_size=8))
def test_sampled_tokens_are_kept_and_each_is_a_target_in_one_row(template: str, steps: list[Any]) -> None:
    TOKENIZER.chat_template = TEMPLATES[template] or STARTER_TEMPLATE
    bench = Bench()
    histories: list[list[dict[str, Any]]] = [[{"role": "user", "content": "begin"}]]
    try:
        for kind, (ids, complete), text in steps:
            history = histories[-1]
            if kind == "edit":
                history[len(history) // 2]["content"] += text
            elif kind == "compact":
                del history[:-1]
            elif kind == "other":
                histories.append([{"role": "user", "content": text}])
            elif kind == "elsewhere":
                histories.append(histories.pop(0))
            history = histories[-1]
            said = bench.sample(history, [*ids, END] if complete else ids)
            if kind != "retry":
                history += [{"role": "assistant", "content": said}, {"role": "user", "content": text}]
    finally:
        TOKENIZER.chat_template = STARTER_TEMPLATE
    targets = [part for row in bench.rows for _, part in row.parts[1::2]]
    assert sorted(targets) == sorted(bench.sampled)
    assert all(len(row.parts) % 2 == 0 for row in bench.rows)


def conversation_of(bench: Bench, turns: list[str]) -> list[dict[str, Any]]:
    history: list[dict[str, Any]] = [{"role": "user", "content": "begin"}]
    for turn in turns:
        ids = [*TOKENIZER(turn, add_special_tokens=False)["input_ids"], END]
        history += [{"role": "assistant", "content": bench.sample(history, ids)}, {"role": "user", "content": "on"}]
    return history


def test_a_conversation_that_goes_on_is_one_row_whatever_its_tokens() -> None:
    bench = Bench()
    letters = [i for i in ORDINARY if len(text_of([i])) == 1][:6]
    history: list[dict[str, Any]] = [{"role": "user", "content": "begin"}]
    for _ in range(4):
        # Letter by letter: the tokenizer would write the text otherwise.
        history += [{"role": "assistant", "content": bench.sample(history, [*letters, END])}]
        history += [{"role": "user", "content": "on"}]
    (row,) = bench.rows
    assert [part for _, part in row.parts[1::2]] == [[*letters, END]] * 4


def test_a_branch_begins_with_the_tokens_of_what_it_shares() -> None:
    bench = Bench()
    history = conversation_of(bench, ["1+1=2", "so"])
    shared = [token for _, part in bench.rows[0].parts[:2] for token in part]
    bench.sample([*history[:2], {"role": "user", "content": "another question"}], [ORDINARY[0], END])
    assert len(bench.rows) == 2
    assert bench.rows[1].parts[0][1][: len(shared)] == shared


def test_reasoning_that_the_template_leaves_out_begins_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TOKENIZER, "chat_template", WITHOUT_THOUGHTS)
    bench = Bench()
    conversation_of(bench, ["1+1=2", "so"])
    assert len(bench.rows) == 2
    assert "1+1" not in text_of(bench.rows[1].parts[0][1])


# ---- what the agent is answered, and the end of an episode -------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "calc", "parameters": {"type": "object", "properties": {}}}}
CALLS = 'Let me see. <tool_call>{"name":"calc",  "arguments":{"e":"1+1"}}</tool_call>'


def test_tool_calls_come_back_as_calls_and_are_rendered_as_they_were_sampled() -> None:
    request = ChatRequest(({"role": "user", "content": "x"},), (TOOL,))
    message = parsed_calls(tool_parser("hermes"), TOKENIZER, CALLS, request)
    assert message is not None
    assert message["content"] == "Let me see. "
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "calc", "arguments": '{"e": "1+1"}'}
    assert parsed_calls(tool_parser("hermes"), TOKENIZER, "<tool_call>{", request) is None
    conversation = AgentConversation(4)
    conversation.ask(request)
    conversation.answer(message, CALLS, "tool_calls", (3, 2), cut=False)
    answer = {"role": "tool", "content": "2", "tool_call_id": call["id"]}
    again = ChatRequest((*request.messages, {**message, "refusal": ""}, answer))
    assert conversation.rendered(again)[1] == {"role": "assistant", "content": CALLS}
    edited = ChatRequest((*request.messages, {**message, "content": "Hm."}))
    assert conversation.rendered(edited)[1]["tool_calls"][0]["function"]["arguments"] == {"e": "1+1"}
    conversation.ask(again)
    assert [turn.text for turn in conversation._turns] == ["user: x", CALLS, "tool: 2"]
    with pytest.raises(ConfigError, match=r"environment.tool_parser = 'x' is no parser of vLLM; use one of .*hermes"):
        tool_parser("x")


def played(*replies: Reply, cut: bool = False, room: bool = True) -> AgentConversation:
    conversation = AgentConversation(2)
    for reply in replies:
        conversation.add_reply(reply, room=room)
        if conversation.end is None:
            assert isinstance(reply.answer, ChatRequest)
            conversation.ask(reply.answer)
            conversation.answer({"role": "assistant", "content": "a"}, "a", "stop", (1, 1), cut=cut)
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
