"""Moves a learner's persistent memory to the host and back, so that an engine can use the GPU in between."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Parking:
    """Empties storages and fills them again; every tensor and view on them stays valid in between, but unreadable.

    Works on storages rather than tensors: DeepSpeed's parameters are views of flat buffers, which a move of the
    tensors would break apart.
    """

    def __init__(self) -> None:
        self._parked: list[tuple[torch.UntypedStorage, Tensor | None, int]] = []

    @property
    def parked(self) -> bool:
        return bool(self._parked)

    def park(self, kept: Iterable[Tensor], dropped: Iterable[Tensor] = ()) -> int:
        """Release the memory of all tensors; `dropped` come back as zeros. Returns the bytes released."""
        if self.parked:
            return 0
        released, on_gpu = 0, False
        for storage, keep in _storages(kept, dropped):
            size, on_gpu = storage.nbytes(), on_gpu or storage.device.type == "cuda"
            host = None
            if keep:
                host = torch.empty(size, dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
                host.copy_(_bytes(storage), non_blocking=True)
            self._parked.append((storage, host, size))
            released += size
        if on_gpu:
            torch.cuda.synchronize()
        for storage, _, _ in self._parked:
            storage.resize_(0)
        if on_gpu:
            torch.cuda.empty_cache()
        return released

    def unpark(self) -> None:
        """Allocate all storages again and restore their contents."""
        for storage, host, size in self._parked:
            storage.resize_(size)
            if host is None:
                _bytes(storage).zero_()
            else:
                _bytes(storage).copy_(host, non_blocking=True)
        if any(storage.device.type == "cuda" for storage, _, _ in self._parked):
            torch.cuda.synchronize()
        self._parked = []


def _storages(kept: Iterable[Tensor], dropped: Iterable[Tensor]) -> list[tuple[torch.UntypedStorage, bool]]:
    """Each storage once, with whether its contents are kept; one that holds a kept tensor is kept."""
    found: dict[int, tuple[torch.UntypedStorage, bool]] = {}
    for keep, tensors in ((False, dropped), (True, kept)):
        for tensor in tensors:
            storage = tensor.untyped_storage()
            # A file mapped on a CPU cannot be released; on a GPU every storage can.
            if storage.nbytes() and storage.resizable():
                found[storage._cdata] = storage, keep
    return list(found.values())


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
