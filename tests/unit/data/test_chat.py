"""Tokens of conversations with a real tokenizer, and which chat templates are refused."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from gxpo_trainer.data.chat import (
    ObservationEncoder,
    chat_template_problem,
    conversation,
    render_messages,
    rewrites_turns,
)
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.learner.models import STARTER_FOLDER
from tools.starter import CHAT_TEMPLATE as STARTER

# Like many published ones: a newline after the end token belongs to what follows it.
LINES = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
# Leaves the reasoning of earlier turns out.
FORGETFUL = (
    "{% for m in messages %}{% set text = m['content'] %}"
    "{% if not loop.last and '</think>' in text %}{% set text = text.split('</think>')[1] %}{% endif %}"
    "{{ '<|' + m['role'] + '|>' + text + '<|end|>' }}{% endfor %}"
)
# Wraps the last turn only.
WRAPPING = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}"
    "{% if loop.last and m['role'] == 'assistant' %}{{ '<think></think>' }}{% endif %}"
    "{{ m['content'] + '<|end|>' }}{% endfor %}"
)
UNENDED = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
FIRST_ONLY = "<|user|>{{ messages[0]['content'] }}<|end|>"
TWO_MESSAGES = "{% if messages|length > 2 %}{{ raise_exception('one question only') }}{% endif %}" + LINES


def tokenizer(template: str | None = STARTER) -> Any:
    """The starter policy's, with its own chat template or another one."""
    made = AutoTokenizer.from_pretrained(STARTER_FOLDER)
    made.chat_template = template
    return made


@pytest.mark.parametrize(
    ("template", "observation", "expected"),
    [
        # The policy has sampled <|end|> itself; the rest of its message's rendering comes first.
        (STARTER, "84", "<|user|>84<|end|><|assistant|>"),
        (LINES, "84", "\n<|user|>\n84<|end|>\n<|assistant|>\n"),
        (LINES, "", "\n<|user|>\n<|end|>\n<|assistant|>\n"),
        (LINES, "answer question", "\n<|user|>\nanswer question<|end|>\n<|assistant|>\n"),
        (None, "84", "\n84\n"),
    ],
)
def test_an_observation_is_a_message_of_the_user(template: str | None, observation: str, expected: str) -> None:
    encoder = ObservationEncoder(tokenizer(template), max_tokens=40)
    assert encoder.encode(observation) == tokenizer()(expected, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("template", [STARTER, LINES, None])
def test_a_long_observation_is_cut_inside_its_message(template: str | None) -> None:
    """The message stays closed, and nothing more is cut than necessary."""
    mine = tokenizer(template)
    text = " ".join(str(n) for n in range(1000))
    for limit in (9, 17, 64):
        encoder = ObservationEncoder(mine, max_tokens=limit)
        ids, whole = encoder.encode(encoder.cut(text)), encoder.encode(text)
        assert limit - 1 <= len(ids) <= limit
        ending = {STARTER: "<|end|><|assistant|>", LINES: "<|end|>\n<|assistant|>\n", None: "\n"}[template]
        decoded = mine.decode(ids)
        assert decoded.endswith(ending)
        kept = decoded.removesuffix(ending)
        assert mine.decode(whole).startswith(kept)
        assert len(kept) > limit // 2
    overhead = len(encoder.encode(""))
    ObservationEncoder(mine, max_tokens=overhead + 1)
    with pytest.raises(ConfigError, match=rf"_tokens = {overhead} leaves no room .* role tokens are {overhead}; raise"):
        ObservationEncoder(mine, max_tokens=overhead)


def test_a_prompt_without_chat_template_does_not_end_with_the_end_token() -> None:
    """Tokenizers of some models end each text."""
    mine, messages = tokenizer(None), [{"role": "system", "content": "1"}, {"role": "user", "content": "2"}]
    plain = mine("1\n2")["input_ids"]
    assert render_messages(messages, mine).tolist() == plain
    mine._tokenizer.post_processor = TemplateProcessing(
        single=f"$A {mine.eos_token}", special_tokens=[(mine.eos_token, mine.eos_token_id)]
    )
    assert mine("1\n2")["input_ids"] == [*plain, mine.eos_token_id]
    assert render_messages(messages, mine).tolist() == plain


def test_a_system_message_of_an_environment_replaces_the_runs() -> None:
    system, mine, user = ({"role": role, "content": role} for role in ("system", "system", "user"))
    assert conversation((system, user), [user]) == [system, user, user]
    assert conversation((system, user), [mine, user]) == [user, mine, user]
    assert conversation((), [user]) == [user]


@pytest.mark.parametrize(
    ("template", "rewrites", "problem"),
    [
        (STARTER, False, None), (LINES, False, None), (None, False, None), (FORGETFUL, True, None),
        (WRAPPING, True, None), (FIRST_ONLY, None, "it ends the policy's turn without a special token, or leaves an"),
        (UNENDED, None, "it ends the policy's turn without a special token"),
        (TWO_MESSAGES, None, "it fails on a conversation of several turns (TemplateError: one question only)"),
    ],
)  # fmt: skip
def test_templates_are_refused_that_cannot_render_several_turns(
    template: str | None, rewrites: bool | None, problem: str | None
) -> None:
    reason = chat_template_problem(tokenizer(template))
    assert (reason is None) == (problem is None)
    assert (reason or "").startswith(problem or "")
    assert rewrites is None or rewrites_turns(tokenizer(template)) == rewrites
