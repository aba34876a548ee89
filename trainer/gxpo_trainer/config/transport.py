"""How weights reach the engines: the choice, and what cannot work. Pure."""

from __future__ import annotations

from typing import Literal

Transport = Literal["shared_memory", "object_store", "nccl", "cuda_ipc"]


def choose_transport(
    requested: Transport | Literal["auto"], device: Literal["cpu", "gpu"], colocated: bool, one_node: bool
) -> Transport:
    """The transport of a run; `auto` takes the fastest that the placement allows.

    one_node: learner and all engines are on one node. Raises ValueError for a transport that cannot work.
    """
    shared_gpus, separate_gpus = device == "gpu" and colocated, device == "gpu" and not colocated
    if requested == "auto":
        if device == "gpu":
            return "cuda_ipc" if colocated else "nccl"
        return "shared_memory" if one_node else "object_store"
    setting = f'weight_transport = "{requested}"'
    if requested in ("nccl", "cuda_ipc") and device == "cpu":
        raise ValueError(
            f'{setting} needs GPUs, but this run uses CPUs; set weight_transport = "auto", or device = "gpu" where '
            "GPUs join later"
        )
    if requested == "nccl" and shared_gpus:
        raise ValueError(
            f"{setting} needs a GPU for each process, because NCCL rejects duplicate devices, but learner and engines "
            'share theirs; set weight_transport = "auto", or colocate = false'
        )
    if requested == "cuda_ipc" and separate_gpus:
        raise ValueError(
            f"{setting} needs learner and engines on the same GPUs, but each has its own; set weight_transport = "
            '"auto", or colocate = true'
        )
    if requested == "shared_memory" and not one_node:
        raise ValueError(
            f"{setting} works within one node, but learner and engines are on different nodes; set weight_transport = "
            '"auto"'
        )
    return requested
