"""Sampling requests, and their way into a running engine."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from gxpo_trainer.config import RunConfig
from gxpo_trainer.data.prompts import json_extra
from gxpo_trainer.environments.contract import Problem
from gxpo_trainer.types import Group, Prompt


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


@dataclass(frozen=True, slots=True)
class SamplerSettings:
    """A sampling engine of a run. model: a transformers folder or a hub name. colocated: with a learner rank on its
    GPU. initial_version: of the weights in the folder, None when a sync must come first."""

    config: RunConfig
    model: str
    device: Literal["cpu", "gpu"] = "cpu"
    threads: int = 1
    seed: int = 0
    colocated: bool = False
    initial_version: int | None = None

    @property
    def sleeps(self) -> bool:
        """Whether the engine can free its memory; vLLM cannot on CPUs."""
        return self.colocated and self.device == "gpu"


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
