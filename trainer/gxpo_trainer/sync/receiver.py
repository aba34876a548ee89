"""The sampler's side of a sync: load the tensors of a manifest and verify them."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

import torch
from safetensors import safe_open

from gxpo_trainer.cluster.memory import peak_resident_bytes
from gxpo_trainer.errors import WeightsUnavailable, WeightSyncMismatch
from gxpo_trainer.sync.checksums import checksum, without_signed_zeros
from gxpo_trainer.sync.manifest import (
    SyncReport,
    TensorEntry,
    WeightManifest,
    dtype_name,
    entry_of,
    read_only_view,
    view_of,
)
from gxpo_trainer.sync.object_store import fetch
from gxpo_trainer.sync.vllm_weights import VllmWeights


class WeightReceiver:
    """Loads and verifies published weights. `version` is None before the first sync and after a failed one."""

    def __init__(self, weights: VllmWeights, version: int | None = None) -> None:
        self._weights = weights
        self.version = version
        self.num_syncs = 0
        self._maps: dict[tuple[int, int, int], torch.Tensor] = {}
        self._expected: dict[str, TensorEntry] = {}

    def receive(self, manifest: WeightManifest) -> SyncReport:
        """Load, repack, read back and compare, then set `version` to the manifest's.

        Tensors that the manifest omits keep their weights and are compared with their last published entry. Raises
        WeightSyncMismatch (tensor, location, both checksums) on a difference, also when the sampler's dtype cannot
        represent the published values: publish in the sampler's dtype.
        """
        started = time.perf_counter()
        self.version = None
        self.num_syncs += 1
        self._expected.update({entry.name: entry for entry in manifest.tensors})
        published = self._published(manifest)
        if published is not None:
            self._weights.load(published)
        loaded = time.perf_counter()
        num_checked, unreadable = self.verify(published)
        self.version = manifest.version
        finished = time.perf_counter()
        return SyncReport(
            version=manifest.version,
            num_bytes=manifest.num_bytes,
            num_checked=num_checked,
            unreadable=unreadable,
            load_s=loaded - started,
            verify_s=finished - loaded,
            total_s=finished - started,
            peak_bytes=peak_resident_bytes(),
        )

    def _published(self, manifest: WeightManifest) -> dict[str, torch.Tensor] | None:
        """Views of the published tensors; None if NCCL has delivered them already. Raises WeightsUnavailable."""
        if manifest.reference is not None:
            whole = fetch(manifest)
        elif manifest.buffer is not None:
            whole = self._map_buffer(manifest.version, manifest.buffer)
        else:
            return None
        return {e.name: view_of(whole, getattr(torch, e.dtype), e.shape, e.offset) for e in manifest.tensors}

    def _map_buffer(self, version: int, path: str) -> torch.Tensor:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise WeightsUnavailable(
                f"weights version {version} was published in {path}, which does not exist on this host: either the "
                "publisher has closed, or learner and sampler are on different hosts"
            ) from error
        try:
            status = os.fstat(descriptor)
            key = (status.st_dev, status.st_ino, status.st_size)
            if key not in self._maps:
                # Keep at most the two buffers of one publisher mapped.
                self._maps = dict(list(self._maps.items())[-1:])
                buffer = mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
                self._maps[key] = read_only_view(buffer)
            return self._maps[key]
        finally:
            os.close(descriptor)

    def verify_checkpoint(self, folder: Path) -> int:
        """Compare the weights vLLM loaded from `folder` with its .safetensors files; returns the number of comparisons.

        This verifies the mapping of checkpoint names to vLLM's fused layers against vLLM's own loader. `receive`
        writes and reads through the same mapping, so it cannot detect an error in it.
        """
        self._expected = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    tensor = tensors.get_tensor(name).to(self._weights.dtype)
                    self._expected[name] = entry_of(name, without_signed_zeros(tensor))
        return self.verify()[0]

    def verify(self, published: dict[str, torch.Tensor] | None = None) -> tuple[int, tuple[str, ...]]:
        """Compare every readable tensor with its latest manifest entry.

        published: the tensors, for the error message. Returns the number of comparisons and the unreadable names.
        """
        seen: set[str] = set()
        num_checked = 0
        for read in self._weights.read_back():
            entry = self._expected.get(read.name)
            if entry is None:
                continue
            seen.add(read.name)
            num_checked += 1
            # A kernel may keep a bias in a wider type (AMX); a widened value returns unchanged.
            tensor = read.tensor.to(getattr(torch, entry.dtype))
            if not read.packed:
                tensor = without_signed_zeros(tensor)
            if tuple(tensor.shape) != entry.shape or checksum(tensor) != entry.checksum:
                self.version = None
                location = f"{read.location}, {dtype_name(read.tensor.dtype)}"
                raise WeightSyncMismatch(_mismatch(entry, location, tensor, (published or {}).get(entry.name)))
        return num_checked, tuple(name for name in self._expected if name not in seen)


def _mismatch(entry: TensorEntry, location: str, read: torch.Tensor, published: torch.Tensor | None) -> str:
    message = (
        f"weight {entry.name}: the learner published checksum {entry.checksum:016x} ({entry.dtype}, shape "
        f"{list(entry.shape)}), the sampler holds {checksum(read):016x} (shape {list(read.shape)}) in {location}"
    )
    if published is None or published.shape != read.shape:
        return message
    if checksum(published) != entry.checksum:
        return message + "; the shared buffer was overwritten after its publication"
    if not bool(torch.isfinite(published).all()):
        return message + "; the published tensor is not finite"
    difference = (published.to(read.device).double() - read.double()).abs()
    return message + f"; {int((difference > 0).sum())} elements differ, at most by {float(difference.max()):.3g}"
