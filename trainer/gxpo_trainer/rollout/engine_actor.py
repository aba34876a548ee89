"""Ray actor of a sampling engine."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import ray

from gxpo_trainer.rollout.open_groups import Indexed, Intake
from gxpo_trainer.rollout.requests import FinishedGroups, SamplerSettings, SamplingSettings, StreamEnd
from gxpo_trainer.rollout.sampler import Sampler, import_engine
from gxpo_trainer.runtime.locks import OwnedDirectory
from gxpo_trainer.runtime.processes import frozen_allocations
from gxpo_trainer.runtime.ray_session import trace_this_process

if TYPE_CHECKING:
    from gxpo_trainer.environments.contract import Environments
    from gxpo_trainer.weights.buckets import SyncReport, WeightBucket


T = TypeVar("T")


class SamplerActor:
    """A `Sampler` in an actor.

    The actor's options must set OMP_NUM_THREADS; Ray would derive it from the logical CPUs. After a kill create another
    one with a new `SamplerSettings.seed` (the old seed repeats the old responses) and sync it.
    """

    def __init__(self, settings: SamplerSettings, environments: Environments | None = None) -> None:
        started = time.perf_counter()
        self._folder = _temporary_folder()
        with frozen_allocations():
            import_engine(settings)
        self._sampler = Sampler(settings, self._folder.path, environments)
        # Start-up objects are permanent; scanning them in every collection costs several percent of sampling time.
        gc.collect()
        gc.freeze()
        self._lock = threading.Lock()
        self._intakes: dict[int, Intake] = {}
        self._start_s = time.perf_counter() - started

    def status(self) -> dict[str, Any]:
        """`process`, `version` (None: none verified yet), `folder` (of temporary files), `start_s`."""
        return {
            "process": trace_this_process(),
            "version": self._sampler.version,
            "folder": self._folder.path,
            "start_s": self._start_s,
        }

    def stream(
        self, stream_id: int, sampling: SamplingSettings, weights_version: int
    ) -> Iterator[FinishedGroups | StreamEnd]:
        """Streaming generator: sample what `submit` delivers until `submit(last=True)` or `abort`; see
        `Sampler.stream`."""
        with self._dies_with_its_workers():
            yield from self._sampler.stream(self._intake(stream_id), sampling, weights_version)
        with self._lock:
            del self._intakes[stream_id]

    @ray.method(concurrency_group="intake")
    def pid(self) -> int:
        """Process id; answered while the engine is sampling."""
        return os.getpid()

    @ray.method(concurrency_group="intake")
    def submit(self, stream_id: int, requests: Sequence[Indexed], last: bool = False) -> None:
        """Add requests to a stream. last: none follow."""
        self._intake(stream_id).put(requests)
        if last:
            self._intake(stream_id).close()

    @ray.method(concurrency_group="intake")
    def abort(self, stream_id: int) -> None:
        """End a stream without its unfinished requests."""
        self._intake(stream_id).abort()

    def score(self, token_ids: Sequence[npt.NDArray[np.int32]]) -> list[npt.NDArray[np.float32]]:
        """See Sampler.score."""
        return self._run(lambda: self._sampler.score(token_ids))

    def receive(self, bucket: WeightBucket, *, stream_id: int | None = None) -> SyncReport | None:
        """See Sampler.receive. stream_id: of an open stream, in the concurrency group `weights`; see `_run`."""
        return self._run(lambda: self._sampler.receive(bucket), stream_id)

    def sleep(self, discard_weights: bool) -> None:
        """See Sampler.sleep."""
        self._run(lambda: self._sampler.sleep(discard_weights=discard_weights))

    def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        """See Sampler.wake."""
        self._run(lambda: self._sampler.wake(what))

    def join_broadcast(
        self, address: str, port: int, first_member: int, size: int, *, stream_id: int | None = None
    ) -> None:
        """Make every worker a member of the weight broadcast group. stream_id: as for `receive`."""
        arguments = address, port, first_member, size
        self._run(lambda: self._sampler.weights.call_workers("gxpo_join_broadcast", *arguments), stream_id)

    def _run(self, function: Callable[[], T], stream_id: int | None = None) -> T:
        """Call a function of the sampler; with a stream in its thread, between two of its decoding steps."""

        def guarded() -> T:
            with self._dies_with_its_workers():
                return function()

        return guarded() if stream_id is None else self._intake(stream_id).call(guarded)

    @contextmanager
    def _dies_with_its_workers(self) -> Iterator[None]:
        """End this process when an error is due to a lost worker: Ray then reports a death, which the pool handles."""
        try:
            yield
        except Exception:
            if self._sampler.lost_worker:
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
