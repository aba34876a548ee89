"""Settings of placement: which processes run where."""

from __future__ import annotations

from itertools import product
from typing import Literal

from pydantic import Field, FiniteFloat, model_validator

from gxpo_trainer.config.base import Settings
from gxpo_trainer.config.transport import Transport, choose_transport


class PlacementConfig(Settings):
    """Which processes run where. Logical Ray CPUs are fractional and their sum must fit the machine."""

    learner_ranks: int = Field(1, ge=1, description="DeepSpeed ranks, one GPU each.")
    samplers: int = Field(1, ge=1, description="vLLM engines, one actor each.")
    tensor_parallel: int = Field(1, ge=1, description="Devices of one engine; must divide the model's attention heads.")
    device: Literal["auto", "cpu", "gpu"] = Field(
        "auto",
        description="auto: gpu where this machine, or the Ray of ray_address, has some; an event says which and why. "
        "Set gpu where an autoscaler adds the GPUs.",
    )
    colocate: bool | Literal["auto"] = Field(
        "auto",
        description="true: learner ranks and engines share GPUs, one rank for each device of an engine; false: each "
        "has its own; auto: shared where there are fewer than learner_ranks + samplers × tensor_parallel.",
    )
    learner_cpus: FiniteFloat = Field(1.0, gt=0, description="Logical CPUs of each rank.")
    sampler_cpus: FiniteFloat = Field(0.75, gt=0, description="Logical CPUs of each engine.")
    verifier_cpus: FiniteFloat = Field(0.25, gt=0, description="Logical CPUs of the verifier.")
    learner_threads: int | None = Field(
        None, ge=1, description="Torch threads of each rank; none: the cores divided by ranks."
    )
    sampler_threads: int | None = Field(
        None, ge=1, description="Threads of each device of an engine; none: the cores divided by those devices."
    )
    ray_address: str | None = Field(None, description="Address of a running Ray; none: start one.")
    strategy: Literal["pack", "split"] = Field(
        "pack",
        description="On several nodes. pack: on as few as possible; split: learner and engines on different ones.",
    )
    weight_transport: Transport | Literal["auto"] = Field(
        "auto",
        description="How weights reach the engines. auto: cuda_ipc on shared GPUs, nccl between separate ones; on CPUs "
        "shared_memory on one node, else object_store (Ray's).",
    )
    wait_s: float = Field(
        600.0, ge=0, description="How long a run waits for nodes to join its Ray and for other runs to release theirs."
    )
    max_restarts: int = Field(3, ge=0, description="Recoveries of a learner from its checkpoint before giving up.")

    def without_learner(self) -> PlacementConfig:
        """The same for an evaluation, which has engines and a verifier only."""
        return self.model_copy(update={"learner_ranks": 0})

    @property
    def sampler_devices(self) -> int:
        """Devices of all engines together."""
        return self.samplers * self.tensor_parallel

    @property
    def can_colocate(self) -> bool:
        """Whether each device of the engines has exactly one learner rank to share it with."""
        return self.colocate is not False and self.learner_ranks == self.sampler_devices and self.strategy == "pack"

    @property
    def num_cpus(self) -> float:
        """Logical CPUs of the whole run."""
        return self.learner_ranks * self.learner_cpus + self.samplers * self.sampler_cpus + self.verifier_cpus

    def num_gpus(self, *, colocated: bool) -> int:
        """GPUs of the whole run on a GPU cluster."""
        return self.learner_ranks if colocated else self.learner_ranks + self.sampler_devices

    @model_validator(mode="after")
    def _consistent(self) -> PlacementConfig:
        if self.colocate is True and self.learner_ranks != self.sampler_devices:
            raise ValueError(
                f"colocate = true needs one learner rank for each device of the engines, but learner_ranks = "
                f"{self.learner_ranks} and samplers × tensor_parallel = {self.samplers} × {self.tensor_parallel} = "
                f"{self.sampler_devices}; make them equal, or set colocate = false"
            )
        if self.colocate is True and self.strategy == "split":
            raise ValueError(
                'colocate = true puts learner and engines on the same devices, strategy = "split" on different nodes; '
                'set colocate = false or strategy = "pack"'
            )
        self._check_transport()
        return self

    def _check_transport(self) -> None:
        """Raise ValueError for a transport that works neither on CPUs nor on GPUs, shared or not, as far as the
        settings leave these open."""
        devices: tuple[Literal["cpu", "gpu"], ...] = ("cpu", "gpu") if self.device == "auto" else (self.device,)
        sharing = (True, False) if self.colocate == "auto" and self.can_colocate else (self.colocate is True,)
        refusals = []
        for device, colocated in product(devices, sharing):
            try:
                choose_transport(self.weight_transport, device, colocated, one_node=self.strategy != "split")
                return
            except ValueError as error:
                refusals.append(error)
        raise refusals[-1]
