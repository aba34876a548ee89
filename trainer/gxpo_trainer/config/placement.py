"""Settings of placement: which processes run where."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gxpo_trainer.config.base import Settings


class PlacementConfig(Settings):
    """Which processes run where. Logical Ray CPUs are fractional and their sum must fit the machine."""

    learner_ranks: int = Field(1, ge=1, description="DeepSpeed ranks.")
    device: Literal["auto", "cpu", "gpu"] = Field(
        "auto",
        description="auto: gpu where this machine, or the Ray of ray_address, has some; an event says which and why.",
    )
    learner_cpus: float = Field(1.0, gt=0, description="Logical CPUs a rank.")
    sampler_cpus: float = Field(0.75, gt=0, description="Logical CPUs of the sampler.")
    verifier_cpus: float = Field(0.25, gt=0, description="Logical CPUs of the verifier.")
    learner_threads: int | None = Field(
        None, ge=1, description="Torch threads a rank; none: the cores divided by ranks."
    )
    sampler_threads: int | None = Field(None, ge=1, description="Threads of the sampler; none: all cores.")
    samplers: int = Field(1, ge=1, description="x")
    tensor_parallel: int = Field(1, ge=1, description="GPUs a sampler.")
    ray_address: str | None = Field(None, description="Address of a running Ray; none: one of our own.")
    strategy: Literal["pack", "split"] = Field(
        "pack",
        description="On several nodes. pack: on as few as possible; split: learner and sampler on different ones.",
    )
    weight_transport: Literal["auto", "shared_memory", "object_store"] = Field(
        "auto",
        description="How weights reach the sampler. auto: shared_memory on one node, object_store (Ray's) between two.",
    )
    wait_s: float = Field(120.0, ge=0, description="How long a run waits for nodes that are still joining its Ray.")
    max_restarts: int = Field(3, ge=0, description="Recoveries of a learner from its checkpoint before giving up.")
