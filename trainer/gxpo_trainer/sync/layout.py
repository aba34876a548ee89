"""Where each tensor of a checkpoint is in one worker's part of vLLM's model, for vLLM 0.32.

vLLM fuses layers (q, k and v into one matrix) and, with tensor parallelism, gives each worker rows or columns of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gxpo_trainer.errors import ConfigError

BASE_LAYER = ".base_layer"
"""Where vLLM keeps a linear layer that it has wrapped for LoRA."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Checkpoint rows [first_row, first_row + num_rows), columns `columns` (None: all) of tensor `name`, which are
    rows [start, start + num_rows) of `module.attribute`. A scalar has one row."""

    name: str
    module: Any  # a torch.nn.Module with vLLM's own attributes
    path: str
    attribute: str
    start: int
    num_rows: int
    first_row: int = 0
    columns: tuple[int, int] | None = None

    @property
    def stop(self) -> int:
        return self.start + self.num_rows

    def part_of(self, tensor: torch.Tensor, first_row: int = 0) -> tuple[torch.Tensor, int]:
        """This worker's part of `tensor`, rows of the checkpoint from `first_row` on, and its first row in the slot."""
        if not tensor.ndim:
            return tensor, 0
        low = max(self.first_row, first_row)
        high = max(low, min(self.first_row + self.num_rows, first_row + tensor.shape[0]))
        part = tensor[low - first_row : high - first_row]
        if self.columns is not None:
            part = part[:, self.columns[0] : self.columns[1]]
        return part, low - self.first_row


@dataclass(frozen=True, slots=True)
class Layout:
    """slots: by checkpoint name. tied_heads: path and module of heads that share the embedding's weights. lookups:
    embeddings that are used by row, so that a packed copy of them is not read."""

    slots: dict[str, Slot]
    tied_heads: list[tuple[str, Any]]
    lookups: set[Any]

    def require(self, names: Iterable[str]) -> None:
        """Raise ConfigError for tensors without a slot: they could be loaded neither in buckets nor verified."""
        missing = sorted({name for name in names if name not in self.slots})
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise ConfigError(
                f"model.path: the sampler has no place for {', '.join(missing[:3])}{more}, so its weights cannot be "
                "synced and verified. Models with experts and checkpoints with fused projections are not supported; "
                "choose a dense model whose projections are separate tensors, such as Qwen2, Qwen3 or Llama"
            )


def layout_of(model: torch.nn.Module) -> Layout:
    """The layout of a loaded model. A layer that cannot be mapped is left out; see `Layout.require`."""
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    fused: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    embeddings = {id(m.weight) for m in model.modules() if type(m) is VocabParallelEmbedding and m.weight is not None}
    found = Layout({}, [], set())
    for path, module in model.named_modules():
        if isinstance(module, ParallelLMHead) and id(module.weight) in embeddings:
            found.tied_heads.append((path, module))
            continue
        for attribute, parameter in module.named_parameters(recurse=False):
            if isinstance(module, LinearBase):
                slots = _linear_slots(path, module, attribute, fused)
            elif isinstance(module, VocabParallelEmbedding):
                if not isinstance(module, ParallelLMHead):
                    found.lookups.add(module)
                slots = iter([_vocabulary_slot(path, module, attribute)])
            else:
                rows = parameter.shape[0] if parameter.ndim else 1
                slots = iter([Slot(f"{path}.{attribute}", module, path, attribute, 0, rows)])
            found.slots.update({slot.name: slot for slot in slots})
    return found


def _vocabulary_slot(path: str, module: Any, attribute: str) -> Slot:
    """Rows of this worker; vLLM pads the vocabulary, so the last worker's matrix may have more."""
    first = module.shard_indices.org_vocab_start_index
    return Slot(
        f"{path}.{attribute}", module, path, attribute, 0, module.shard_indices.org_vocab_end_index - first, first
    )


def _linear_slots(path: str, module: Any, attribute: str, fused: Mapping[str, Sequence[str]]) -> Iterator[Slot]:
    from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear

    plain = path.removesuffix(BASE_LAYER)
    parent, _, leaf = plain.rpartition(".")
    names = list(fused.get(leaf, (leaf,)))
    sizes: list[int] = list(module.output_partition_sizes)
    if len(names) != len(sizes):
        return
    rank = module.tp_rank
    columns = None
    if isinstance(module, RowParallelLinear) and attribute == "weight":
        width = module.input_size_per_partition
        columns = (rank * width, (rank + 1) * width)
    start = 0
    for index, (name, size) in enumerate(zip(names, sizes, strict=True)):
        shard = rank
        if index and hasattr(module, "num_kv_head_replicas"):
            # Several workers hold the same key and value heads where there are fewer heads than workers.
            shard = rank // module.num_kv_head_replicas
        first_row = shard * size if isinstance(module, ColumnParallelLinear) else 0
        full = f"{parent}.{name}" if parent else name
        yield Slot(f"{full}.{attribute}", module, path, attribute, start, size, first_row, columns)
        start += size
