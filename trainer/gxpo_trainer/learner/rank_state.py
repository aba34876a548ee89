"""The learner's part of a checkpoint: masters, moments, step count and random state.

    learner/rank-<r>.safetensors    parameter/<i> and <moment>/<i>, flat fp32, as the rank held them; rng/cpu, rng/cuda
    learner/rank-<r>.json           what each <i> holds of which parameter; shapes, stage, ranks, step, learning rate

Every rank writes what it holds; of a replicated learner (stage 0) rank 0 alone. Every rank reads, from whichever files
have them, the elements that it holds now, so that a state loads on any number of ranks and at any stage.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gxpo_trainer.errors import CheckpointError
from gxpo_trainer.learner.shards import Segment, Shards

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
    """Write this rank's files."""
    from safetensors.torch import save_file

    holds = rank == 0 or not shards.replicated
    tensors = {f"{kind}/{i}": t for kind, held in kinds(shards).items() for i, t in enumerate(held)} if holds else {}
    tensors["rng/cpu"] = torch.get_rng_state()
    if device.type == "cuda":
        tensors["rng/cuda"] = torch.cuda.get_rng_state(device)
    body = {
        "layout": asdict(layout),
        "optimizer_step": shards.state.step,
        "learning_rate": learning_rate,
        "shapes": shards.shapes(),
        "segments": [[(s.parameter, s.start, s.offset, s.length) for s in of_tensor] for of_tensor in shards.segments()]
        if holds
        else [],
    }
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / f"rank-{rank}.safetensors")
    (folder / f"rank-{rank}.json").write_text(json.dumps(body), encoding="utf-8")


def kinds(shards: Shards) -> dict[str, list[Tensor]]:
    """Masters and moments by name, each a list of live flat tensors as in `parameters()`."""
    return {PARAMETER: shards.parameters(), **shards.state.moments()}


class SavedState:
    """The files of all ranks that wrote a state. Opening reads the JSON alone; tensors are read piece by piece."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        first = self._body(0)
        self.layout = Layout(**first["layout"])
        self.optimizer_step, self.learning_rate = int(first["optimizer_step"]), float(first["learning_rate"])
        self.shapes = {name: tuple(shape) for name, shape in first["shapes"].items()}
        self._pieces: dict[str, list[tuple[Segment, int, int]]] = {}
        for rank in range(self.layout.world_size):
            for index, segments in enumerate(self._body(rank)["segments"]):
                for segment in (Segment(*row) for row in segments):
                    self._pieces.setdefault(segment.parameter, []).append((segment, rank, index))
        self._files: dict[int, Any] = {}

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
                    saved = self._file(rank).get_slice(f"{kind}/{index}")[at : at + length]
                    tensor.narrow(0, wanted.offset + begin - wanted.start, length).copy_(saved)

    def restore_random_state(self, rank: int, device: torch.device) -> None:
        """The random state of this rank; a rank beyond those that wrote takes the state of one of them."""
        file = self._file(rank % self.layout.world_size)
        torch.set_rng_state(file.get_tensor("rng/cpu"))
        if device.type == "cuda" and "rng/cuda" in file.keys():  # noqa: SIM118 (not a dict)
            torch.cuda.set_rng_state(file.get_tensor("rng/cuda"), device)

    def _body(self, rank: int) -> dict[str, Any]:
        body: dict[str, Any] = json.loads((self._folder / f"rank-{rank}.json").read_text(encoding="utf-8"))
        return body

    def _file(self, rank: int) -> Any:
        from safetensors import safe_open

        if rank not in self._files:
            self._files[rank] = safe_open(self._folder / f"rank-{rank}.safetensors", framework="pt")
        return self._files[rank]


def restore(folder: Path, rank: int, shards: Shards, layout: Layout, device: torch.device) -> SavedState:
    """Fill masters, moments and step count from any layout's files, bit for bit; the caller publishes.

    Raises CheckpointError, before anything is changed, when the state is of another model or optimizer.
    """
    saved = SavedState(folder)
    saved.check(layout, shards.shapes())
    for kind, tensors in kinds(shards).items():
        for tensor, segments in zip(tensors, shards.segments(), strict=True):
            saved.read_into(kind, tensor, segments)
    saved.restore_random_state(rank, device)
    shards.state.set_step(saved.optimizer_step)
    return saved
