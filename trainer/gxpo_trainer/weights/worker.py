"""The engine's side of a sync: each worker loads its parts of the published tensors, reads them back and compares.

Under LoRA each version is written as a PEFT adapter, loaded under a new id, and read back.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from gxpo_trainer.config import LoraConfig
from gxpo_trainer.errors import ConfigError, WeightSyncMismatch
from gxpo_trainer.runtime.processes import peak_resident_bytes, settle_kernels, write_errors
from gxpo_trainer.weights import transports
from gxpo_trainer.weights.buckets import (
    ADAPTER_WEIGHTS,
    SyncReport,
    TensorEntry,
    WeightBucket,
    checksum,
    tensors_of,
    without_signed_zeros,
)
from gxpo_trainer.weights.vllm_weights import EXPERTS, Published, Readback, Slot, VllmWeights

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

settle_kernels()  # each worker of an engine imports this module before it builds the model


@dataclass(frozen=True, slots=True)
class _Expected:
    """Rows [at, at + num_rows) of a slot after a sync, and the published part that they must equal."""

    entry: TensorEntry
    at: int
    num_rows: int
    checksum: int


class WeightReceiver:
    """Loads buckets into one worker and, after the last of a version, verifies all weights. rank: of the worker in its
    engine."""

    def __init__(self, weights: VllmWeights, device: torch.device, rank: int = 0) -> None:
        self.weights, self._device, self._rank = weights, device, rank
        self.verify_adapter = weights.verify_adapter
        self._shared_memory = transports.SharedMemoryReader()
        self._group: transports.BroadcastGroup | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._expected: dict[Slot, list[_Expected]] = {}
        self._load_s = 0.0

    def join(self, address: str, port: int, first_member: int, size: int) -> None:
        """Join the broadcast group as member `first_member` + rank; every member must call it at the same time."""
        self._group = transports.BroadcastGroup(address, port, first_member + self._rank, size, self._device)

    def receive(self, bucket: WeightBucket) -> SyncReport | None:
        """Load a bucket; after the last one read everything back, compare, and report.

        Raises WeightSyncMismatch (tensor, location, both checksums), also when the engine's dtype cannot represent the
        published values, and ConfigError for tensors that the model has no slot for.
        """
        started = time.perf_counter()
        if bucket.index == 0:
            self._load_s = 0.0
        published = list(tensors_of(bucket, self._read(bucket)))
        self.weights.load(published)
        for entry, tensor in published:
            self._expect(entry, tensor)
        if self._device.type == "cuda":
            # The learner, another process, overwrites the buffer once this returns; copies from it may still be queued.
            torch.cuda.synchronize(self._device)
        loaded = time.perf_counter()
        self._load_s += loaded - started
        if not bucket.last:
            return None
        num_checked = self.verify(published)
        verify_s = time.perf_counter() - loaded
        return SyncReport(num_checked, self._load_s, verify_s, peak_resident_bytes())

    def verify_checkpoint(self, folder: str) -> int:
        """Compare the weights vLLM loaded from `folder` with its .safetensors files; returns the number of comparisons.

        This verifies the layout against vLLM's own loader: `receive` writes and reads through the same layout, so it
        cannot detect an error in it. Tensors without a slot, such as a second copy of a tied head, are left out.
        """
        self._expected = {}
        for name, stored in _checkpoint(Path(folder)):
            tensor = without_signed_zeros(stored.to(self.weights.dtype))
            self._expect(TensorEntry(name, tensor.dtype, tuple(tensor.shape), 0, checksum(tensor)), tensor)
        return self.verify()

    def verify(self, published: Published = ()) -> int:
        """Compare this worker's part of every tensor with its latest published entry.

        published: tensors that are still available, for the error message. Returns the number of comparisons.
        """
        num_checked = 0
        for read in self.weights.read_back():
            for expected in self._expected.get(read.slot, ()):
                num_checked += 1
                tensor = _rows(read, expected)
                if checksum(tensor) != expected.checksum:
                    raise WeightSyncMismatch(_mismatch(expected, tensor, read, published))
        return num_checked

    def _read(self, bucket: WeightBucket) -> torch.Tensor:
        """The bucket's buffer. Raises WeightsUnavailable."""
        if bucket.transport == "shared_memory":
            return self._shared_memory.read(bucket)
        if bucket.transport == "cuda_ipc":
            return transports.open_handle(bucket, self._device)
        from vllm.utils.nccl import unpinned_nccl_env

        assert self._group is not None, "join the broadcast group before the first bucket"
        self._buffer = transports.grown(self._buffer, bucket.num_bytes)
        # The first broadcast creates the communicator. Batch-invariant engines pin NCCL settings that the learner does
        # not have, and a communicator whose members differ in them hangs.
        with unpinned_nccl_env():
            self._group.broadcast(self._buffer[: bucket.num_bytes])
        return self._buffer

    def _expect(self, entry: TensorEntry, tensor: torch.Tensor) -> None:
        for slot in self.weights.slots.get(entry.name, ()):
            if entry.first_row == 0:
                self._expected[slot] = []
            part, at = slot.part_of(tensor, entry.first_row)
            if part.shape == tensor.shape:
                value = entry.checksum
            elif checksum(tensor) != entry.checksum:
                raise WeightSyncMismatch(f"weight {entry.name}: the bucket was overwritten after its publication")
            else:
                value = checksum(part)
            num_rows = part.shape[0] if part.ndim else 1
            if num_rows:
                self._expected[slot].append(_Expected(entry, at, num_rows, value))


def _checkpoint(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a model folder. Those of experts, which files may have one by one, as one tensor of a layer."""
    with ExitStack() as opened:
        files = [opened.enter_context(safe_open(file, framework="pt")) for file in sorted(folder.glob("*.safetensors"))]
        of = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        layers: dict[str, int] = {}
        for name, file in of.items():
            if match := re.fullmatch(r"(.+\.experts)\.(\d+)\.\w+\.weight", name):
                layers[match[1]] = max(layers.get(match[1], 0), 1 + int(match[2]))
            else:
                yield name, file.get_tensor(name)
        for layer, count in layers.items():
            for whole in EXPERTS.values():
                names = ("gate_proj", "up_proj") if whole == "gate_up_proj" else (whole,)
                experts = [[f"{layer}.{i}.{name}.weight" for name in names] for i in range(count)]
                yield f"{layer}.{whole}", torch.stack([torch.cat([of[n].get_tensor(n) for n in e]) for e in experts])


def _rows(read: Readback, expected: _Expected) -> torch.Tensor:
    """The read rows in the published dtype. A kernel may keep a bias in a wider type (AMX), which converts exactly."""
    tensor = read.tensor[expected.at : expected.at + expected.num_rows] if read.tensor.ndim else read.tensor
    return without_signed_zeros(tensor.to(expected.entry.dtype))


def _mismatch(expected: _Expected, tensor: torch.Tensor, read: Readback, published: Published) -> str:
    entry = expected.entry
    message = (
        f"weight {entry.name}: the learner published checksum {expected.checksum:016x} ({entry.dtype}, shape "
        f"{list(entry.shape)}), the sampler holds {checksum(tensor):016x} (shape {list(tensor.shape)}) in "
        f"{read.location}, {read.tensor.dtype}"
    )
    sent = next((value for other, value in published if other is entry), None)
    part = None if sent is None else read.slot.part_of(sent, entry.first_row)[0]
    if part is None or part.shape != tensor.shape:
        return message
    if not bool(torch.isfinite(part).all()):
        return message + "; the published tensor is not finite"
    difference = (part.to(tensor.device).double() - tensor.double()).abs()
    return message + f"; {int((difference > 0).sum())} elements differ, at most by {float(difference.max()):.3g}"


@dataclass(frozen=True, slots=True)
class WorkerError:
    """What a worker could not do. Not an exception itself: of a returned one vLLM's executor of several workers makes a
    RuntimeError of its own."""

    error: Exception


class WeightSyncExtension:
    """Mixed into vLLM's worker class (`worker_extension_cls`), one per device; called through `collective_rpc`."""

    model_runner: Any
    device: Any
    rank: int

    @cached_property
    def gxpo_receiver(self) -> WeightReceiver:
        runner = self.model_runner
        weights = VllmWeights(runner.get_model(), runner.model_config.dtype, runner)
        return WeightReceiver(weights, self.device, self.rank)

    def gxpo_call(self, method: str, *arguments: Any) -> Any:
        """Call a method of this worker's WeightReceiver. An error is returned as `WorkerError`, because an exception in
        a worker process would end the engine."""
        try:
            return getattr(self.gxpo_receiver, method)(*arguments)
        except (WeightSyncMismatch, ConfigError, ValueError) as error:
            return WorkerError(error)


class EngineWeights:
    """Receives buckets for all workers of an engine.

    lora: of the adapter, None for full weights. root: a folder for received adapters.
    """

    def __init__(self, llm: Any, lora: LoraConfig | None, root: Path) -> None:
        self._llm, self._lora, self._root = llm, lora, root
        self._reader = transports.SharedMemoryReader()
        self._local: transports.SharedMemoryPublisher | None = None
        self.matrices: dict[str, tuple[torch.Tensor, int]] = {}
        """Of the present version's adapter, with the published checksum."""
        self.num_syncs = 0
        self.adapter: LoRARequest | None = None
        """The adapter of the latest version, for requests."""

    def receive(self, bucket: WeightBucket) -> SyncReport | None:
        """Load a bucket; after the last one of a version verify all weights. Raises WeightSyncMismatch,
        and ConfigError for a model whose weights cannot be verified."""
        if bucket.index == 0:
            self.num_syncs += 1
        if bucket.transport == "object_store":
            # In shared memory worker processes can map it.
            self._local = self._local or transports.SharedMemoryPublisher()
            bucket = replace(bucket, transport="shared_memory", location=self._local.store(transports.fetch(bucket)))
        return self._receive_full(bucket) if self._lora is None else self._receive_adapter(self._lora, bucket)

    def call_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of WeightReceiver in every worker; raise the first returned error."""
        results: list[Any] = self._llm.collective_rpc("gxpo_call", args=(method, *arguments))
        for result in results:
            if isinstance(result, WorkerError):
                raise result.error
        return results

    def _receive_full(self, bucket: WeightBucket) -> SyncReport | None:
        reports = self.call_workers("receive", bucket)
        if not bucket.last:
            return None
        return SyncReport(
            num_checked=sum(report.num_checked for report in reports),
            load_s=max(report.load_s for report in reports),
            verify_s=max(report.verify_s for report in reports),
            peak_bytes=sum(report.peak_bytes for report in reports),
        )

    def _receive_adapter(self, lora: LoraConfig, bucket: WeightBucket) -> SyncReport | None:
        """Give each version's adapter a new id, so that nothing cached under an earlier one is used."""
        started = time.perf_counter()
        if bucket.index == 0:
            self.matrices = {}
        for entry, tensor in tensors_of(bucket, self._reader.read(bucket)):
            assert entry.first_row == 0, "a LoRA matrix fits a bucket"
            self.matrices[entry.name] = tensor.cpu().clone(), entry.checksum
        if not bucket.last:
            return None
        folder = self.write_adapter(lora)
        from vllm.lora.request import LoRARequest

        if self.adapter is not None:
            self._llm.llm_engine.remove_lora(self.adapter.lora_int_id)
        self.adapter = LoRARequest(f"sync-{self.num_syncs}", self.num_syncs, str(folder))
        self._llm.llm_engine.add_lora(self.adapter)
        loaded = time.perf_counter()
        checksums = {name: published for name, (_, published) in self.matrices.items()}
        scaling = lora.alpha / lora.rank  # factor of B·A in the adapted layer
        checked = self.call_workers("verify_adapter", self.adapter.lora_int_id, str(folder), checksums, scaling)
        verify_s = time.perf_counter() - loaded
        return SyncReport(sum(checked), loaded - started, verify_s, peak_resident_bytes())

    def write_adapter(self, lora: LoraConfig) -> Path:
        """Write the received matrices as a PEFT folder, the only one at a time. Raises OSError on a full disk."""
        folder = self._root / "adapter"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "bias": "none",
            "r": lora.rank,
            "lora_alpha": lora.alpha,
            "target_modules": list(lora.target_modules),
        }
        (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        tensors = {name: tensor for name, (tensor, _) in self.matrices.items()}
        with write_errors():
            save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        return folder
