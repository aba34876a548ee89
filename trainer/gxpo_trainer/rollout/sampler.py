"""One sampling engine in a Ray actor: vLLM in its process and, with tensor parallelism, in worker processes.

Order of calls: `receive(bucket)` for every bucket of version v; then `stream(..., weights_version=v)` accepts that
version only. While a stream is open, `receive` may only be called with its id: requests are then suspended from the
first bucket to the last and continue with the new version. Log-probabilities are those of the sampling distribution.
"""

from __future__ import annotations

import gc
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import ray

from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.tasks import AgentConfig
from gxpo_trainer.errors import WeightSyncMismatch
from gxpo_trainer.rollout.agents import AgentConversations
from gxpo_trainer.rollout.conversations import Conversations
from gxpo_trainer.rollout.environments import EnvironmentHandle
from gxpo_trainer.rollout.vllm_driver import (
    EngineDriver,
    Indexed,
    Intake,
    Sampled,
    SamplingSettings,
    SingleTurns,
    Weights,
)
from gxpo_trainer.runtime.locks import OwnedDirectory
from gxpo_trainer.runtime.processes import LOOPBACK, frozen_allocations, interface_to, listen_on
from gxpo_trainer.runtime.ray_session import trace_this_process

if TYPE_CHECKING:
    from gxpo_trainer.weights.buckets import SyncReport, WeightBucket

WORKER_EXTENSION = "gxpo_trainer.weights.worker.WeightSyncExtension"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SamplerSettings:
    """A sampling engine of a run. model: a transformers folder or a hub name. colocated: with a learner rank on its
    GPU. initial_version: of the weights in the folder, None when a sync must come first. name: the prefix of
    the names of its episodes."""

    config: RunConfig
    model: str
    device: Literal["cpu", "gpu"] = "cpu"
    threads: int = 1
    seed: int = 0
    colocated: bool = False
    initial_version: int | None = None
    name: str = ""

    @property
    def sleeps(self) -> bool:
        """Whether the engine can free its memory; vLLM cannot on CPUs."""
        return self.colocated and self.device == "gpu"


class SamplerActor:
    """A vLLM engine with replaceable, versioned weights, or a replaceable LoRA adapter on fixed weights.

    Create at most one per process: vLLM keeps process-wide state. The actor's options must set OMP_NUM_THREADS; Ray
    would derive it from the logical CPUs. After a kill create another one with a new `SamplerSettings.seed` (the old
    seed repeats the old responses) and sync it. Raises WeightSyncMismatch when vLLM's loaded weights differ from those
    in the model folder. environments: runs the episodes of the run's environment; None for single turns.
    """

    def __init__(self, settings: SamplerSettings, environments: EnvironmentHandle | None = None) -> None:
        self._folder = _temporary_folder()
        set_environment(settings)
        with frozen_allocations():
            import torch
            from vllm import LLM

            from gxpo_trainer.weights.worker import EngineWeights
        self._settings, self.environments = settings, environments
        self._llm: Any = LLM(**_engine_arguments(settings))
        # A current stream is that of a thread, and Ray calls the methods in another thread than the constructor.
        in_process = settings.device == "gpu" and settings.config.placement.tensor_parallel == 1
        self._stream = torch.cuda.current_stream() if in_process else None
        self._tokenizer: Any = self._llm.get_tokenizer()
        self.weights = EngineWeights(self._llm, settings.config.learner.lora, self._folder.path)
        first = settings.initial_version
        self._driver = EngineDriver(self._llm, None if first is None else Weights(first, "sync-0"))
        if Path(settings.model).is_dir():
            self.weights.call_workers("verify_checkpoint", settings.model)
        # Start-up objects are permanent; scanning them in every collection costs several percent of sampling time.
        gc.collect()
        gc.freeze()
        self._lock = threading.Lock()
        self._intakes: dict[int, Intake] = {}

    def status(self) -> dict[str, Any]:
        """`process`, `version` (None: none verified yet) and `folder` (of temporary files)."""
        return {"process": trace_this_process(), "version": self._version, "folder": self._folder.path}

    def stream(self, stream_id: int, sampling: SamplingSettings, weights_version: int) -> Iterator[Sampled]:
        """Streaming generator: sample what `submit` delivers until `submit(last=True)` or `abort`; see `sample`."""
        with self._dies_with_its_workers():
            yield from self.sample(self._intake(stream_id), sampling, weights_version)
        with self._lock:
            del self._intakes[stream_id]

    @ray.method(concurrency_group="intake")
    def submit(self, stream_id: int, requests: Sequence[Indexed], last: bool = False) -> None:
        """Add requests to a stream. last: none follow."""
        self._intake(stream_id).put(requests, last=last)

    @ray.method(concurrency_group="intake")
    def abort(self, stream_id: int) -> None:
        """End a stream without its unfinished requests."""
        self._intake(stream_id).abort()

    def sample(self, intake: Intake, sampling: SamplingSettings, weights_version: int) -> Iterator[Sampled]:
        """Sample requests as they arrive until `intake` is closed; yield groups as they finish.

        A group's samples are ordered by index. Closing the iterator early aborts running requests. Raises
        WeightSyncMismatch when another version is loaded and ValueError when a prompt leaves no room for
        `max_new_tokens`.
        """
        if self._version != weights_version:
            held = "no verified version" if self._version is None else f"version {self._version}"
            raise WeightSyncMismatch(f"weights version {weights_version} was requested; the sampler holds {held}")
        config, busy_s = self._settings.config.environment, 0.0
        common = self._driver, self._tokenizer, sampling, self._settings.config.model.max_length
        groups: SingleTurns | Conversations = SingleTurns(*common)
        if self.environments is not None and config.multi_turn:
            kind = AgentConversations if isinstance(config, AgentConfig) else Conversations
            name = self._settings.name
            groups = kind(*common, environments=self.environments, config=config, intake=intake, name=name)
        try:
            idle = False
            while not intake.aborted:
                intake.run_calls(wait=idle or self._version is None)
                if self._version is None:
                    continue  # between two buckets
                complete = groups.proceed()
                while intake.requests:
                    groups.begin(*intake.requests.popleft())
                idle = not self._driver.running and not complete
                if idle and intake.closed and not groups.waiting:
                    break
                started = time.perf_counter()
                finished = self._driver.step() if self._driver.running else ()
                busy_s += time.perf_counter() - started
                complete += groups.finish(finished)
                if complete:
                    yield Sampled(complete, busy_s)
                    busy_s = 0.0
            yield Sampled([], busy_s)
        finally:
            self._driver.abort()
            groups.close()

    def score(self, token_ids: Sequence[npt.NDArray[np.int32]]) -> list[npt.NDArray[np.float32]]:
        """log π(token | tokens before it) at temperature 1 of tokens 1 … length-1 of each list: float32[length-1]."""
        from vllm import SamplingParams, TokensPrompt

        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, flat_logprobs=True)
        prompts = [TokensPrompt(prompt_token_ids=ids.tolist()) for ids in token_ids]
        adapter = self.weights.adapter
        outputs = self._run(lambda: self._llm.generate(prompts, params, use_tqdm=False, lora_request=adapter))
        # Position 0 has no entry, so the flat list starts at token 1.
        return [np.asarray(output.prompt_logprobs.logprobs, dtype=np.float32) for output in outputs]

    def receive(self, bucket: WeightBucket, *, stream_id: int | None = None) -> SyncReport | None:
        """Load a bucket of a published version in every worker; after the last one verify all and return a SyncReport.

        Raises WeightSyncMismatch; the engine then holds no version. stream_id: of an open stream, in the concurrency
        group `weights`; see `_run`.
        """

        def load() -> SyncReport | None:
            self._driver.suspend()
            report = self.weights.receive(bucket)
            if bucket.last:
                # The salt excludes prefix-cache blocks computed with earlier weights.
                salt = f"sync-{self.weights.num_syncs}"
                self._driver.resume(Weights(bucket.version, salt, self.weights.adapter))
            return report

        return self._run(load, stream_id)

    def join_broadcast(
        self, address: str, port: int, first_member: int, size: int, *, stream_id: int | None = None
    ) -> None:
        """Make every worker a member of the weight broadcast group. stream_id: as for `receive`."""
        arguments = address, port, first_member, size
        self._run(lambda: self.weights.call_workers("join", *arguments), stream_id)

    def sleep(self, discard_weights: bool) -> None:
        """Free the GPU's memory. discard_weights: a sync brings them again, so no copy is kept on the host."""
        if self._settings.sleeps:
            self._run(lambda: self._llm.sleep(level=2 if discard_weights else 1))

    def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        """Allocate the weights or the KV cache again; the weights come first."""
        if self._settings.sleeps:
            self._run(lambda: self._llm.wake_up(tags=[what]))

    @property
    def _version(self) -> int | None:
        """Of the loaded weights, None before the first sync and after a failed one."""
        return None if self._driver.weights is None else self._driver.weights.version

    def _run(self, function: Callable[[], T], stream_id: int | None = None) -> T:
        """Call a function that uses the engine; with a stream in its thread, between two of its decoding steps."""

        def guarded() -> T:
            with self._dies_with_its_workers():
                return function()

        return guarded() if stream_id is None else self._intake(stream_id).call(guarded)

    @contextmanager
    def _dies_with_its_workers(self) -> Iterator[None]:
        """End this process when an error is due to a worker of tensor parallelism that has died: Ray then reports a
        death, which the pool handles. The engine works on the stream that it was built on."""
        if self._stream is not None:
            import torch

            torch.cuda.set_stream(self._stream)
        try:
            yield
        except Exception:
            if getattr(self._llm.llm_engine.model_executor, "is_failed", False):
                os._exit(1)
            raise

    def _intake(self, stream_id: int) -> Intake:
        with self._lock:
            return self._intakes.setdefault(stream_id, Intake())


def _temporary_folder() -> OwnedDirectory:
    """A folder for all temporary files of this process and its workers, which vLLM leaves behind when it is killed."""
    shared = tempfile.gettempdir()
    # Compiled kernels are kept for later engines.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{shared}/torchinductor_{os.getuid()}")
    folder = OwnedDirectory(Path(shared), "gxpo-sampler-")
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder.path)
    return folder


def remote_sampler(kind: type[SamplerActor] = SamplerActor) -> Any:
    """The actor class for Ray. Requests and weights arrive in threads of their own, while the engine's is sampling."""
    options: dict[str, Any] = {"concurrency_groups": {"intake": 1, "weights": 1}}
    return ray.remote(**options)(kind)


def set_environment(settings: SamplerSettings) -> None:
    """Set the variables that vLLM and its threads read; those that the user has set are kept."""
    rollout = settings.config.rollout
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # An engine is on one host, yet NCCL reads its variable once for the groups with learners of other hosts too.
    listen_on("GLOO_SOCKET_IFNAME", LOOPBACK)
    node: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    listen_on("NCCL_SOCKET_IFNAME", interface_to(node))
    if settings.device == "cpu":
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(rollout.cpu_kv_cache_gib)
        os.environ["OMP_NUM_THREADS"] = str(settings.threads)
        # By default waiting threads spin for milliseconds and block the thread they wait for: on two busy cores
        # sampling takes four times as long.
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")
        # The learner shares the cores, so the sampler's threads are not pinned.
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        if rollout.eager("cpu"):
            # Even in eager mode vLLM compiles its token-rank function for each shape: seconds at every start.
            os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    elif rollout.deterministic:
        # Other GPU kernels round by the composition of the batch, which depends on the number of engines.
        os.environ.setdefault("VLLM_BATCH_INVARIANT", "1")


def _engine_arguments(settings: SamplerSettings) -> dict[str, Any]:
    config, rollout = settings.config, settings.config.rollout
    automatic = "float32" if config.learner.precision == "fp32" else "bfloat16"
    arguments: dict[str, Any] = {
        "model": settings.model,
        "dtype": automatic if rollout.dtype == "auto" else rollout.dtype,
        "max_model_len": config.model.max_length,
        "max_num_seqs": rollout.max_num_seqs,
        "seed": settings.seed,
        "enforce_eager": rollout.eager(settings.device),
        "trust_remote_code": config.model.trust_remote_code,
        "load_format": "safetensors",  # the other formats are pickles, which can run code
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "enable_prefix_caching": True,
        "worker_extension_cls": WORKER_EXTENSION,
    }
    if config.placement.tensor_parallel > 1:
        arguments["tensor_parallel_size"] = config.placement.tensor_parallel
        arguments["distributed_executor_backend"] = "mp"
    if settings.sleeps:
        arguments["enable_sleep_mode"] = True
    if config.learner.lora is not None:
        arguments["enable_lora"] = True
        arguments["max_loras"] = 1
        # The smallest limit that vLLM supports.
        limits = (8, 16, 32, 64, 128, 256, 320, 512)
        arguments["max_lora_rank"] = next(limit for limit in limits if config.learner.lora.rank <= limit)
    if settings.device == "cpu":
        # Samples of a prompt share its full blocks; the default of 128 tokens is longer than most prompts.
        arguments["block_size"] = 32
        arguments["max_num_batched_tokens"] = max(8192, config.model.max_length)
        # Chunked prefill rewinds a request's generator, which CPU generators do not support.
        arguments["enable_chunked_prefill"] = False
    else:
        arguments["gpu_memory_utilization"] = rollout.memory_share(shared=settings.colocated)
        arguments["moe_backend"] = "triton"  # others reorder the weights of experts, which could not be compared then
    return arguments
