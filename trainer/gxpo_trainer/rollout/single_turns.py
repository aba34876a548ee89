"""Groups of single turns: each sample is one response of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gxpo_trainer.rollout.requests import CompleteGroups, SampleRequest, SamplingSettings, sample_seed
from gxpo_trainer.rollout.vllm_driver import EngineDriver, Response, finish_reason
from gxpo_trainer.types import Group, Sample


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
        self._unfinished: dict[int, int] = {}

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
        self._unfinished[index] = request.num_samples
        self._owner.update((id(response), index) for response in responses)

    def finish(self, responses: Sequence[Response]) -> CompleteGroups:
        complete = []
        for response in responses:
            index = self._owner.pop(id(response))
            self._unfinished[index] -= 1
            if not self._unfinished[index]:
                del self._unfinished[index]
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
