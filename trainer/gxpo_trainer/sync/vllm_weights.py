"""Access to the weights of vLLM's model and to its weight-transfer API, for vLLM 0.32.

vLLM renames these internals between releases, so no other file uses them.

On a CPU vLLM packs the matrix of each linear layer for oneDNN (`layer.cpu_linear`) and drops the plain one; the head
keeps both. With tied embeddings an update of the plain matrix leaves the packed copy stale. Here packed layers are
always repacked after an update and read back through the packed product: the identity matrix times the packed weights
gives the weights bit for bit (each output is one weight plus exact zeros), except that -0.0 becomes +0.0. A packed copy
is thus compared as strictly as a plain tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gxpo_trainer.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Slot:
    """Location of one checkpoint tensor: rows [start, stop) of `module.attribute`."""

    name: str
    module: Any  # a torch.nn.Module with vLLM's own attributes
    path: str
    attribute: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Readback:
    """One tensor as the sampler uses it.

    location: where it was read, for messages. packed: it was read from a packed copy, which turns -0.0 into +0.0.
    """

    name: str
    location: str
    tensor: torch.Tensor
    packed: bool


class VllmWeights:
    """Loads, packs and reads back the weights of an in-process vLLM engine (one worker).

    transformers' checkpoint names are mapped to vLLM's fused layers through the model class's
    `packed_modules_mapping`. Tensors without such a location (for example mixture-of-experts weights) are loaded by
    vLLM's `reload_weights` and listed in `unreadable`.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.model: torch.nn.Module = llm.apply_model(lambda model: model)[0]
        self.dtype: torch.dtype = llm.llm_engine.model_config.dtype
        self._slots: dict[str, Slot] = {}
        self._identities: dict[tuple[int, torch.dtype, torch.device], torch.Tensor] = {}
        self._tied_heads: list[tuple[str, Any]] = []
        self._lookups: set[Any] = set()
        self._map()
        self.unreadable: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Checkpoint names that can be loaded in place and read back."""
        return tuple(self._slots)

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load checkpoint tensors (any device, any dtype) into the live model and repack its packed layers.

        A subset may be given; the other rows of a fused layer keep their values. Raises ValueError for a wrong shape.
        """
        unknown = [name for name in tensors if name not in self._slots]
        with torch.inference_mode():
            if unknown:
                self._reload(tensors)
            else:
                self._load_in_place(tensors)
            self.repack_heads()
        self.unreadable = tuple(unknown)

    def repack_heads(self) -> None:
        """Repack tied heads from the embedding they share."""
        for _, head in self._tied_heads:
            if _is_packed(head):
                head.quant_method.process_weights_after_loading(head)

    def read_back(self) -> Iterator[Readback]:
        """Yield every mapped tensor, packed copies through their packed product.

        A tied head yields the embedding's name a second time, read through the head. Tensors may share memory with the
        live model and must not be modified.
        """
        fused: dict[tuple[str, str], torch.Tensor] = {}
        with torch.inference_mode():
            for slot in self._slots.values():
                key = (slot.path, slot.attribute)
                if key not in fused:
                    fused[key] = self._read(slot.module, slot.attribute)
                location = f"{slot.path}.{slot.attribute}[{slot.start}:{slot.stop}]"
                packed = self._uses_packed_copy(slot.module, slot.attribute)
                yield Readback(slot.name, location, fused[key][slot.start : slot.stop], packed)
            for path, head in self._tied_heads:
                slot = next(s for s in self._slots.values() if getattr(s.module, s.attribute) is head.weight)
                if _is_packed(head):
                    rows = self._read(head, "weight")[slot.start : slot.stop]
                    yield Readback(slot.name, f"{path} (packed copy)", rows, True)

    def _map(self) -> None:
        from vllm.model_executor.layers.linear import LinearBase
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        packed_names: Mapping[str, Sequence[str]] = getattr(self.model, "packed_modules_mapping", {})
        embeddings = {
            id(m.weight) for m in self.model.modules() if type(m) is VocabParallelEmbedding and m.weight is not None
        }
        for path, module in self.model.named_modules():
            if isinstance(module, ParallelLMHead) and id(module.weight) in embeddings:
                self._tied_heads.append((path, module))
                continue
            for attribute, parameter in module.named_parameters(recurse=False):
                if isinstance(module, LinearBase):
                    self._map_linear(path, module, attribute, packed_names)
                elif isinstance(module, VocabParallelEmbedding):
                    if not isinstance(module, ParallelLMHead):
                        self._lookups.add(module)
                    # vLLM pads the vocabulary; the checkpoint holds the first rows only.
                    self._add(path, module, attribute, path, 0, module.org_vocab_size)
                else:
                    self._add(path, module, attribute, path, 0, parameter.shape[0] if parameter.ndim else 1)

    def _map_linear(self, path: str, module: Any, attribute: str, packed_names: Mapping[str, Sequence[str]]) -> None:
        parent, _, leaf = path.rpartition(".")
        parts = list(packed_names.get(leaf, (leaf,)))
        sizes: list[int] = list(module.output_partition_sizes)
        if len(parts) != len(sizes):
            return  # loaded by vLLM's own loader and reported as unreadable
        start = 0
        for part, size in zip(parts, sizes, strict=True):
            self._add(path, module, attribute, f"{parent}.{part}" if parent else part, start, start + size)
            start += size

    def _add(self, path: str, module: Any, attribute: str, prefix: str, start: int, stop: int) -> None:
        name = f"{prefix}.{attribute}"
        self._slots[name] = Slot(name, module, path, attribute, start, stop)

    def _load_in_place(self, tensors: Mapping[str, torch.Tensor]) -> None:
        repack: dict[str, tuple[Any, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            slot = self._slots[name]
            if self._uses_packed_copy(slot.module, slot.attribute):
                if slot.path not in repack:
                    repack[slot.path] = (slot.module, self._writable(slot, tensors))
                target = repack[slot.path][1]
            else:
                target = getattr(slot.module, slot.attribute)
            rows = target[slot.start : slot.stop] if target.ndim else target
            if rows.shape != tensor.shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, the sampler's is {tuple(rows.shape)}")
            rows.copy_(tensor)
        for module, weight in repack.values():
            if module.weight.numel() == 0:
                module.weight = torch.nn.Parameter(weight, requires_grad=False)
            module.quant_method.process_weights_after_loading(module)

    def _writable(self, slot: Slot, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """A plain matrix for a packed layer: the live one if vLLM kept it, else a new one."""
        module = slot.module
        if module.weight.numel():
            live: torch.Tensor = module.weight.data
            return live
        siblings = [s for s in self._slots.values() if s.path == slot.path and s.attribute == "weight"]
        if all(sibling.name in tensors for sibling in siblings):
            return torch.empty(siblings[-1].stop, *tensors[slot.name].shape[1:], dtype=self.dtype)
        return self._read(module, "weight").clone()

    def _read(self, module: Any, attribute: str) -> torch.Tensor:
        parameter: torch.Tensor = getattr(module, attribute)
        if not self._uses_packed_copy(module, attribute):
            return parameter.detach()
        # [in, in] @ packed [in, out] -> [in, out]; transposed it is the checkpoint's [out, in].
        product: Callable[..., torch.Tensor] = module.cpu_linear
        return product(self._identity(_in_features(module), self.dtype, parameter.device), parameter, None).t()

    def _uses_packed_copy(self, module: Any, attribute: str) -> bool:
        """Whether the forward pass uses a packed copy of this parameter, rather than a row lookup."""
        return attribute == "weight" and _is_packed(module) and module not in self._lookups

    def _identity(self, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        key = (size, dtype, device)
        if key not in self._identities:
            self._identities[key] = torch.eye(size, dtype=dtype, device=device)
        return self._identities[key]

    def _reload(self, tensors: Mapping[str, torch.Tensor]) -> None:
        pairs: Iterable[tuple[str, torch.Tensor]] = tensors.items()
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(pairs)})

    # Sampler side of vLLM's weight transfer between GPUs, called by its trainer engine.

    def init_transfer(self, request: Any) -> None:
        """Join the trainer's NCCL group. Raises ConfigError without CUDA."""
        require_cuda()
        self._llm.init_weight_transfer_engine(request)

    def start_transfer(self) -> None:
        self._llm.start_weight_update()

    def receive_transfer(self, request: Any) -> None:
        self._llm.update_weights(request)

    def finish_transfer(self) -> None:
        self._llm.finish_weight_update()
        with torch.inference_mode():
            self.repack_heads()


def open_nccl_trainer(sampler: Any, *, address: str, port: int, num_sampler_gpus: int) -> Any:
    """Connect vLLM's trainer-side NCCL engine to a sampler actor. Raises ConfigError without CUDA.

    sampler: a Ray actor handle with vLLM's four weight-update methods. The NCCL group consists of learner rank 0 and
    the sampler's GPUs.
    """
    require_cuda()
    from vllm.distributed.weight_transfer import RayVLLMWeightSyncClient, WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    info = NCCLTrainerInitInfo(rank=0, master_address=address, master_port=port, world_size=1 + num_sampler_gpus)
    return WeightTransferTrainerFactory.trainer_init(
        info, client=RayVLLMWeightSyncClient(sampler), source=weight_source(())
    )


def weight_source(named_tensors: Sequence[tuple[str, torch.Tensor]]) -> Any:
    """The tensors as a WeightSource of vLLM's trainer engine."""
    from vllm.distributed.weight_transfer import ParamMeta, WeightSource

    class Source(WeightSource):
        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named_tensors]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter(named_tensors)

    return Source()


def require_cuda() -> None:
    if not torch.cuda.is_available():
        raise ConfigError(
            'weight transfer "nccl" needs CUDA devices for learner and sampler, and none is visible; '
            'use the transfer "shared_memory", which works between two processes of one host'
        )


def _is_packed(module: Any) -> bool:
    return hasattr(module, "cpu_linear")


def _in_features(module: Any) -> int:
    size = getattr(module, "input_size_per_partition", None)
    return int(size if size is not None else module.embedding_dim)
