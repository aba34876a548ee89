"""Requests for responses, and a minimal driver of an in-process vLLM engine, for vLLM 0.32, that samples them.

vLLM's front end prepares each step's output for detokenization and streaming. Training needs neither, so requests go
directly to the engine core (`add_request`, `get_output`) and token ids are collected until the request finishes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from gxpo_trainer.data.prompts import json_extra
from gxpo_trainer.environments.contract import Problem
from gxpo_trainer.errors import TrainingError
from gxpo_trainer.types import Group, Prompt, Sample


@dataclass(frozen=True, slots=True)
class EpisodeStart:
    """How the episodes of a request begin. max_prompt_tokens: of their first messages; None: what the model allows."""

    problem: Problem
    seed: int
    max_prompt_tokens: int | None = None

    @classmethod
    def of(cls, prompt: Prompt, template: str, seed: int, max_prompt_tokens: int | None = None) -> EpisodeStart:
        """template: a text with {problem} (`DataConfig.template_text`)."""
        problem = Problem(prompt.id, template.replace("{problem}", prompt.text), prompt.gold, json_extra(prompt))
        return cls(problem, seed, max_prompt_tokens)


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """A prompt and the number of responses to sample.

    prompt_token_ids: int32[length], the templated prompt. seed: None draws from the engine's generator (faster); a
    number gives each sample its own generator, seeded by it and the sample's index. sampling: None for those of the
    stream. episode: None without an environment; with one its first messages are the prompt. rewards: also compute
    reward components, which an evaluation does not use.
    """

    prompt: Prompt
    prompt_token_ids: npt.NDArray[np.int32]
    num_samples: int
    seed: int | None = None
    sampling: SamplingSettings | None = None
    episode: EpisodeStart | None = None
    rewards: bool = True


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """max_new_tokens: most tokens that a response samples. temperature: > 0, or 0 for greedy decoding in an evaluation.

    ignore_eos: sample past the end-of-sequence token, so that every response has max_new_tokens (for benchmarks).
    top_p, top_k, min_p: truncate the distribution; the defaults do not. stop: texts that end a single turn.
    """

    max_new_tokens: int
    temperature: float = 1.0
    ignore_eos: bool = False
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()


CompleteGroups = list[tuple[int, Group]]
"""Groups with the indices of their requests."""


class Sampled(NamedTuple):
    """Item of an engine's stream. groups: that are complete now. busy_s: spent in engine steps since the item before;
    the last item has no group."""

    groups: CompleteGroups
    busy_s: float


def sample_seed(seed: int | None, index: int, turn: int = 0) -> int | None:
    """Seed of a turn of sample `index` of a request: 63 bits from NumPy's SeedSequence of the numbers; None stays."""
    if seed is None:
        return None
    low, high = np.random.SeedSequence([seed, index, *([turn] if turn else [])]).generate_state(2)
    return (int(high) << 32 | int(low)) >> 1


Indexed = tuple[int, SampleRequest]


class Intake:
    """What reaches an engine's thread, which handles it between two of its steps: requests, and calls.

    requests: that came and have not begun. closed: no request follows. Both change in the engine's thread alone.
    """

    def __init__(self, requests: Sequence[Indexed] = (), *, closed: bool = False) -> None:
        self.requests: deque[Indexed] = deque(requests)
        self.closed, self.aborted = closed, False
        self._changed = threading.Condition()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()

    def put(self, requests: Sequence[Indexed], *, last: bool = False) -> None:
        """Deliver requests. last: none follows; the stream ends when those that came are finished."""

        def arrive() -> None:
            self.requests.extend(requests)
            self.closed = self.closed or last

        self.post(arrive)

    def abort(self) -> None:
        """Drop all requests, including those that are running."""
        with self._changed:
            self.aborted = True
            for _, future in self._calls:
                future.cancel()
            self._calls.clear()
            self._changed.notify_all()

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function in the engine's thread and wait for its result."""
        if self.closed:
            raise RuntimeError("the stream has ended; nothing runs in it any more")
        return self.post(function).result()

    def post(self, function: Callable[[], Any]) -> Future[Any]:
        """Run a function in the engine's thread; no longer after an abort."""
        future: Future[Any] = Future()
        with self._changed:
            if self.aborted:
                future.cancel()
            else:
                self._calls.append((function, future))
                self._changed.notify_all()
        return future

    def run_calls(self, *, wait: bool) -> None:
        """Run the calls that have arrived; wait: block until there is one, or the stream is aborted."""
        with self._changed:
            self._changed.wait_for(lambda: not wait or self._calls or self.aborted)
            calls = list(self._calls)
            self._calls.clear()
        for function, future in calls:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)


class Weights(NamedTuple):
    """What samples a request. cache_salt: part of the prefix cache's keys; only requests with the same salt share
    blocks. adapter: vLLM's LoRARequest, None for the base model."""

    version: int
    cache_salt: str
    adapter: Any = None


@dataclass(slots=True)
class Response:
    """Output of one request so far; `finish_reason` is vLLM's, None while the request is running.

    request: as vLLM's core last received it. starts: (weights version, number of tokens before it) of each part.
    stop: texts that end it. observed: (begin, end) of each part that an environment wrote.
    """

    request: Any
    prompt_length: int
    max_new_tokens: int
    starts: list[tuple[int, int]]
    stop: tuple[str, ...] = ()
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    observed: list[tuple[int, int]] = field(default_factory=list)
    _logprobs: list[npt.NDArray[np.float32]] = field(default_factory=list)

    @property
    def logprobs(self) -> npt.NDArray[np.float32]:
        """float32[length]: log-probability of each token under the processed (sampling) distribution; 0 where an
        environment wrote it."""
        # Each step's array is [tokens of the step, 1]; the sampled token is its only column.
        return np.concatenate(self._logprobs)[:, 0]

    @property
    def sampled(self) -> npt.NDArray[np.bool_]:
        """bool[length]: False where an environment wrote the token."""
        sampled = np.ones(len(self.token_ids), dtype=np.bool_)
        for begin, end in self.observed:
            sampled[begin:end] = False
        return sampled

    @property
    def num_sampled(self) -> int:
        return len(self.token_ids) - sum(end - begin for begin, end in self.observed)

    @property
    def versions(self) -> tuple[tuple[int, int], ...]:
        """(weights version, number of tokens) of consecutive parts, without empty ones."""
        bounds = [*self.starts, (0, len(self.token_ids))]
        return tuple((version, end - begin) for (version, begin), (_, end) in pairwise(bounds) if end > begin)


class EngineDriver:
    """Submits requests to the engine core and returns finished responses.

    weights: that sample from now on; None where a sync must come first. running: requests of which `step` samples a
    token, by their id.
    """

    def __init__(self, llm: Any, weights: Weights | None) -> None:
        self.weights = weights
        self._engine = llm.llm_engine
        self._core = self._engine.engine_core
        self._tokenizer = llm.get_tokenizer()
        self.running: dict[str, Response] = {}
        self._suspended: list[Response] = []
        self._submitted = 0

    @property
    def current_weights(self) -> Weights:
        assert self.weights is not None, "a sync is under way"
        return self.weights

    def start(
        self, token_ids: Sequence[int], sampling: SamplingSettings, seeds: Sequence[int | None]
    ) -> list[Response]:
        """Add one request per seed (None: the engine's generator) for one prompt; `step` fills the responses."""
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        weights = self.current_weights
        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            max_tokens=sampling.max_new_tokens,
            ignore_eos=sampling.ignore_eos,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        template = self._engine.input_processor.process_inputs(
            str(self._submitted),
            TokensPrompt(prompt_token_ids=list(token_ids), cache_salt=weights.cache_salt),
            params,
            lora_request=weights.adapter,
            supported_tasks=self._engine.get_supported_tasks(),
        )
        responses = []
        for seed in seeds:
            request = copy(template)
            if seed is not None:
                request.sampling_params = copy(template.sampling_params)
                request.sampling_params.seed = seed
            starts = [(weights.version, 0)]
            responses.append(Response(request, len(token_ids), sampling.max_new_tokens, starts, sampling.stop))
            self._add(responses[-1])
        return responses

    def suspend(self) -> None:
        """Take all running requests out of the engine, whose weights change; their responses keep their tokens."""
        self.weights = None
        self._core.abort_requests(list(self.running))
        self._suspended += self.running.values()
        self.running.clear()

    def resume(self, weights: Weights) -> None:
        """Continue the suspended requests with new weights: the tokens so far are part of the prompt.

        So no key or value in the cache comes from the weights before, and the log-probability of every later token is
        that of the new version, given the whole text before it.
        """
        self.weights = weights
        for response in self._suspended:
            self._continue(response, response.request.sampling_params.seed)
        self._suspended.clear()

    def extend(self, response: Response, token_ids: Sequence[int], seed: int | None) -> None:
        """Continue a finished response after tokens that an environment wrote. seed: of the new turn."""
        begin = len(response.token_ids)
        response.token_ids.extend(token_ids)
        response.observed.append((begin, len(response.token_ids)))
        response._logprobs.append(np.zeros((len(token_ids), 1), dtype=np.float32))
        response.finish_reason = None
        self._continue(response, seed)

    def _continue(self, response: Response, seed: int | None) -> None:
        """A new request whose prompt is everything so far."""
        weights = self.current_weights
        request = response.request = copy(response.request)
        request.prompt_token_ids = [*request.prompt_token_ids[: response.prompt_length], *response.token_ids]
        request.sampling_params = copy(request.sampling_params)
        request.sampling_params.max_tokens = response.max_new_tokens - response.num_sampled
        request.sampling_params.seed = seed
        request.cache_salt, request.lora_request = weights.cache_salt, weights.adapter
        if response.starts[-1][0] != weights.version:
            response.starts.append((weights.version, len(response.token_ids)))
        self._add(response)

    def _add(self, response: Response) -> None:
        response.request.request_id = f"sample-{self._submitted}"
        self._submitted += 1
        self.running[response.request.request_id] = response
        self._core.add_request(response.request)

    def step(self) -> list[Response]:
        """Run one engine step; returns the responses that it finished."""
        finished = []
        for output in self._core.get_output().outputs:
            response = self.running.get(output.request_id)
            if response is None:
                continue  # aborted earlier
            response.token_ids.extend(output.new_token_ids)
            if output.new_logprobs is not None:
                response._logprobs.append(output.new_logprobs.logprobs)
            if output.finish_reason is not None:
                response.finish_reason = str(output.finish_reason)
            elif self._has_stopped(response, len(output.new_token_ids)):
                response.finish_reason = "stop"
                self._core.abort_requests([output.request_id])
            if response.finish_reason is not None:
                del self.running[output.request_id]
                finished.append(response)
        return finished

    def _has_stopped(self, response: Response, num_new: int) -> bool:
        """Whether a stop text ends in the new tokens. The core does not decode: vLLM's front end would look for it."""
        if not response.stop:
            return False
        # A token has at least one byte, but for the special ones, which the text lacks.
        longest = max(len(stop.encode()) for stop in response.stop)
        turn = response.observed[-1][1] if response.observed else 0
        begin = max(turn, len(response.token_ids) - longest - num_new)
        tail = self._tokenizer.decode(response.token_ids[begin:], skip_special_tokens=True)
        return any(stop in tail for stop in response.stop)

    def abort(self) -> None:
        self._core.abort_requests(list(self.running))
        self.running.clear()
        self._suspended.clear()


def finish_reason(response: Response) -> Literal["stop", "length"]:
    """Why vLLM finished a response. Raises TrainingError for any other reason."""
    if response.finish_reason not in ("stop", "length"):
        raise TrainingError(f"the sampler finished a response with reason {response.finish_reason!r}")
    return cast(Literal["stop", "length"], response.finish_reason)


class SingleTurns:
    """Groups whose samples are one response of the engine each.

    Order: `begin` for each request; `finish` what the engine finished; `proceed` before each of its steps; `close`.
    """

    waiting = False

    def __init__(self, engine: EngineDriver, tokenizer: Any, sampling: SamplingSettings, max_length: int) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self._sampling, self._max_length = sampling, max_length
        self._running: dict[int, tuple[SampleRequest, list[Response]]] = {}
        self._owner: dict[int, int] = {}

    def begin(self, index: int, request: SampleRequest) -> None:
        """Raises ValueError when the prompt leaves no room for `max_new_tokens`."""
        sampling, length = request.sampling or self._sampling, len(request.prompt_token_ids)
        if not 0 < length <= self._max_length - sampling.max_new_tokens:
            raise ValueError(
                f"prompt {request.prompt.id} has {length} tokens; with max_new_tokens = {sampling.max_new_tokens} that "
                f"must be between {sampling.max_new_tokens + 1} and model.max_length = {self._max_length}; lower "
                "data.max_prompt_tokens or raise model.max_length"
            )
        seeds = [sample_seed(request.seed, number) for number in range(request.num_samples)]
        responses = self._engine.start(request.prompt_token_ids.tolist(), sampling, seeds)
        self._running[index] = request, responses
        self._owner.update((id(response), index) for response in responses)

    def finish(self, responses: Sequence[Response]) -> CompleteGroups:
        complete = []
        for response in responses:
            index = self._owner.pop(id(response))
            # Responses of a group that finish in one step of the engine find it gone after the first.
            if index in self._running and all(other.finish_reason for other in self._running[index][1]):
                complete.append((index, self._group(*self._running.pop(index))))
        return complete

    def proceed(self) -> CompleteGroups:
        return []

    def close(self) -> None:
        pass

    def _group(self, request: SampleRequest, responses: list[Response]) -> Group:
        texts = self._tokenizer.batch_decode([r.token_ids for r in responses], skip_special_tokens=True)
        for stop in (request.sampling or self._sampling).stop:
            texts = [text.partition(stop)[0] for text in texts]
        samples = tuple(
            Sample(text, np.asarray(r.token_ids, dtype=np.int32), r.logprobs, finish_reason(r), r.versions)
            for r, text in zip(responses, texts, strict=True)
        )
        oldest = min(version for response in responses for version, _ in response.versions)
        return Group(request.prompt, request.prompt_token_ids, samples, oldest)
