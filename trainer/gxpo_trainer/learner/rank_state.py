"""One rank's part of a checkpoint: masters, moments, step count and random state, as flat tensors and JSON."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gxpo_trainer.errors import CheckpointError
from gxpo_trainer.learner.shards import Shards


def capture(shards: Shards, device: torch.device) -> dict[str, Tensor]:
    """Live tensors by name, no copies: write them before the next step.

    `parameter/<i>` and `<moment>/<i>` as in `parameters()`, `rng/cpu` and, on a GPU, `rng/cuda`.
    """
    tensors = {f"parameter/{i}": tensor for i, tensor in enumerate(shards.parameters())}
    for name, moments in shards.state.moments().items():
        tensors.update({f"{name}/{i}": tensor for i, tensor in enumerate(moments)})
    tensors["rng/cpu"] = torch.get_rng_state()
    if device.type == "cuda":
        tensors["rng/cuda"] = torch.cuda.get_rng_state(device)
    return tensors


def check(live: dict[str, Tensor], tensors: dict[str, Tensor], identity: dict[str, Any], meta: dict[str, Any]) -> None:
    """Raises CheckpointError when saved tensors and JSON are not those of a learner such as this one."""
    for name, value in identity.items():
        if meta.get(name) != value:
            raise CheckpointError(
                f"the checkpoint has {name} = {meta.get(name)!r}, this learner {value!r}; resume with the settings "
                "of the checkpoint, or start a new run from its exported weights"
            )
    for name, tensor in live.items():
        if name not in tensors or tensors[name].shape != tensor.shape:
            found = tuple(tensors[name].shape) if name in tensors else "nothing"
            raise CheckpointError(
                f"the checkpoint has {found} for {name}, this learner {tuple(tensor.shape)}; it is of another model"
            )
    unknown = sorted(tensors.keys() - live.keys())
    if unknown:
        raise CheckpointError(f"the checkpoint has {unknown[0]}, this learner has not; it is of another model")


@torch.no_grad()
def restore(live: dict[str, Tensor], tensors: dict[str, Tensor], device: torch.device) -> None:
    """Write checked tensors into the live ones, and the random state back."""
    for name, tensor in live.items():
        if not name.startswith("rng/"):
            tensor.copy_(tensors[name])
    torch.set_rng_state(tensors["rng/cpu"].cpu())
    if device.type == "cuda":
        torch.cuda.set_rng_state(tensors["rng/cuda"].cpu(), device)
