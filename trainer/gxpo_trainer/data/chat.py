"""Conversations as tokens: the first messages, and what follows a turn of the policy. Free of torch.

Nothing that the policy sampled is tokenized here. Its turn ends with the end token that it sampled; what the chat
template writes after that token, up to the policy's next turn, is tokenized alone and appended.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gxpo_trainer.errors import ConfigError

Messages = Sequence[Mapping[str, Any]]
"""Messages of a chat template: `role` and `content`."""

_ANSWER = "answer"
_EXCHANGE = ({"role": "user", "content": "question"}, {"role": "assistant", "content": _ANSWER})
_NEXT = {"role": "user", "content": "observation"}
_ANSWERS = (_ANSWER, f"<think>\nthought\n</think>\n\n{_ANSWER}")
"""Turns that a template may rewrite: some leave the reasoning of earlier turns out."""
_EXCHANGES = [number * [_EXCHANGE[0], {**_EXCHANGE[1], "content": answer}] for answer in _ANSWERS for number in (1, 2)]
"""The first turn of the policy, and a later one."""


def render_messages(messages: Messages, tokenizer: Any, tools: Messages = ()) -> npt.NDArray[np.int32]:
    """Token ids of the messages and of the opening of the policy's turn, int32[length].

    Without a chat template the messages' texts are joined by newlines.
    """
    if getattr(tokenizer, "chat_template", None):
        ids = tokenizer(chat_text(tokenizer, messages, opened=True, tools=tools), add_special_tokens=False)["input_ids"]
    else:
        ids = tokenizer("\n".join(message["content"] for message in messages))["input_ids"]
        while ids and ids[-1] == tokenizer.eos_token_id:  # of a tokenizer that ends each text; the policy would go on
            ids = ids[:-1]
    return np.asarray(ids, dtype=np.int32)


def conversation(history: Messages, messages: Messages) -> list[Mapping[str, Any]]:
    """The messages after those of the problem (`Prompt.history`); a system message of theirs replaces the other."""
    own = messages[0]["role"] == "system"
    return [*(message for message in history if not (own and message["role"] == "system")), *messages]


def prompt_text(tokenizer: Any, token_ids: npt.NDArray[np.int32]) -> str:
    """What the policy sees, with special tokens."""
    text: str = tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def rendering(tokenizer: Any) -> str:
    """How prompts are rendered, and what is done without a chat template."""
    if getattr(tokenizer, "chat_template", None):
        return "rendered with the model's chat template"
    return (
        "plain text: the model has no chat template, so messages are joined by newlines without roles, and the policy "
        "has to learn where its answer ends (docs/models.md)"
    )


def chat_template_problem(tokenizer: Any) -> str | None:
    """Why a conversation of several turns cannot be rendered with the chat template; None when it can."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    try:
        rewrites_turns(tokenizer)
    except Exception as error:  # a template may raise anything
        return f"it fails on a conversation of several turns ({type(error).__name__}: {error})"
    if _end_of_answer(tokenizer) is None:
        return "it ends the policy's turn without a special token, or leaves an earlier turn out"
    return None


def rewrites_turns(tokenizer: Any) -> bool:
    """Whether the chat template renders an earlier turn of the policy differently once another message follows, as
    those do that leave its reasoning out."""
    if not getattr(tokenizer, "chat_template", None):
        return False
    return not all(
        chat_text(tokenizer, [*m, _NEXT], opened=True).startswith(chat_text(tokenizer, m, opened=False))
        for m in _EXCHANGES
    )


class ObservationEncoder:
    """Tokens of an environment's answers, at most `max_tokens` each; of a longer answer the beginning is kept.

    Raises ConfigError when the role tokens alone exceed the limit.
    """

    def __init__(self, tokenizer: Any, max_tokens: int) -> None:
        self._tokenizer, self._max_tokens = tokenizer, max_tokens
        self._begin = _end_of_answer(tokenizer) if getattr(tokenizer, "chat_template", None) else None
        if (overhead := len(self.encode(""))) >= max_tokens:
            raise ConfigError(
                f"environment.max_observation_tokens = {max_tokens} leaves no room for an observation: its role tokens "
                f"are {overhead}; raise it"
            )

    def cut(self, observation: str) -> str:
        """The observation, or the part of it that is kept."""
        # Far beyond the limit nothing is tokenized; a token of more characters than this is unheard of.
        observation = observation[: 256 * self._max_tokens]
        if len(self.encode(observation)) <= self._max_tokens:
            return observation
        most = bisect.bisect(range(len(observation)), self._max_tokens, key=lambda n: len(self.encode(observation[:n])))
        return observation[: most - 1]

    def encode(self, observation: str) -> list[int]:
        """Token ids of the observation as the user's message and of the opening of the policy's next turn.

        Without a chat template: those of a newline, the observation and a newline.
        """
        text = f"\n{observation}\n"
        if self._begin is not None:
            messages = [*_EXCHANGE, {"role": "user", "content": observation}]
            text = chat_text(self._tokenizer, messages, opened=True)[self._begin :]
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _end_of_answer(tokenizer: Any) -> int | None:
    """Place after the special token that ends the policy's turn where another message follows; None without one."""
    rendered = chat_text(tokenizer, _EXCHANGE, opened=False)
    after = rendered.rfind(_ANSWER) + len(_ANSWER)
    if _ANSWER not in rendered:
        return None
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    tokens = special | {*tokenizer.all_special_tokens}
    places = [(rendered.find(token, after), len(token)) for token in tokens if token in rendered[after:]]
    if not places:
        return None
    # Of two tokens at the same place the longer one is meant.
    place, length = min(places, key=lambda pair: (pair[0], -pair[1]))
    end = rendered[after - len(_ANSWER) : place + length]
    before, found, _ = chat_text(tokenizer, [*_EXCHANGE, _NEXT], opened=True).rpartition(end)
    return len(before + end) if found else None


def chat_text(tokenizer: Any, messages: Messages, *, opened: bool, tools: Messages = ()) -> str:
    """The messages in the chat template. opened: with the beginning of the policy's next turn. tools: schemas."""
    turns = [dict(message) for message in messages]
    return str(
        tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=opened, tools=list(tools) or None)
    )
