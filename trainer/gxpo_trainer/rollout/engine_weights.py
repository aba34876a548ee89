"""Weights of one vLLM engine: full ones, which its workers load and verify, or an adapter on fixed weights.

Import it after the engine: vLLM reads its environment variables as it is imported.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm.lora.request import LoRARequest

from gxpo_trainer.config import LoraConfig
from gxpo_trainer.runtime.processes import peak_resident_bytes
from gxpo_trainer.weights.buckets import SyncReport, WeightBucket
from gxpo_trainer.weights.transports import SharedMemoryPublisher, SharedMemoryReader, fetch
from gxpo_trainer.weights.worker import AdapterFolder, WorkerError


class EngineWeights:
    """Receives buckets for all workers of an engine.

    settings: of the adapter, None for full weights. root: a folder for received adapters.
    """

    def __init__(self, llm: Any, settings: LoraConfig | None, root: Path) -> None:
        self._llm, self._settings = llm, settings
        self._reader = SharedMemoryReader()
        self._local: SharedMemoryPublisher | None = None
        self.folder = AdapterFolder(root, settings) if settings else None
        self.num_syncs = 0
        self.adapter: LoRARequest | None = None
        """The adapter of the latest version, for requests."""

    def receive(self, bucket: WeightBucket) -> SyncReport | None:
        """Load a bucket; after the last one of a version verify all weights. Raises WeightSyncMismatch,
        and ConfigError for a model whose weights cannot be verified."""
        if bucket.index == 0:
            self.num_syncs += 1
        if bucket.transport == "object_store":
            bucket = self._stored_locally(bucket)
        return self._receive_full(bucket) if self.folder is None else self._receive_adapter(self.folder, bucket)

    def call_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of sync.worker.WeightSyncExtension in every worker; raise the first returned error."""
        answers: list[Any] = self._llm.collective_rpc(method, args=arguments)
        for answer in answers:
            if isinstance(answer, WorkerError):
                raise answer.error
        return answers

    def _receive_full(self, bucket: WeightBucket) -> SyncReport | None:
        reports = self.call_workers("gxpo_receive", bucket)
        if not bucket.last:
            return None
        return SyncReport(
            version=bucket.version,
            num_bytes=reports[0].num_bytes,
            num_checked=sum(report.num_checked for report in reports),
            load_s=max(report.load_s for report in reports),
            verify_s=max(report.verify_s for report in reports),
            peak_bytes=sum(report.peak_bytes for report in reports),
        )

    def _receive_adapter(self, folder: AdapterFolder, bucket: WeightBucket) -> SyncReport | None:
        """Give each version's adapter a new id, so that nothing cached under an earlier one is used."""
        started = time.perf_counter()
        path = folder.add(bucket, self._reader.read(bucket))
        if path is None:
            return None
        earlier = self.adapter
        self.adapter = LoRARequest(f"sync-{self.num_syncs}", self.num_syncs, str(path))
        if earlier is not None:
            self._llm.llm_engine.remove_lora(earlier.lora_int_id)
        self._llm.llm_engine.add_lora(self.adapter)
        loaded = time.perf_counter()
        checked = self.call_workers(
            "gxpo_verify_adapter", self.adapter.lora_int_id, str(path), folder.checksums, folder.scaling
        )
        return SyncReport(
            version=bucket.version,
            num_bytes=bucket.num_bytes,
            num_checked=sum(checked),
            load_s=loaded - started,
            verify_s=time.perf_counter() - loaded,
            peak_bytes=peak_resident_bytes(),
        )

    def _stored_locally(self, bucket: WeightBucket) -> WeightBucket:
        """Copy a bucket from the object store into shared memory, where worker processes can map it."""
        self._local = self._local or SharedMemoryPublisher()
        return replace(bucket, transport="shared_memory", location=self._local.store(fetch(bucket)))
