"""What a learner rank writes into a checkpoint, and reads back: its state, and weights that others load.

    learner/rank-<r>.safetensors    parameter/<i> and <moment>/<i>, flat fp32, as the rank held them; rng/cpu, rng/cuda
    learner/rank-<r>.json           what each <i> holds of which parameter; shapes, stage, ranks, step, learning rate
    policy/, adapter/               whole weights for transformers, PEFT and vLLM, published to the engines as well

Every rank writes what it holds; of a replicated learner (stage 0) rank 0 alone. Every rank reads, from whichever files
have them, the elements that it holds now, so that a state loads on any number of ranks and at any stage.

Under LoRA the policy has the adapter merged, W + (alpha/rank)·B·A, computed in fp32; the model itself is not changed.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save

from gxpo_trainer.config import RunConfig
from gxpo_trainer.errors import CheckpointError
from gxpo_trainer.learner.models import load_tokenizer
from gxpo_trainer.learner.shards import Segment, Shards
from gxpo_trainer.weights.buckets import ADAPTER_WEIGHTS, PEFT_PREFIX

BASE_LAYER = ".base_layer"
PARAMETER = "parameter"


@dataclass(frozen=True, slots=True)
class Layout:
    """How a state is cut, and what it belongs to."""

    world_size: int
    zero_stage: int
    precision: str
    optimizer: str
    lora_rank: int

    def describe(self) -> str:
        return f"{self.world_size} rank{'s' if self.world_size > 1 else ''} at ZeRO stage {self.zero_stage}"


MUST_MATCH = ("precision", "optimizer", "lora_rank")


def write(folder: Path, rank: int, shards: Shards, layout: Layout, learning_rate: float, device: torch.device) -> None:
    holds = rank == 0 or not shards.replicated
    held, segments = (kinds(shards), shards.segments()) if holds else ({}, [])
    tensors = {f"{kind}/{i}": t for kind, flat in held.items() for i, t in enumerate(flat)}
    tensors["rng/cpu"] = torch.get_rng_state()
    if device.type == "cuda":
        tensors["rng/cuda"] = torch.cuda.get_rng_state(device)
    body = {
        "layout": asdict(layout),
        "optimizer_step": shards.step,
        "learning_rate": learning_rate,
        "shapes": shards.shapes(),
        "segments": [[(s.parameter, s.start, s.offset, s.length) for s in of_tensor] for of_tensor in segments],
    }
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / f"rank-{rank}.safetensors")
    (folder / f"rank-{rank}.json").write_text(json.dumps(body), encoding="utf-8")


def kinds(shards: Shards) -> dict[str, list[Tensor]]:
    """Masters and moments by name, each a list of live flat tensors as in `parameters()`."""
    return {PARAMETER: shards.parameters(), **shards.moments()}


class SavedState:
    """The files of all ranks that wrote a state. Opening reads the JSON alone; tensors are read piece by piece."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        first = json.loads((folder / "rank-0.json").read_text(encoding="utf-8"))
        self.layout = Layout(**first["layout"])
        self.optimizer_step, self.learning_rate = int(first["optimizer_step"]), float(first["learning_rate"])
        self.shapes = {name: tuple(shape) for name, shape in first["shapes"].items()}
        self._pieces: dict[str, list[tuple[Segment, int, int]]] = {}
        for rank in range(self.layout.world_size):
            body = json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8"))
            for index, segments in enumerate(body["segments"]):
                for segment in (Segment(*row) for row in segments):
                    self._pieces.setdefault(segment.parameter, []).append((segment, rank, index))
        self.file: Callable[[int], Any] = functools.cache(
            lambda rank: safe_open(folder / f"rank-{rank}.safetensors", framework="pt")
        )
        """The tensors of a rank, opened when the first is needed."""

    def check(self, layout: Layout, shapes: dict[str, tuple[int, ...]]) -> None:
        """Raises CheckpointError, before anything is changed, when this is not the state of such a learner."""
        for name in MUST_MATCH:
            then, now = getattr(self.layout, name), getattr(layout, name)
            if then != now:
                raise CheckpointError(
                    f"{self._folder.parent} has {name} = {then!r}, this learner {now!r}; resume with the settings of "
                    "the checkpoint, or start a new run from its exported weights"
                )
        for name in sorted({*shapes, *self.shapes}):
            if shapes.get(name) != self.shapes.get(name):
                saved, here = self.shapes.get(name, "nothing"), shapes.get(name, "nothing")
                raise CheckpointError(
                    f"{self._folder.parent} is of another model: it has {saved} for {name}, this learner {here}; set "
                    "model.path to the model of the run, or start a new run in another folder"
                )
        for name, shape in shapes.items():
            if sum(segment.length for segment, _, _ in self._pieces.get(name, [])) != torch.Size(shape).numel():
                raise CheckpointError(f"{self._folder.parent} lacks a part of {name}; use another checkpoint")

    @torch.no_grad()
    def read_into(self, kind: str, tensor: Tensor, segments: Sequence[Segment]) -> None:
        """Fill a flat tensor that holds these segments."""
        for wanted in segments:
            for piece, rank, index in self._pieces[wanted.parameter]:
                begin = max(wanted.start, piece.start)
                length = min(wanted.start + wanted.length, piece.start + piece.length) - begin
                if length > 0:
                    at = piece.offset + begin - piece.start
                    saved = self.file(rank).get_slice(f"{kind}/{index}")[at : at + length]
                    tensor.narrow(0, wanted.offset + begin - wanted.start, length).copy_(saved)


def restore(folder: Path, rank: int, shards: Shards, layout: Layout, device: torch.device) -> SavedState:
    """Fill masters, moments and step count from any layout's files, bit for bit; the caller publishes.

    Raises CheckpointError, before anything is changed, when the state is of another model or optimizer.
    """
    saved = SavedState(folder)
    saved.check(layout, shards.shapes())
    for kind, tensors in kinds(shards).items():
        for tensor, segments in zip(tensors, shards.segments(), strict=True):
            saved.read_into(kind, tensor, segments)
    # A rank beyond those that wrote takes the random state of one of them.
    file = saved.file(rank % saved.layout.world_size)
    torch.set_rng_state(file.get_tensor("rng/cpu"))
    if device.type == "cuda" and "rng/cuda" in file.keys():  # noqa: SIM118 (not a dict)
        torch.cuda.set_rng_state(file.get_tensor("rng/cuda"), device)
    shards.set_step(saved.optimizer_step)
    return saved


def full_weights(model: nn.Module, merged_dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """(name in a transformers checkpoint, whole tensor in the forward pass's dtype), LoRA merged; tied weights once.

    merged_dtype: of the tensors that an adapter is merged into, None for the forward pass's. Collective at ZeRO-3:
    every rank must run the iterator to its end. Copy a tensor before asking for the next one: it may be released then.
    """
    import deepspeed

    layers: dict[str, Any] = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            continue
        owner, _, leaf = name.rpartition(".")
        layer = layers.get(owner.removesuffix(BASE_LAYER)) if owner.endswith(BASE_LAYER) and leaf == "weight" else None
        plain = name.removeprefix(PEFT_PREFIX).replace(f"{BASE_LAYER}.", ".")
        if layer is None:
            with deepspeed.zero.GatheredParameters([parameter]):  # does nothing where they are whole
                yield plain, parameter.detach()
            continue
        down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        with deepspeed.zero.GatheredParameters([parameter, down, up]):
            with torch.no_grad():
                merged = parameter.float() + layer.scaling["default"] * (up.float() @ down.float())
            yield plain, merged.to(merged_dtype or parameter.dtype)


def adapter_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name in a PEFT adapter file, whole tensor) of each LoRA matrix, none without LoRA; collective as above."""
    import deepspeed

    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            with deepspeed.zero.GatheredParameters([parameter]):
                yield name.replace(".default.", "."), parameter.detach()


def write_policy(model: Any, config: RunConfig, folder: Path, *, rank: int) -> None:
    """config.json, model.safetensors and tokenizer of the present weights, LoRA merged. Collective; rank 0 writes.

    The code of a model that came with its own goes with them. Tensors that an adapter is merged into are written in
    fp32, and config.json names that dtype.
    """
    adapted = config.learner.lora is not None
    weights = _gather(full_weights(model, torch.float32 if adapted else None), keep=rank == 0)
    if rank:
        return
    folder.mkdir(parents=True)
    base = model.get_base_model() if adapted else model
    # In memory the experts of a layer are one tensor, in published checkpoints and for vLLM each has its own.
    weights = revert_weight_conversion(base, weights)
    weights = {name: weight.contiguous() for name, weight in weights.items()}
    # One file whatever the size: a run's policy is read back by the sampler, which maps it.
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model_config = copy.deepcopy(model.config)
    if adapted:
        model_config.dtype = torch.float32
    if base._auto_class is not None:  # its class came with the model
        custom_object_save(base, folder, config=model_config)
    model_config.save_pretrained(folder)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        # save_pretrained refuses what many published models have, such as a temperature without do_sample.
        generation.to_json_file(folder / "generation_config.json")
    load_tokenizer(config.model).save_pretrained(folder)


def write_adapter(model: Any, folder: Path, *, rank: int) -> None:
    """adapter_config.json and adapter_model.safetensors for PEFT. Collective; rank 0 writes."""
    weights = _gather(adapter_weights(model), keep=rank == 0)
    if rank:
        return
    folder.mkdir(parents=True)
    save_file(weights, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    model.peft_config["default"].save_pretrained(folder)


def _gather(named: Iterator[tuple[str, Tensor]], *, keep: bool) -> dict[str, Any]:
    """Whole tensors on the CPU; every rank must run the iterator to its end."""
    return {name: tensor.detach().cpu().clone() if keep else None for name, tensor in named}
