"""One engine worker's side of a sync: load its parts of the published tensors and verify them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from gxpo_trainer.cluster.memory import peak_resident_bytes
from gxpo_trainer.errors import WeightSyncMismatch
from gxpo_trainer.sync.broadcast import BroadcastGroup, grown
from gxpo_trainer.sync.buckets import SyncReport, TensorEntry, WeightBucket, dtype_name, tensors_of
from gxpo_trainer.sync.checksums import checksum, without_signed_zeros
from gxpo_trainer.sync.shared_memory import SharedMemoryReader
from gxpo_trainer.sync.vllm_weights import Published, Readback, VllmWeights


@dataclass(frozen=True, slots=True)
class _Expected:
    """Rows [at, at + num_rows) of a slot after a sync, and the published part that they must equal."""

    entry: TensorEntry
    at: int
    num_rows: int
    checksum: int


class WeightReceiver:
    """Loads buckets into one worker and, after the last of a version, verifies all weights."""

    def __init__(self, weights: VllmWeights, device: torch.device) -> None:
        self.weights, self._device = weights, device
        self._shared_memory = SharedMemoryReader()
        self._group: BroadcastGroup | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._expected: dict[str, list[_Expected]] = {}
        self._num_bytes, self._load_s = 0, 0.0

    def join(self, address: str, port: int, member: int, size: int) -> None:
        """Join the broadcast group; every member must call it at the same time."""
        self._group = BroadcastGroup(address, port, member, size, self._device)

    def receive(self, bucket: WeightBucket) -> SyncReport | None:
        """Load a bucket; after the last one read everything back, compare, and report.

        Tensors that the version omits keep their weights and are compared with their last published entry. Raises
        WeightSyncMismatch (tensor, location, both checksums) on a difference, also when the engine's dtype cannot
        represent the published values: publish in the engine's dtype. Raises ConfigError for tensors that the model
        has no slot for.
        """
        started = time.perf_counter()
        if bucket.index == 0:
            self._num_bytes, self._load_s = 0, 0.0
        published = list(tensors_of(bucket, self._read(bucket)))
        self.weights.load(published)
        for entry, tensor in published:
            self._expect(entry, tensor)
        loaded = time.perf_counter()
        self._num_bytes += bucket.num_bytes
        self._load_s += loaded - started
        if not bucket.last:
            return None
        num_checked = self.verify(published)
        return SyncReport(
            version=bucket.version,
            num_bytes=self._num_bytes,
            num_checked=num_checked,
            load_s=self._load_s,
            verify_s=time.perf_counter() - loaded,
            peak_bytes=peak_resident_bytes(),
        )

    def verify_checkpoint(self, folder: Path) -> int:
        """Compare the weights vLLM loaded from `folder` with its .safetensors files; returns the number of comparisons.

        This verifies the layout, including the shards of tensor parallelism, against vLLM's own loader. `receive`
        writes and reads through the same layout, so it cannot detect an error in it. Tensors without a slot are left
        out: some folders have ones that no model uses, such as a second copy of a tied head.
        """
        self._expected = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    tensor = without_signed_zeros(tensors.get_tensor(name).to(self.weights.dtype))
                    entry = TensorEntry(name, dtype_name(tensor.dtype), tuple(tensor.shape), 0, checksum(tensor))
                    self._expect(entry, tensor)
        return self.verify()

    def verify(self, published: Published = ()) -> int:
        """Compare this worker's part of every tensor with its latest published entry.

        published: tensors that are still available, for the error message. Returns the number of comparisons.
        """
        num_checked = 0
        for read in self.weights.read_back():
            for expected in self._expected.get(read.slot.name, ()):
                num_checked += 1
                tensor = _rows(read, expected)
                if checksum(tensor) != expected.checksum:
                    location = f"{read.location}, {dtype_name(read.tensor.dtype)}"
                    raise WeightSyncMismatch(_mismatch(expected, location, tensor, read, published))
        return num_checked

    def _read(self, bucket: WeightBucket) -> torch.Tensor:
        """The bucket's buffer. Raises WeightsUnavailable."""
        if bucket.transport == "shared_memory":
            return self._shared_memory.read(bucket)
        if bucket.transport == "cuda_ipc":
            from gxpo_trainer.sync.cuda_ipc import open_handle

            return open_handle(bucket, self._device)
        from vllm.utils.nccl import unpinned_nccl_env

        assert self._group is not None, "join the broadcast group before the first bucket"
        self._buffer = grown(self._buffer, bucket.num_bytes)
        # The first broadcast creates the communicator. Batch-invariant engines pin NCCL settings that the learner does
        # not have, and a communicator whose members differ in them hangs.
        with unpinned_nccl_env():
            self._group.broadcast(self._buffer[: bucket.num_bytes])
        return self._buffer

    def _expect(self, entry: TensorEntry, tensor: torch.Tensor) -> None:
        slot = self.weights.slots.get(entry.name)
        if slot is None:
            return
        if entry.first_row == 0:
            self._expected[entry.name] = []
        part, at = slot.part_of(tensor, entry.first_row)
        if part.shape == tensor.shape:
            value = entry.checksum
        elif checksum(tensor) != entry.checksum:
            raise WeightSyncMismatch(f"weight {entry.name}: the bucket was overwritten after its publication")
        else:
            value = checksum(part)
        num_rows = part.shape[0] if part.ndim else 1
        if num_rows:
            self._expected[entry.name].append(_Expected(entry, at, num_rows, value))


def _rows(read: Readback, expected: _Expected) -> torch.Tensor:
    """The read rows in the published dtype. A kernel may keep a bias in a wider type (AMX), which converts exactly."""
    tensor = read.tensor[expected.at : expected.at + expected.num_rows] if read.tensor.ndim else read.tensor
    tensor = tensor.to(getattr(torch, expected.entry.dtype))
    return tensor if read.packed else without_signed_zeros(tensor)


def _mismatch(expected: _Expected, location: str, tensor: torch.Tensor, read: Readback, published: Published) -> str:
    entry = expected.entry
    message = (
        f"weight {entry.name}: the learner published checksum {expected.checksum:016x} ({entry.dtype}, shape "
        f"{list(entry.shape)}), the sampler holds {checksum(tensor):016x} (shape {list(tensor.shape)}) in {location}"
    )
    found = next((value for other, value in published if other is entry), None)
    if found is None:
        return message
    part, _ = read.slot.part_of(found, entry.first_row)
    if part.shape != tensor.shape:
        return message
    if checksum(found) != entry.checksum:
        return message + "; the bucket was overwritten after its publication"
    if not bool(torch.isfinite(part).all()):
        return message + "; the published tensor is not finite"
    difference = (part.to(tensor.device).double() - tensor.double()).abs()
    return message + f"; {int((difference > 0).sum())} elements differ, at most by {float(difference.max()):.3g}"
