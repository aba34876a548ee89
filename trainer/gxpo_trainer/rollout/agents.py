"""Groups of episodes of agents: an engine answers their requests, and keeps what was sampled token by token.

An agent sends texts (environments/worker.py); tokens exist only here. A row of an episode is one growing sequence of
token ids: context, sampled tokens, context, sampled tokens … A request is rendered in the model's chat template. Where
the text of a whole row is the beginning of the rendering, the row grows: only what follows is tokenized, as context.
Where none is (an edited or compacted history, reasoning that the template leaves out, a second conversation), a new row
begins: its prompt has the tokens of the longest known beginning, and tokens of the rest. So nothing that was sampled is
tokenized again, and every sampled token is a target of the loss in exactly one row.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from gxpo_trainer.config.tasks import AgentConfig
from gxpo_trainer.data.chat import chat_text
from gxpo_trainer.environments.contract import ChatRequest, Reply, Turn
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.rollout.conversations import Conversation, Conversations, OpenEpisode, place
from gxpo_trainer.rollout.vllm_driver import CompleteGroups, Response, finish_reason
from gxpo_trainer.types import Utterance


class AgentConversation(Conversation):
    """Course of an episode as messages. `actions` are the answers to the agent, as `Agent.step` takes them. Pure."""

    def __init__(self, max_turns: int) -> None:
        super().__init__(max_turns)
        self.request = ChatRequest(())
        """That is in the engine."""
        self._known: list[tuple[str, ...]] = []
        """Messages of the last request and the answer to it."""
        self._sampled: dict[tuple[str, ...], str] = {}
        self._cut = self._too_long = False

    def add_reply(self, reply: Reply, *, room: bool) -> None:
        """What the agent does next; room: for another sampled token. The episode may have ended then."""
        answer = reply.answer
        if isinstance(answer, ChatRequest | Turn) and answer.reward is not None:
            self._turns.append(Utterance("environment", "", answer.reward))
        if isinstance(answer, Turn):
            self.end = "length" if self._cut else "done"
        elif not isinstance(answer, ChatRequest):
            self._end_without_answer(reply)
            if self._too_long and self.end == "error":
                self.end = "length"  # the agent could not go on without an answer
        else:
            self.end = self._limit(room)

    def rendered(self, request: ChatRequest) -> list[dict[str, Any]]:
        """The messages for the chat template. A turn with tool calls that comes back as it was given is rendered from
        its own text: a template may write the same calls in another way."""
        texts = [self._sampled.get(_key(message)) for message in request.messages]
        return [
            _with_arguments(message) if text is None else {"role": "assistant", "content": text}
            for message, text in zip(request.messages, texts, strict=True)
        ]

    def ask(self, request: ChatRequest, *, cut: bool = False) -> None:
        """Record the messages of a request that is answered next. cut: whether the run allows no more tokens than the
        agent does."""
        self.request, self._cut = request, cut
        known, self._known = self._known, [_key(message) for message in request.messages]
        goes_on = self._known[: len(known)] == known
        new = "\n".join(_shown(message) for message in request.messages[len(known) if goes_on else 0 :])
        self._turns.append(Utterance("environment", new if goes_on else f"[another history]\n{new}"))

    def answer(self, message: Mapping[str, Any], text: str, reason: str, usage: tuple[int, int]) -> None:
        """Answer the agent. text: what the policy wrote."""
        self._too_long = False
        self._turns.append(Utterance("policy", text))
        self._known = [*self._known, _key(message)]
        if "tool_calls" in message:
            self._sampled[_key(message)] = text
        self.written, self._cut = text, self._cut and reason == "length"
        self.actions = (*self.actions, json.dumps({"message": message, "finish_reason": reason, "usage": usage}))

    def refuse(self, reason: str, code: str) -> None:
        """Answer the agent that its request is not served."""
        self._too_long = code == TOO_LONG
        self.actions = (*self.actions, json.dumps({"error": reason, "code": code}))


TOO_LONG = "context_length_exceeded"


def _key(message: Mapping[str, Any]) -> tuple[str, ...]:
    """What makes two messages the same; clients add fields of their own."""
    calls = [
        (call["id"], call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())
    ]
    return message["role"], message["content"] or "", json.dumps(calls)


def _shown(message: Mapping[str, Any]) -> str:
    calls = [f"{call['function']['name']}({call['function']['arguments']})" for call in message.get("tool_calls", ())]
    return "\n".join([f"{message['role']}: {message['content']}", *calls])


def _with_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with the arguments of its tool calls as objects, which templates write as JSON."""
    written = copy.deepcopy(dict(message))
    for call in written.get("tool_calls", ()):
        with contextlib.suppress(TypeError, ValueError):  # no JSON: the template writes the text
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return written


class AgentConversations(Conversations):
    """Groups of episodes of agents. Raises ConfigError for an unknown `environment.tool_parser`."""

    _config: AgentConfig
    _course = AgentConversation

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._parser = None if self._config.tool_parser is None else tool_parser(self._config.tool_parser)

    def finish(self, responses: Sequence[Response]) -> CompleteGroups:
        for response in responses:
            self._answer(self._in_engine.pop(id(response)), response)
        return []

    def _handle(self, episode: OpenEpisode, reply: Reply) -> None:
        """The agent has asked or ended."""
        conversation, sampling = _course(episode), episode.group.sampling
        left = sampling.max_new_tokens - sum(row.response.num_sampled for row in episode.rows)
        conversation.add_reply(reply, room=left > 0)
        request = reply.answer
        if conversation.end is not None or not isinstance(request, ChatRequest):
            return
        if other := [name for name, value in request.sampling.items() if value != getattr(sampling, name)]:
            own = getattr(sampling, other[0])
            refusal = f"{other[0]} = {request.sampling[other[0]]:g} is not that of the run, {own:g}; remove it"
        elif request.tools and self._parser is None:
            refusal = "tools need environment.tool_parser; set it to the format of the model, such as hermes"
        else:
            try:
                if request.tools:
                    _as_vllm(request)
                messages = conversation.rendered(request)
                text = chat_text(self._tokenizer, messages, opened=True, tools=request.tools)
            except ValidationError as error:
                fault = error.errors()[0]
                where = ".".join(map(str, fault["loc"]))
                refusal = f"{where}: {fault['msg']}; write messages and tools as in OpenAI's API"
            except Exception as error:  # a chat template may raise anything
                refusal = f"the messages cannot be rendered in the model's chat template ({error!r}); change them"
            else:
                self._ask(episode, request, text, left)
                return
        self._refuse(episode, refusal)

    def _refuse(self, episode: OpenEpisode, reason: str, code: str = "invalid_value") -> None:
        _course(episode).refuse(reason, code)
        self._call(episode)

    def _ask(self, episode: OpenEpisode, request: ChatRequest, text: str, left: int) -> None:
        """Have the engine sample at most `left` tokens after the rendering."""
        row, ids = place(text, episode.rows, self._tokenizer)
        length = row.length + len(ids)
        if length >= self._max_length:
            row.parts.pop()
            reason = f"the messages have {length} tokens and leave no room in model.max_length = {self._max_length}"
            self._refuse(episode, reason, TOO_LONG)
            return
        allowed = min(left, self._max_length - length, self._config.max_request_tokens or left)
        asked = request.max_tokens or allowed
        cut, allowed = asked >= allowed, min(asked, allowed)
        turn = sum(len(known.parts) // 2 for known in episode.rows)
        self._start_turn(episode, row, ids, allowed, turn, request.stop)
        _course(episode).ask(request, cut=cut)

    def _answer(self, episode: OpenEpisode, response: Response) -> None:
        """The engine has sampled a turn: give it to the agent as a message."""
        course = _course(episode)
        turn = response.token_ids[episode.turn_begin :]
        raw = self._text(turn, special=True)
        episode.row.parts.append((raw, turn))
        reason: str = finish_reason(response)
        text = self._text(turn, special=False)
        for stop in course.request.stop:
            text = text.partition(stop)[0]
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if course.request.tools and self._parser is not None:
            # Markers of calls are special tokens in some vocabularies.
            ends = turn[-1] in self._tokenizer.all_special_ids
            whole = self._text(turn[:-1], special=True) if ends else raw
            if calls := parsed_calls(self._parser, self._tokenizer, whole, course.request):
                message, text, reason = calls, whole, "tool_calls" if reason == "stop" else reason
        usage = response.prompt_length + episode.turn_begin, len(turn)
        course.answer(message, text, reason, usage)
        self._call(episode)


def _course(episode: OpenEpisode) -> AgentConversation:
    assert isinstance(episode.conversation, AgentConversation)
    return episode.conversation


def tool_parser(name: str) -> Any:
    """vLLM's parser class of this name. Raises ConfigError."""
    from vllm.tool_parsers import ToolParserManager

    try:
        return ToolParserManager.get_tool_parser(name)
    except KeyError:
        known = ", ".join(sorted(ToolParserManager.list_registered()))
        raise ConfigError(f"environment.tool_parser = {name!r} is not a parser of vLLM; use one of {known}") from None


def _as_vllm(request: ChatRequest) -> Any:
    """The request as vLLM's parsers take it. Raises ValidationError."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return ChatCompletionRequest(model="policy", messages=list(request.messages), tools=list(request.tools))


def parsed_calls(parser: Any, tokenizer: Any, text: str, request: ChatRequest) -> dict[str, Any] | None:
    """The message with the tool calls that a text contains; None without any. Raises ValidationError."""
    chat = _as_vllm(request)
    try:
        found = parser(tokenizer, chat.tools).extract_tool_calls(text, chat)
    except Exception:  # of a parser, by what a policy may write
        return None
    if not found.tools_called:
        return None
    calls = [
        {"id": call.id, "type": "function", "function": call.function.model_dump(include={"name", "arguments"})}
        for call in found.tool_calls
    ]
    return {"role": "assistant", "content": found.content, "tool_calls": calls}
