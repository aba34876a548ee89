"""Where each tensor of a checkpoint is in one worker's part of vLLM's model, and how it is loaded and read back.

For vLLM 0.32, whose internals only this file uses. vLLM fuses layers (q, k and v into one matrix) and, with tensor
parallelism, gives each worker rows or columns of them. Some checkpoints (Phi-3) fuse them too. The experts of a layer
are one tensor of gate and up projections and one of down projections on both sides.

On a CPU vLLM packs the matrix of each linear layer for oneDNN (`layer.cpu_linear`) and drops the plain one; the head
keeps both. Packed layers are always repacked after an update and read back through the packed product: the identity
matrix times the packed weights gives the weights bit for bit (each output is one weight plus exact zeros), except that
-0.0 becomes +0.0. Experts are reordered there in place (`packed_order`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from gxpo_trainer.errors import ConfigError, WeightSyncMismatch
from gxpo_trainer.weights.buckets import ADAPTER_WEIGHTS, PEFT_PREFIX, TensorEntry, checksum

EXPERTS = {"w13_weight": "gate_up_proj", "w2_weight": "down_proj"}
"""vLLM's and transformers' name of the tensors of a layer's experts, [experts, out, in]."""
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
    order: torch.Tensor | None = None
    """Of an expert's elements in the module: indices into its elements in the checkpoint; None: the same order."""

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


def _linear_slots(path: str, module: Any, attribute: str, fused: Mapping[str, Sequence[str]]) -> Iterator[Slot]:
    from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear

    plain = path.removesuffix(BASE_LAYER)
    parent, _, leaf = plain.rpartition(".")
    names = list(fused.get(leaf, (leaf,)))
    sizes: list[int] = list(module.output_partition_sizes)
    whole = len(names) == 1 < len(sizes)  # the checkpoint fuses what vLLM does
    names *= len(sizes) if whole else 1
    if len(names) != len(sizes):
        return
    rank = module.tp_rank
    columns = None
    if isinstance(module, RowParallelLinear) and attribute == "weight":
        width = module.input_size_per_partition
        columns = (rank * width, (rank + 1) * width)
    start = before = 0
    for index, (name, size) in enumerate(zip(names, sizes, strict=True)):
        shard = rank
        if index and hasattr(module, "num_kv_head_replicas"):
            # Several workers hold the same key and value heads where there are fewer heads than workers.
            shard = rank // module.num_kv_head_replicas
        first_row = before + (shard * size if isinstance(module, ColumnParallelLinear) else 0)
        full = f"{parent}.{name}" if parent else name
        yield Slot(f"{full}.{attribute}", module, path, attribute, start, size, first_row, columns)
        start += size
        if whole:
            replicas = getattr(module, "num_kv_head_replicas", 1) if index else 1
            before += size * module.tp_size // replicas


def _expert_slots(path: str, module: Any, attribute: str) -> Iterator[Slot]:
    """Of experts that one worker holds whole, in a layout that is known."""
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend as Backend

    method = module.quant_method
    backend, parameter = getattr(method, "unquantized_backend", None), getattr(module, attribute)
    whole = module.moe_config.moe_parallel_config.tp_size == 1
    if attribute not in EXPERTS or not whole or backend not in (Backend.CPU, Backend.TRITON):
        return
    experts = method.moe_kernel.fused_experts
    packs = backend is Backend.CPU and not experts._use_zentorch
    order = packed_order(parameter.shape[1], parameter.shape[2], parameter.dtype, experts.isa) if packs else None
    name = f"{path.rpartition('.')[0]}.{EXPERTS[attribute]}"
    yield Slot(name, module, path, attribute, 0, parameter.shape[0], order=order)


@cache
def packed_order(rows: int, columns: int, dtype: torch.dtype, isa: str) -> torch.Tensor:
    """Where vLLM's CPU kernel of experts takes each element of a packed [rows, columns] from.

    Found by packing the elements' numbers, 16 bits at a time: the bits of a bfloat16.
    """
    from vllm._custom_ops import cpu_prepack_moe_weight

    word = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    numbers = torch.arange(rows * columns)
    halves = []
    for shift in (0, 16):
        bits = (numbers >> shift & 0xFFFF).to(word).view(dtype).view(1, rows, columns)
        halves.append(cpu_prepack_moe_weight(bits, isa).view(word).long().view(-1) & 0xFFFF)
    return halves[0] | halves[1] << 16


Published = Sequence[tuple[TensorEntry, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Readback:
    """This worker's part of one tensor as the model uses it. location: where it was read, for messages."""

    slot: Slot
    location: str
    tensor: torch.Tensor


class VllmWeights:
    """The weights of one worker's model. slots: of the tensors that can be loaded in place and read back, by checkpoint
    name, several where a fused tensor is split; a layer that cannot be mapped has none. runner: vLLM's, of the worker,
    which holds the adapters."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype, runner: Any = None) -> None:
        from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
        from vllm.model_executor.layers.linear import LinearBase
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        self._model, self.dtype, self._runner = model, dtype, runner
        self.slots: dict[str, list[Slot]] = {}
        self._tied_heads: list[tuple[str, Any]] = []
        """Path and module of heads that share the embedding's weights."""
        self._lookups: set[Any] = set()
        """Embeddings that are used by row, so that a packed copy of them is not read."""
        fused: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
        tables = [module.weight for module in model.modules() if type(module) is VocabParallelEmbedding]
        embeddings = {id(table) for table in tables if table is not None}
        for path, module in model.named_modules():
            if isinstance(module, ParallelLMHead) and id(module.weight) in embeddings:
                self._tied_heads.append((path, module))
                continue
            for attribute, parameter in module.named_parameters(recurse=False):
                place = f"{path}.{attribute}", module, path, attribute, 0
                if isinstance(module, LinearBase):
                    slots = [*_linear_slots(path, module, attribute, fused)]
                elif isinstance(module, RoutedExperts):
                    slots = [*_expert_slots(path, module, attribute)]
                elif isinstance(module, VocabParallelEmbedding):
                    if not isinstance(module, ParallelLMHead):
                        self._lookups.add(module)
                    # Rows of this worker; vLLM pads the vocabulary, so the last worker's matrix may have more.
                    indices = module.shard_indices
                    first, end = indices.org_vocab_start_index, indices.org_vocab_end_index
                    slots = [Slot(*place, end - first, first)]
                else:
                    slots = [Slot(*place, parameter.shape[0] if parameter.ndim else 1)]
                for slot in slots:
                    self.slots.setdefault(slot.name, []).append(slot)

    def load(self, published: Published) -> None:
        """Load this worker's parts of checkpoint tensors (any device, any dtype) and repack packed layers.

        A subset may be given; the other rows of a fused layer keep their values. Raises ValueError for a wrong shape,
        ConfigError for tensors without a slot.
        """
        self._require(entry.name for entry, _ in published)
        with torch.inference_mode():
            self._load_in_place(published)
            self.repack_heads()

    def repack_heads(self) -> None:
        """Repack tied heads from the embedding they share."""
        for _, head in self._tied_heads:
            if hasattr(head, "cpu_linear"):
                head.quant_method.process_weights_after_loading(head)

    def read_back(self) -> Iterator[Readback]:
        """Yield this worker's part of every mapped tensor, packed copies through their packed product.

        A tied head yields the embedding a second time, read through the head. Tensors may share the model's memory.
        """
        fused: dict[tuple[str, str], torch.Tensor] = {}
        with torch.inference_mode():
            for slot in self._all():
                key = (slot.path, slot.attribute)
                if key not in fused:
                    fused[key] = self._read(slot.module, slot.attribute)
                location = f"{slot.path}.{slot.attribute}[{slot.start}:{slot.stop}]"
                rows = fused[key][slot.start : slot.stop] if fused[key].ndim else fused[key]
                yield Readback(slot, location, _in_order(rows, slot.order, packed=False))
            for path, head in self._tied_heads:
                slot = next(s for s in self._all() if getattr(s.module, s.attribute) is head.weight)
                if hasattr(head, "cpu_linear"):
                    rows = self._read(head, "weight")[slot.start : slot.stop]
                    yield Readback(slot, f"{path} (packed copy)", rows)

    def _load_in_place(self, published: Published) -> None:
        places = ((slot, entry, tensor) for entry, tensor in published for slot in self.slots[entry.name])
        parts = [(slot, entry, *slot.part_of(tensor, entry.first_row)) for slot, entry, tensor in places]
        given: dict[str, int] = {}
        for slot, _, part, _ in parts:
            place = f"{slot.path}.{slot.attribute}"
            given[place] = given.get(place, 0) + (part.shape[0] if part.ndim else 1)
        repack: dict[str, tuple[Any, torch.Tensor]] = {}
        for slot, entry, part, at in parts:
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
            rows_of.copy_(_in_order(part, slot.order, packed=True))
        for module, weight in repack.values():
            if module.weight.numel() == 0:
                module.weight = torch.nn.Parameter(weight, requires_grad=False)
            module.quant_method.process_weights_after_loading(module)

    def _all(self) -> Iterator[Slot]:
        return (slot for slots in self.slots.values() for slot in slots)

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
        identity = torch.eye(_in_features(module), dtype=self.dtype, device=parameter.device)
        return product(identity, parameter, None).t()

    def _uses_packed_copy(self, module: Any, attribute: str) -> bool:
        """Whether the forward pass uses a packed copy of this parameter, rather than a row lookup."""
        return attribute == "weight" and hasattr(module, "cpu_linear") and module not in self._lookups

    def verify_adapter(self, adapter_id: int, folder: str, checksums: dict[str, int], scaling: float) -> int:
        """Compare the active adapter's matrices with the published ones, bit for bit.

        vLLM multiplies B by the scaling when it activates an adapter. Returns the number of comparisons. Raises
        WeightSyncMismatch, and ConfigError for an adapted layer that vLLM stores in another layout.
        """
        active = self._runner.lora_manager._adapter_manager.lora_index_to_id
        if adapter_id not in active:
            raise WeightSyncMismatch(f"LoRA adapter {adapter_id} is not active in the sampler; sync again")
        index = active.index(adapter_id)
        published = load_file(Path(folder) / ADAPTER_WEIGHTS)
        for name, tensor in published.items():
            if checksum(tensor) != checksums.get(name):
                raise WeightSyncMismatch(f"LoRA matrix {name}: the sampler received other values than were published")
        layers = {path: module for path, module in self._model.named_modules() if hasattr(module, "lora_a_stacked")}
        suffix = ".lora_A.weight"
        adapted = [name for name in sorted(published) if name.endswith(suffix)]
        plain = {name: name.removeprefix(PEFT_PREFIX).removesuffix(suffix) for name in adapted}
        self._require(f"{layer}.weight" for layer in plain.values())
        for name, layer in plain.items():
            slots = self.slots[f"{layer}.weight"]
            slot = slots[0]
            module: Any = layers[slot.path.removesuffix(BASE_LAYER)]
            names = {s.name: s.start for s in self._all() if (s.path, s.attribute) == (slot.path, slot.attribute)}
            position = sorted(names, key=names.__getitem__).index(slot.name)
            a, b = module.lora_a_stacked[position][index, 0], module.lora_b_stacked[position][index, 0]
            down, up = published[name], published[name.replace("lora_A", "lora_B")]
            if slot.columns is not None:
                down = down[:, slot.columns[0] : slot.columns[1]]
            else:
                up = torch.cat([part.part_of(up)[0] for part in slots])
            for what, held, wanted in (("A", a, down.to(a.dtype)), ("B", b, up.to(b.dtype) * scaling)):
                held = held[: wanted.shape[0], : wanted.shape[1]].cpu()
                if not torch.equal(held, wanted):
                    difference = float((held.double() - wanted.double()).abs().max())
                    raise WeightSyncMismatch(
                        f"LoRA matrix {what} of {layer}: the sampler's differs from the learner's by up to "
                        f"{difference:.3g}"
                    )
        return 2 * len(adapted)

    def _require(self, names: Iterable[str]) -> None:
        """Raise ConfigError for tensors without a slot: they could be loaded neither in buckets nor verified."""
        missing = sorted({name for name in names if name not in self.slots})
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise ConfigError(
                f"model.path: the sampler has no place for {', '.join(missing[:3])}{more}, so its weights cannot be "
                "synced and verified; choose an architecture that trains, such as Qwen2, Qwen3, Llama or Phi-3"
            )


def _in_order(experts: torch.Tensor, order: torch.Tensor | None, *, packed: bool) -> torch.Tensor:
    """Experts [n, out, in] in the module's order (packed) from the checkpoint's, or the reverse."""
    if order is None:
        return experts
    flat = experts.reshape(len(experts), -1)
    if packed:
        return flat[:, order.to(flat.device)].view_as(experts)
    plain = torch.empty_like(flat)
    plain[:, order.to(flat.device)] = flat
    return plain.view_as(experts)


def _in_features(module: Any) -> int:
    """Of a split linear layer, one that every worker holds whole, or an embedding."""
    names = ("input_size_per_partition", "input_size", "embedding_dim")
    return int(next(size for name in names if (size := getattr(module, name, None)) is not None))
