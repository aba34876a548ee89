"""The sampler: vLLM in this process (`Sampler`), and the same behind a Ray actor (`SamplerActor`).

Order of calls, which the controller keeps: `receive(manifest)` proves version v; `generate(..., weights_version=v)`
is answered only for the version held. A sync and a generation never overlap, because an actor runs one method at
a time and a generator must be read to its end or closed first.

Log-probabilities are those of the distribution that was sampled from: softmax(logits / temperature) over the whole
vocabulary, no truncation.
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

from gxpo_trainer.cluster.memory import lasting
from gxpo_trainer.cluster.ray_session import this_node
from gxpo_trainer.errors import ConfigError, TrainingError, WeightSyncMismatch
from gxpo_trainer.rollout.requests import SampleRequest, SamplerSettings, SamplingSettings
from gxpo_trainer.rollout.vllm_driver import EngineDriver, Response
from gxpo_trainer.types import Group, Sample


class Sampler:
    """An in-process vLLM engine whose weights can be replaced and whose answers name their version.

    Start only one a process: vLLM keeps process-wide state. Raises ConfigError for an impossible setting and
    WeightSyncMismatch when the weights vLLM loaded are not those in the model folder.
    """

    def __init__(self, settings: SamplerSettings) -> None:
        if settings.tensor_parallel != 1:
            raise ConfigError(
                f"placement.tensor_parallel = {settings.tensor_parallel}: the sampler's weights can be proven only "
                "when one process holds them all; set it to 1"
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
        """The weights version held, None before the first sync and after a failed one."""
        return self.receiver.version

    def generate(
        self, requests: Sequence[SampleRequest], sampling: SamplingSettings, weights_version: int
    ) -> Iterator[list[Group]]:
        """Sample all requests together; yield the groups that have finished since the last yield.

        Groups come in the order in which they finish; a group's samples are in the order of their index. Closing
        the iterator early drops what is still running. Raises, at the call, WeightSyncMismatch when another version
        is held and ValueError when a prompt leaves no room for `max_new_tokens`.
        """
        self._require(weights_version)
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
        # Position 0 has no predecessor and no entry, so the flat list starts at token 1.
        return [np.asarray(output.prompt_logprobs.logprobs, dtype=np.float32) for output in outputs]

    def receive(self, manifest: Any) -> Any:
        """Load and prove a published version; see `sync.receiver.WeightReceiver.receive`."""
        return self.receiver.receive(manifest)

    def _require(self, weights_version: int) -> None:
        if self.version != weights_version:
            held = "no proven version" if self.version is None else f"version {self.version}"
            raise WeightSyncMismatch(f"the sampler holds {held} of the weights and was asked for {weights_version}")

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
            # Blocks computed with earlier weights cannot be found again.
            cache_salt=f"sync-{self.receiver.num_syncs}",
        )

    def _group(self, request: SampleRequest, responses: list[Response], version: int) -> Group:
        texts = self._tokenizer.batch_decode([r.token_ids for r in responses], skip_special_tokens=True)
        samples = tuple(_sample(r, text) for r, text in zip(responses, texts, strict=True))
        return Group(request.prompt, request.prompt_token_ids, samples, version)


def sample_seed(seed: int, index: int) -> int:
    """The seed of sample `index` of a request: 63 bits from NumPy's SeedSequence of both numbers."""
    low, high = np.random.SeedSequence([seed, index]).generate_state(2)
    return (int(high) << 32 | int(low)) >> 1


def _sample(response: Response, text: str) -> Sample:
    if response.finish_reason not in ("stop", "length"):
        raise TrainingError(f"the sampler ended a response with {response.finish_reason!r}")
    token_ids = np.asarray(response.token_ids, dtype=np.int32)
    return Sample(text, token_ids, response.logprobs, cast(Literal["stop", "length"], response.finish_reason))


def import_engine(settings: SamplerSettings) -> None:
    """Import vLLM, which reads the environment meanwhile. Once a process: later settings are not seen."""
    _set_environment(settings)
    import vllm.entrypoints.llm  # noqa: F401


def _set_environment(settings: SamplerSettings) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if settings.device == "cpu":
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(settings.cpu_kv_cache_gib)
        os.environ["OMP_NUM_THREADS"] = str(settings.threads)
        # Threads that wait for each other spin for milliseconds by default. Where something else wants the core, the
        # one awaited cannot run meanwhile: on two busy cores sampling then takes four times as long.
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")
        # The learner shares the cores: pinning the sampler's threads would only get in its way.
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        if settings.enforce_eager:
            # vLLM compiles the count behind a token's rank all the same, for each shape of it: seconds at every start.
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
        # A prompt's first blocks are shared by its samples; the default block of 128 would hold most prompts whole
        # and share nothing.
        "enable_prefix_caching": True,
    }
    if settings.device == "cpu":
        arguments["block_size"] = 32
        arguments["max_num_batched_tokens"] = max(8192, settings.max_length)
        # A prompt that is prefilled in pieces winds its generator back, which CPU generators cannot do.
        arguments["enable_chunked_prefill"] = False
    else:
        arguments["gpu_memory_utilization"] = settings.gpu_memory_utilization
    if settings.weight_transfer == "nccl":
        from vllm.config import WeightTransferConfig

        arguments["weight_transfer_config"] = WeightTransferConfig(backend="nccl")
    return arguments


class SamplerActor:
    """`Sampler` behind `ray.remote(SamplerActor).options(...)`.

    The options must set OMP_NUM_THREADS in the actor's environment: Ray would derive it from the logical CPUs. The
    actor holds no file, lock or socket of its own: after a kill it is simply made again, with a new
    `SamplerSettings.seed` (the old one would repeat the old draws), and given the newest manifest.
    """

    def __init__(self, settings: SamplerSettings) -> None:
        started = time.perf_counter()
        with lasting():
            import_engine(settings)
        self._sampler = Sampler(settings)
        # What start-up made stays; collecting it again and again costs several percent of the sampling time.
        gc.collect()
        gc.freeze()
        self._start_s = time.perf_counter() - started

    def status(self) -> dict[str, Any]:
        """`pid`, `version` (None: nothing proven yet), `start_s`."""
        return {"pid": os.getpid(), "version": self._sampler.version, "start_s": self._start_s}

    def node(self) -> str:
        """The Ray node that it runs on."""
        return this_node()

    def generate(
        self, requests: Sequence[SampleRequest], sampling: SamplingSettings, weights_version: int
    ) -> Iterator[list[Group]]:
        """A streaming generator of lists of finished groups; see `Sampler.generate`."""
        yield from self._sampler.generate(requests, sampling, weights_version)

    def score(self, token_ids: Sequence[npt.NDArray[np.int32]]) -> list[npt.NDArray[np.float32]]:
        return self._sampler.score(token_ids)

    def receive(self, manifest: Any) -> Any:
        return self._sampler.receive(manifest)

    # The four calls of vLLM's trainer-side weight transfer.

    def init_weight_transfer_engine(self, request: Any) -> None:
        self._sampler.weights.init_transfer(request)

    def start_weight_update(self) -> None:
        self._sampler.weights.start_transfer()

    def update_weights(self, request: Any) -> None:
        self._sampler.weights.receive_transfer(request)

    def finish_weight_update(self) -> None:
        self._sampler.weights.finish_transfer()
