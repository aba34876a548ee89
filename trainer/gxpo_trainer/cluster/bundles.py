"""Bundles of a run's placement group, and the bundle of each process. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
        return total_of(self.resources)

    @property
    def largest(self) -> Bundle:
        """The bundle with the most GPUs, then CPUs."""
        return max(self.resources, key=_size)

    def too_large(self, nodes: Sequence[Mapping[str, float]]) -> Bundle | None:
        """The largest bundle that exceeds every node, if one does: a bundle is never divided among nodes.

        nodes: their resources, used or not. Those without a GPU (of a run on CPUs: without CPUs) do not count, and
        without any other there is no answer: workers of any size may join.
        """
        kind = "GPU" if "GPU" in self.largest else "CPU"
        workers = [node for node in nodes if node.get(kind, 0.0) > 0]
        found = [bundle for bundle in self.resources if all(_shortage(bundle, worker) for worker in workers)]
        return max(found, key=_size) if workers and found else None

    def shortage(self, has: Mapping[str, float]) -> Bundle:
        """By how much the sum of the bundles exceeds the resources `has`; empty where it does not."""
        return _shortage(self.total(), has)


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


def total_of(resources: Iterable[Mapping[str, float]]) -> Bundle:
    """Sum by name."""
    total: Bundle = {}
    for one in resources:
        for name, count in one.items():
            total[name] = total.get(name, 0.0) + count
    return total


def _size(bundle: Bundle) -> tuple[float, float]:
    return bundle.get("GPU", 0.0), bundle["CPU"]


def _shortage(needed: Mapping[str, float], has: Mapping[str, float]) -> Bundle:
    return {name: n - has.get(name, 0.0) for name, n in needed.items() if n > has.get(name, 0.0) + 1e-9}


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
