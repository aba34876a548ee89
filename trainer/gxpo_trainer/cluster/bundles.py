"""Bundles of a run's placement group, and the bundle of each process. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from gxpo_trainer.config import PlacementConfig

Bundle = dict[str, float]


@dataclass(frozen=True, slots=True)
class Bundles:
    """What a run reserves.

    resources: of each bundle. strategy: Ray's. learner: bundle of each rank. engines: bundle of each engine; the
    verifier is in that of the first.
    """

    resources: tuple[Bundle, ...]
    strategy: Literal["PACK", "STRICT_SPREAD"]
    learner: tuple[int, ...]
    engines: tuple[int, ...]

    def total(self) -> Bundle:
        """Sum of all bundles."""
        total: Bundle = {}
        for bundle in self.resources:
            for name, count in bundle.items():
                total[name] = total.get(name, 0.0) + count
        return total


def run_bundles(p: PlacementConfig, device: Literal["cpu", "gpu"], *, colocated: bool) -> Bundles:
    """Separate: a bundle for each rank, then one for each engine. Colocated: one for each engine and its ranks.

    `strategy = "split"`: all ranks in one bundle and all engines in another, on different nodes.
    """
    ranks, samplers, t = p.learner_ranks, p.samplers, p.tensor_parallel
    if colocated:
        shared = [_bundle(p.sampler_cpus + t * p.learner_cpus, t, device) for _ in range(samplers)]
        shared[0]["CPU"] += p.verifier_cpus
        return Bundles(tuple(shared), "PACK", tuple(rank // t for rank in range(ranks)), tuple(range(samplers)))
    if p.strategy == "split":
        learner = _bundle(ranks * p.learner_cpus, ranks, device)
        engines = _bundle(samplers * p.sampler_cpus + p.verifier_cpus, p.sampler_devices, device)
        return Bundles((learner, engines), "STRICT_SPREAD", (0,) * ranks, (1,) * samplers)
    separate = [_bundle(p.learner_cpus, 1, device) for _ in range(ranks)]
    separate += [_bundle(p.sampler_cpus, t, device) for _ in range(samplers)]
    separate[ranks]["CPU"] += p.verifier_cpus
    return Bundles(tuple(separate), "PACK", tuple(range(ranks)), tuple(range(ranks, ranks + samplers)))


def _bundle(cpus: float, gpus: int, device: Literal["cpu", "gpu"]) -> Bundle:
    return {"CPU": cpus} | ({"GPU": float(gpus)} if device == "gpu" else {})


def describe(resources: Mapping[str, float]) -> str:
    """GPUs and CPUs in words: `1 GPU and 0.75 CPUs`."""
    parts = [
        f"{count:.6g} {name}{'' if count == 1 else 's'}"
        for name, count in (("GPU", resources.get("GPU", 0.0)), ("CPU", resources.get("CPU", 0.0)))
        if count
    ]
    return " and ".join(parts) or "no CPUs"
