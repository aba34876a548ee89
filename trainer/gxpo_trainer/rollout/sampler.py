"""The sampler: vLLM in this process (`Sampler`), and its Ray actor (`SamplerActor`).

Order of calls: `receive(manifest)` loads and verifies version v; then `generate(..., weights_version=v)` accepts that
version only. A sync and a generation never overlap: an actor runs one method at a time, and a generator must be
exhausted or closed first.

Log-probabilities are those of the sampling distribution: softmax(logits / temperature) over the whole vocabulary,
without truncation.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from gxpo_trainer.cluster.memory import frozen_allocations
from gxpo_trainer.cluster.ray_session import this_node
from gxpo_trainer.errors import ConfigError, TrainingError, WeightSyncMismatch
from gxpo_trainer.rollout.requests import SampleRequest, SamplerSettings, SamplingSettings
from gxpo_trainer.rollout.vllm_driver import EngineDriver, Response
from gxpo_trainer.types import Group, Sample


class Sampler:
    """An in-process vLLM engine with replaceable, versioned weights.

    Create at most one per process: vLLM keeps process-wide state. Raises ConfigError for an unsupported setting and
    WeightSyncMismatch when vLLM's loaded weights differ from those in the model folder.
    """

    def __init__(self, settings: SamplerSettings) -> None:
        if settings.tensor_parallel != 1:
            raise ConfigError(
                f"placement.tensor_parallel = {settings.tensor_parallel}: the sampler's weights can be verified only "
                "if one process holds all of them; set it to 1"
            )
        import_engine(settings)
        from vllm import LLM

        from gxpo_trainer.sync.receiver import WeightReceiver
        from gxpo_trainer.sync.vllm_weights import VllmWeights

        self._settings = settings
        self._llm: Any = LLM(**_engine_arguments(settings))
        self._tokenizer: Any = self._llm.get_tokenizer()
        self.weights = VllmWeights(self._llm)
        self.receiver = WeightReceiver(self.weights, settings.initial_version)
        self._driver = EngineDriver(self._llm)
        if Path(settings.model).is_dir():
            self.receiver.verify_checkpoint(Path(settings.model))

    @property
    def version(self) -> int | None:
        """Version of the loaded weights, None before the first sync and after a failed one."""
        return self.receiver.version

    def generate(
        self, requests: Sequence[SampleRequest], sampling: SamplingSettings, weights_version: int
    ) -> Iterator[list[Group]]:
        """Sample all requests concurrently; yield groups as they finish.

        A group's samples are ordered by index. Closing the iterator early aborts running requests. Raises, at the
        call, WeightSyncMismatch when another version is loaded and ValueError when a prompt leaves no room for
        `max_new_tokens`.
        """
        if self.version != weights_version:
            held = "no verified version" if self.version is None else f"version {self.version}"
            raise WeightSyncMismatch(f"weights version {weights_version} was requested; the sampler holds {held}")
        for request in requests:
            self._check_length(request, sampling)
        return self._generate(requests, sampling, weights_version)

    def _generate(
        self, requests: Sequence[SampleRequest], sampling: SamplingSettings, weights_version: int
    ) -> Iterator[list[Group]]:
        groups: list[list[Response]] = []
        owner: dict[int, int] = {}
        try:
            for index, request in enumerate(requests):
                groups.append(self._submit(request, sampling))
                owner.update((id(response), index) for response in groups[-1])
            open_samples = [len(group) for group in groups]
            while self._driver.running:
                complete = []
                for response in self._driver.step():
                    index = owner[id(response)]
                    open_samples[index] -= 1
                    if not open_samples[index]:
                        complete.append(self._group(requests[index], groups[index], weights_version))
                if complete:
                    yield complete
        finally:
            self._driver.abort()

    def score(self, token_ids: Sequence[npt.NDArray[np.int32]]) -> list[npt.NDArray[np.float32]]:
        """log π(token | tokens before it) at temperature 1 of tokens 1 … length-1 of each list: float32[length-1]."""
        from vllm import SamplingParams, TokensPrompt

        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, flat_logprobs=True)
        prompts = [TokensPrompt(prompt_token_ids=ids.tolist()) for ids in token_ids]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        # Position 0 has no entry, so the flat list starts at token 1.
        return [np.asarray(output.prompt_logprobs.logprobs, dtype=np.float32) for output in outputs]

    def receive(self, manifest: Any) -> Any:
        """Load and verify a published version; see `sync.receiver.WeightReceiver.receive`."""
        return self.receiver.receive(manifest)

    def _check_length(self, request: SampleRequest, sampling: SamplingSettings) -> None:
        needed = len(request.prompt_token_ids) + sampling.max_new_tokens
        if needed > self._settings.max_length or not len(request.prompt_token_ids):
            raise ValueError(
                f"prompt {request.prompt.id} has {len(request.prompt_token_ids)} tokens; with max_new_tokens = "
                f"{sampling.max_new_tokens} that must be between {sampling.max_new_tokens + 1} and model.max_length = "
                f"{self._settings.max_length}; lower data.max_prompt_tokens or raise model.max_length"
            )

    def _submit(self, request: SampleRequest, sampling: SamplingSettings) -> list[Response]:
        return self._driver.submit(
            request.prompt_token_ids.tolist(),
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            ignore_eos=sampling.ignore_eos,
            seeds=[
                None if request.seed is None else sample_seed(request.seed, number)
                for number in range(request.num_samples)
            ],
            # Excludes prefix-cache blocks computed with earlier weights.
            cache_salt=f"sync-{self.receiver.num_syncs}",
        )

    def _group(self, request: SampleRequest, responses: list[Response], version: int) -> Group:
        texts = self._tokenizer.batch_decode([r.token_ids for r in responses], skip_special_tokens=True)
        samples = tuple(_sample(r, text) for r, text in zip(responses, texts, strict=True))
        return Group(request.prompt, request.prompt_token_ids, samples, version)


def sample_seed(seed: int, index: int) -> int:
    """Seed of sample `index` of a request: 63 bits from NumPy's SeedSequence of both numbers."""
    low, high = np.random.SeedSequence([seed, index]).generate_state(2)
    return (int(high) << 32 | int(low)) >> 1


def _sample(response: Response, text: str) -> Sample:
    if response.finish_reason not in ("stop", "length"):
        raise TrainingError(f"the sampler finished a response with reason {response.finish_reason!r}")
    token_ids = np.asarray(response.token_ids, dtype=np.int32)
    return Sample(text, token_ids, response.logprobs, cast(Literal["stop", "length"], response.finish_reason))


def import_engine(settings: SamplerSettings) -> None:
    """Set the environment, which vLLM reads at import, and import it. Later calls in a process have no effect."""
    _set_environment(settings)
    import vllm.entrypoints.llm  # noqa: F401


def _set_environment(settings: SamplerSettings) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if settings.device == "cpu":
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(settings.cpu_kv_cache_gib)
        os.environ["OMP_NUM_THREADS"] = str(settings.threads)
        # By default waiting threads spin for milliseconds and block the thread they wait for: on two busy cores
        # sampling takes four times as long.
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")
        # The learner shares the cores, so the sampler's threads are not pinned.
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        if settings.enforce_eager:
            # Even in eager mode vLLM compiles its token-rank function for each shape: seconds at every start.
            os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")


def _engine_arguments(settings: SamplerSettings) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": settings.model,
        "dtype": settings.dtype,
        "max_model_len": settings.max_length,
        "max_num_seqs": settings.max_num_seqs,
        "seed": settings.seed,
        "enforce_eager": settings.enforce_eager,
        "trust_remote_code": settings.trust_remote_code,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "enable_prefix_caching": True,
    }
    if settings.device == "cpu":
        # Samples of a prompt share its full blocks; the default of 128 tokens is longer than most prompts.
        arguments["block_size"] = 32
        arguments["max_num_batched_tokens"] = max(8192, settings.max_length)
        # Chunked prefill rewinds a request's generator, which CPU generators do not support.
        arguments["enable_chunked_prefill"] = False
    else:
        arguments["gpu_memory_utilization"] = settings.gpu_memory_utilization
    if settings.weight_transfer == "nccl":
        from vllm.config import WeightTransferConfig

        arguments["weight_transfer_config"] = WeightTransferConfig(backend="nccl")
    return arguments


class SamplerActor:
    """Ray actor of a `Sampler`.

    The actor's options must set OMP_NUM_THREADS; Ray would derive it from the logical CPUs. The actor owns no file,
    lock or socket: after a kill, create another one with a new `SamplerSettings.seed` (the old seed repeats the old
    responses) and send it the latest manifest.
    """

    def __init__(self, settings: SamplerSettings) -> None:
        started = time.perf_counter()
        with frozen_allocations():
            import_engine(settings)
        self._sampler = Sampler(settings)
        # Start-up objects are permanent; scanning them in every collection costs several percent of sampling time.
        gc.collect()
        gc.freeze()
        self._start_s = time.perf_counter() - started

    def status(self) -> dict[str, Any]:
        """`pid`, `version` (None: none verified yet), `start_s`."""
        return {"pid": os.getpid(), "version": self._sampler.version, "start_s": self._start_s}

    def node(self) -> str:
        """Id of the actor's Ray node."""
        return this_node()

    def generate(
        self, requests: Sequence[SampleRequest], sampling: SamplingSettings, weights_version: int
    ) -> Iterator[list[Group]]:
        """Streaming generator of lists of finished groups; see `Sampler.generate`."""
        yield from self._sampler.generate(requests, sampling, weights_version)

    def score(self, token_ids: Sequence[npt.NDArray[np.int32]]) -> list[npt.NDArray[np.float32]]:
        return self._sampler.score(token_ids)

    def receive(self, manifest: Any) -> Any:
        return self._sampler.receive(manifest)

    # Called by vLLM's trainer-side weight transfer.

    def init_weight_transfer_engine(self, request: Any) -> None:
        self._sampler.weights.init_transfer(request)

    def start_weight_update(self) -> None:
        self._sampler.weights.start_transfer()

    def update_weights(self, request: Any) -> None:
        self._sampler.weights.receive_transfer(request)

    def finish_weight_update(self) -> None:
        self._sampler.weights.finish_transfer()
