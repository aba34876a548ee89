"""The sampler's side of a sync: load what a manifest announces, and prove it."""

from __future__ import annotations

import mmap
import os
import time
import warnings
from pathlib import Path

import torch
from safetensors import safe_open

from gxpo_trainer.cluster.memory import peak_resident_bytes
from gxpo_trainer.errors import WeightsGone, WeightSyncMismatch
from gxpo_trainer.sync.checksums import checksum, without_signed_zeros
from gxpo_trainer.sync.manifest import SyncReport, TensorEntry, WeightManifest, dtype_name, entry_of, view_of
from gxpo_trainer.sync.object_store import fetch
from gxpo_trainer.sync.vllm_weights import VllmWeights


class WeightReceiver:
    """Sampler side: loads what a manifest announces and proves it.

    `version` is None before the first sync and after a failed one.
    """

    def __init__(self, weights: VllmWeights, version: int | None = None) -> None:
        self._weights = weights
        self.version = version
        self.num_syncs = 0
        self._maps: dict[tuple[int, int, int], torch.Tensor] = {}
        self._expected: dict[str, TensorEntry] = {}

    def receive(self, manifest: WeightManifest) -> SyncReport:
        """Load, pack, read back, compare; then hold `manifest.version`.

        Names that the manifest leaves out keep their weights and are compared with what was last published of
        them. Raises WeightSyncMismatch with tensor, place and both checksums when one differs, which it also does
        when the sampler's dtype cannot hold what was published: publish in the sampler's dtype.
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
        """Views of the published tensors; None where NCCL has already delivered them. Raises WeightsGone."""
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
            raise WeightsGone(
                f"version {version} was published in {path}, which does not exist here: either "
                "its publisher has closed, or learner and sampler are on different hosts"
            ) from error
        try:
            status = os.fstat(descriptor)
            key = (status.st_dev, status.st_ino, status.st_size)
            if key not in self._maps:
                # At most the two buffers of one publisher: whatever is older can go.
                self._maps = dict(list(self._maps.items())[-1:])
                buffer = mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
                    self._maps[key] = torch.frombuffer(buffer, dtype=torch.uint8)
            return self._maps[key]
        finally:
            os.close(descriptor)

    def verify_checkpoint(self, folder: Path) -> int:
        """Compare what vLLM loaded from `folder` with the .safetensors files there; returns the comparisons made.

        It proves the map from checkpoint names to vLLM's fused layers, with vLLM's own loader as the reference:
        `receive` writes and reads through one map, so only this and the log-probability gap can show it wrong.
        """
        self._expected = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    tensor = tensors.get_tensor(name).to(self._weights.dtype)
                    self._expected[name] = entry_of(name, without_signed_zeros(tensor))
        return self.verify()[0]

    def verify(self, published: dict[str, torch.Tensor] | None = None) -> tuple[int, tuple[str, ...]]:
        """Compare all that can be read back with the newest manifest of each name.

        published: the tensors themselves, to say in the message what is wrong. Returns the number of
        comparisons and the names that could not be read.
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
                place = f"{read.place}, {dtype_name(read.tensor.dtype)}"
                raise WeightSyncMismatch(_mismatch(entry, place, tensor, (published or {}).get(entry.name)))
        return num_checked, tuple(name for name in self._expected if name not in seen)


def _mismatch(entry: TensorEntry, place: str, read: torch.Tensor, wanted: torch.Tensor | None) -> str:
    found = checksum(read)
    message = (
        f"weight {entry.name}: the learner published checksum {entry.checksum:016x} ({entry.dtype}, shape "
        f"{list(entry.shape)}), the sampler holds {found:016x} (shape {list(read.shape)}) in {place}"
    )
    if wanted is None or wanted.shape != read.shape:
        return message
    if checksum(wanted) != entry.checksum:
        return message + "; the shared buffer was written over after its publication"
    if not bool(torch.isfinite(wanted).all()):
        return message + "; the published tensor is not finite"
    difference = (wanted.to(read.device).double() - read.double()).abs()
    return message + f"; {int((difference > 0).sum())} elements differ, at most by {float(difference.max()):.3g}"
