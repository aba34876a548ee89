"""Loads and reads back the weights of vLLM's model in one worker, for vLLM 0.32.

vLLM renames these internals between releases; only `layout.py`, `adapters.py` and this file use them.

On a CPU vLLM packs the matrix of each linear layer for oneDNN (`layer.cpu_linear`) and drops the plain one; the head
keeps both. With tied embeddings an update of the plain matrix leaves the packed copy stale. Here packed layers are
always repacked after an update and read back through the packed product: the identity matrix times the packed weights
gives the weights bit for bit (each output is one weight plus exact zeros), except that -0.0 becomes +0.0. A packed copy
is thus compared as strictly as a plain tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gxpo_trainer.sync.buckets import TensorEntry
from gxpo_trainer.sync.layout import Slot, layout_of

Published = Sequence[tuple[TensorEntry, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Readback:
    """This worker's part of one tensor as the model uses it.

    location: where it was read, for messages. packed: it was read from a packed copy, which turns -0.0 into +0.0.
    """

    slot: Slot
    location: str
    tensor: torch.Tensor
    packed: bool


class VllmWeights:
    """The weights of one worker's model."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        self.model, self.dtype = model, dtype
        self._layout = layout_of(model)
        self._identities: dict[tuple[int, torch.device], torch.Tensor] = {}

    @property
    def slots(self) -> dict[str, Slot]:
        """Tensors that can be loaded in place and read back, by checkpoint name."""
        return self._layout.slots

    def load(self, published: Published) -> None:
        """Load this worker's parts of checkpoint tensors (any device, any dtype) and repack packed layers.

        A subset may be given; the other rows of a fused layer keep their values. Raises ValueError for a wrong shape,
        ConfigError for tensors without a slot.
        """
        self._layout.require(entry.name for entry, _ in published)
        with torch.inference_mode():
            self._load_in_place(published)
            self.repack_heads()

    def repack_heads(self) -> None:
        """Repack tied heads from the embedding they share."""
        for _, head in self._layout.tied_heads:
            if _is_packed(head):
                head.quant_method.process_weights_after_loading(head)

    def read_back(self) -> Iterator[Readback]:
        """Yield this worker's part of every mapped tensor, packed copies through their packed product.

        A tied head yields the embedding a second time, read through the head. Tensors may share memory with the live
        model and must not be modified.
        """
        fused: dict[tuple[str, str], torch.Tensor] = {}
        with torch.inference_mode():
            for slot in self.slots.values():
                key = (slot.path, slot.attribute)
                if key not in fused:
                    fused[key] = self._read(slot.module, slot.attribute)
                location = f"{slot.path}.{slot.attribute}[{slot.start}:{slot.stop}]"
                packed = self._uses_packed_copy(slot.module, slot.attribute)
                rows = fused[key][slot.start : slot.stop] if fused[key].ndim else fused[key]
                yield Readback(slot, location, rows, packed)
            for path, head in self._layout.tied_heads:
                slot = next(s for s in self.slots.values() if getattr(s.module, s.attribute) is head.weight)
                if _is_packed(head):
                    rows = self._read(head, "weight")[slot.start : slot.stop]
                    yield Readback(slot, f"{path} (packed copy)", rows, True)

    def _load_in_place(self, published: Published) -> None:
        given: dict[str, int] = {}
        for entry, tensor in published:
            slot = self.slots[entry.name]
            rows = slot.part_of(tensor, entry.first_row)[0].shape[0] if tensor.ndim else 1
            given[f"{slot.path}.{slot.attribute}"] = given.get(f"{slot.path}.{slot.attribute}", 0) + rows
        repack: dict[str, tuple[Any, torch.Tensor]] = {}
        for entry, tensor in published:
            slot = self.slots[entry.name]
            part, at = slot.part_of(tensor, entry.first_row)
            if self._uses_packed_copy(slot.module, slot.attribute):
                if slot.path not in repack:
                    whole = given[f"{slot.path}.weight"] == sum(slot.module.output_partition_sizes)
                    repack[slot.path] = (slot.module, self._writable(slot.module, whole))
                target = repack[slot.path][1]
            else:
                target = getattr(slot.module, slot.attribute)
            rows_of = target[slot.start + at : slot.start + at + part.shape[0]] if part.ndim else target
            if rows_of.shape != part.shape:
                raise ValueError(f"{entry.name} has shape {tuple(part.shape)}, the sampler's is {tuple(rows_of.shape)}")
            rows_of.copy_(part)
        for module, weight in repack.values():
            if module.weight.numel() == 0:
                module.weight = torch.nn.Parameter(weight, requires_grad=False)
            module.quant_method.process_weights_after_loading(module)

    def _writable(self, module: Any, whole: bool) -> torch.Tensor:
        """A plain matrix for a packed layer: the live one if vLLM kept it, else a new one. whole: all rows come."""
        if module.weight.numel():
            live: torch.Tensor = module.weight.data
            return live
        if whole:
            return torch.empty(sum(module.output_partition_sizes), _in_features(module), dtype=self.dtype)
        return self._read(module, "weight").clone()

    def _read(self, module: Any, attribute: str) -> torch.Tensor:
        parameter: torch.Tensor = getattr(module, attribute)
        if not self._uses_packed_copy(module, attribute):
            return parameter.detach()
        # [in, in] @ packed [in, out] -> [in, out]; transposed it is the checkpoint's [out, in].
        product: Callable[..., torch.Tensor] = module.cpu_linear
        return product(self._identity(_in_features(module), parameter.device), parameter, None).t()

    def _uses_packed_copy(self, module: Any, attribute: str) -> bool:
        """Whether the forward pass uses a packed copy of this parameter, rather than a row lookup."""
        return attribute == "weight" and _is_packed(module) and module not in self._layout.lookups

    def _identity(self, size: int, device: torch.device) -> torch.Tensor:
        key = (size, device)
        if key not in self._identities:
            self._identities[key] = torch.eye(size, dtype=self.dtype, device=device)
        return self._identities[key]


def _is_packed(module: Any) -> bool:
    return hasattr(module, "cpu_linear")


def _in_features(module: Any) -> int:
    """Of a split linear layer, one that every worker holds whole, or an embedding."""
    names = ("input_size_per_partition", "input_size", "embedding_dim")
    return int(next(size for name in names if (size := getattr(module, name, None)) is not None))
