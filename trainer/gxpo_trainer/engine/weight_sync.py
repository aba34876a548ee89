"""Weight sync: the learner publishes a version, the sampler loads it and proves that it did.

Three transports behind one pair of verbs, `publish` on the learner and `receive` on the sampler:

    SharedMemoryPublisher   one host: a flat buffer under /dev/shm that the sampler maps
    ObjectStorePublisher    between hosts: the same buffer through Ray's object store (object_store.py)
    NcclPublisher           between GPUs: vLLM's weight transfer

The order of one sync, which nothing may change: publish(version) returns a manifest; the sampler, idle, loads
the tensors, packs what vLLM keeps packed, reads every tensor back and compares it with the manifest; only then
does it answer for the new version. A sampler that failed half-way holds no version. `num_syncs` goes into the key
of the sampler's prefix cache, so no entry of earlier weights can be found again.

The proof: the checksum of what was read back is that of what was published, tensor by tensor. It weights bits by
position, so a change in the last bit, a shift and an exchange of two equal-shaped tensors all show.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import shutil
import tempfile
import time
import warnings
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from gxpo_trainer.engine.checksums import checksum, without_signed_zeros
from gxpo_trainer.engine.memory import peak_resident_bytes
from gxpo_trainer.engine.vllm_weights import VllmWeights, open_nccl_trainer, weight_source
from gxpo_trainer.errors import TrainingError, WeightsGone, WeightSyncMismatch

SHM_ROOT = Path("/dev/shm")
_PREFIX = "gxpo-weights-"
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One published tensor: transformers' name, dtype and shape, place in the buffer (bytes), checksum."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    checksum: int


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """What was published as `version`, and where: in `buffer`, a shared-memory file; in `reference`, a Ray object
    of uint8[num_bytes]; or in neither, when NCCL has delivered it."""

    version: int
    tensors: tuple[TensorEntry, ...]
    num_bytes: int
    buffer: str | None
    reference: Any = None


@dataclass(frozen=True, slots=True)
class SyncReport:
    """One sync on the sampler's side, times in seconds.

    num_checked counts comparisons (a tied head is one of its own); unreadable are the published names that the
    sampler cannot show again, for which only the log-probability gap speaks.
    """

    version: int
    num_bytes: int
    num_checked: int
    unreadable: tuple[str, ...]
    load_s: float
    verify_s: float
    total_s: float
    peak_bytes: int


class SharedMemoryPublisher:
    """Learner side on one host: writes each version into one of two buffers in a private directory.

    Two buffers take turns, so a sampler that still maps the last version never reads half of the next. The
    directory (mode 0700) goes with `close`, at exit, or, after a kill, when the next publisher starts: the
    owner holds a file lock that the kernel releases at death, so a directory without one is nobody's.

    dtype: what is published; None keeps each tensor's own. It must be the sampler's.
    """

    def __init__(self, *, dtype: torch.dtype | None = None, root: Path = SHM_ROOT) -> None:
        sweep(root)
        self._dtype = dtype
        fresh = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=root))
        lock = os.open(fresh / "owner.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Renamed only once it is locked: a sweep looks at the final name alone.
        self.directory = fresh.rename(root / fresh.name.removeprefix("."))
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * 2
        self._published: list[Any] = [None, None]
        self._turn = 0
        self._close = weakref.finalize(self, _remove, self.directory, lock)

    def publish(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightManifest:
        """Copy the tensors (transformers' names, any device) into shared memory, one at a time as they come.

        A tensor need only live until the next one is asked for. Raises TrainingError (disk_full).
        """
        self._turn ^= 1
        entries: list[TensorEntry] = []
        size = 0
        for name, tensor in named_tensors:
            dtype = self._dtype or tensor.dtype
            start, size = size, size + -(-tensor.numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
            view = _view(self._buffer(size), dtype, tuple(tensor.shape), start)
            view.copy_(tensor.detach())
            if dtype.is_floating_point:
                view.add_(0.0)  # see `without_signed_zeros`
            entries.append(_entry(name, view, start))
        self._published[self._turn] = [(entry.name, entry.dtype, entry.shape) for entry in entries]
        return WeightManifest(version, tuple(entries), size, str(self._path()))

    def changed_fraction(self, manifest: WeightManifest) -> float | None:
        """Share of the elements of `manifest`, the version just published, that differ from the version before it.

        None when that was the first, or had another layout.
        """
        if self._published[0] != self._published[1]:
            return None
        new, old = self._buffers[self._turn], self._buffers[self._turn ^ 1]
        changed = 0
        for entry in manifest.tensors:
            place = getattr(torch, entry.dtype), entry.shape, entry.offset
            changed += int((_view(new, *place) != _view(old, *place)).sum())
        return changed / sum(math.prod(entry.shape) for entry in manifest.tensors)

    def newest(self, manifest: WeightManifest) -> torch.Tensor:
        """uint8[num_bytes], the version just published; written over by the next but one."""
        return self._buffers[self._turn][: manifest.num_bytes]

    def close(self) -> None:
        """Remove the directory; samplers that map a buffer keep it until they let go."""
        self._close()

    def _path(self) -> Path:
        return self.directory / f"buffer-{self._turn}"

    def _buffer(self, size: int) -> torch.Tensor:
        """This turn's buffer as uint8[>= size]; it grows, keeping what was written, until all tensors have passed."""
        buffer = self._buffers[self._turn]
        if buffer.numel() >= size:
            return buffer
        descriptor = os.open(self._path(), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            # Reserved at once: writing to a full tmpfs through a map would be a SIGBUS, not an error.
            os.posix_fallocate(descriptor, 0, size)
            buffer = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
        except OSError as error:
            message = f"{size} bytes of shared memory are not to be had: {error.strerror}; enlarge /dev/shm"
            raise TrainingError(message, reason="disk_full") from error
        finally:
            os.close(descriptor)
        self._buffers[self._turn] = buffer
        return buffer


def sweep(root: Path = SHM_ROOT) -> list[Path]:
    """Remove the directories of publishers that died without closing; returns what was removed."""
    removed = []
    for directory in root.glob(f"{_PREFIX}*"):
        try:
            if directory.stat().st_uid != os.getuid():
                continue
            lock = os.open(directory / "owner.lock", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # closed by its owner in this moment
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        _remove(directory, lock)
        removed.append(directory)
    return removed


def _remove(directory: Path, lock: int) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    os.close(lock)


class NcclPublisher:
    """Learner side between GPUs: vLLM's weight transfer, from learner rank 0 to the sampler's GPUs.

    Learner and sampler must own different GPUs (NCCL refuses one device twice); on a shared GPU use
    `SharedMemoryPublisher`. `sampler` is the sampler's actor handle. Raises ConfigError without CUDA.

    publish drives the sampler's start, update and finish calls itself and returns when the weights have arrived;
    the manifest then goes to `WeightReceiver.receive`, which proves them.
    """

    def __init__(self, sampler: Any, *, address: str, port: int, num_sampler_gpus: int, dtype: torch.dtype) -> None:
        self._engine = open_nccl_trainer(sampler, address=address, port=port, num_sampler_gpus=num_sampler_gpus)
        self._dtype = dtype

    def publish(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightManifest:
        """Send the tensors; a copy of all of them is held on the device meanwhile."""
        # Copied, because the transfer declares every shape before it sends the first tensor.
        tensors = [(name, without_signed_zeros(tensor.to(self._dtype)).contiguous()) for name, tensor in named_tensors]
        self._engine.source = weight_source(tensors)
        self._engine.send_weights()
        entries = tuple(_entry(name, tensor) for name, tensor in tensors)
        return WeightManifest(version, entries, sum(tensor.nbytes for _, tensor in tensors), None)

    def close(self) -> None:
        self._engine.shutdown()


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
            from gxpo_trainer.engine.object_store import fetch

            whole = fetch(manifest)
        elif manifest.buffer is not None:
            whole = self._map_buffer(manifest.version, manifest.buffer)
        else:
            return None
        return {e.name: _view(whole, getattr(torch, e.dtype), e.shape, e.offset) for e in manifest.tensors}

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
                    self._expected[name] = _entry(name, without_signed_zeros(tensor))
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
                place = f"{read.place}, {_name(read.tensor.dtype)}"
                raise WeightSyncMismatch(_mismatch(entry, place, tensor, (published or {}).get(entry.name)))
        return num_checked, tuple(name for name in self._expected if name not in seen)


def _view(whole: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> torch.Tensor:
    return whole[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _entry(name: str, tensor: torch.Tensor, offset: int = 0) -> TensorEntry:
    return TensorEntry(name, _name(tensor.dtype), tuple(tensor.shape), offset, checksum(tensor))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
