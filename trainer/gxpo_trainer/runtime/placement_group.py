"""The Ray placement group of a run: the bundle of each process, reserved all at once or not at all.

It is created before any actor, so two runs cannot each hold half of what they need, and Ray's autoscaler sees the
demand of a run that waits. The reservation outlives its actors: a restarted actor returns to its bundle, which Ray
reschedules when its node dies.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gxpo_trainer.config.base import Phase
from gxpo_trainer.errors import ConfigError, GxpoError, TrainingError
from gxpo_trainer.runtime.progress import ProgressWatch

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


def total_of(resources: Iterable[Mapping[str, float]]) -> Bundle:
    """Sum by name."""
    total: Bundle = {}
    for name, count in itertools.chain.from_iterable(bundle.items() for bundle in resources):
        total[name] = total.get(name, 0.0) + count
    return total


def _size(bundle: Mapping[str, float]) -> tuple[float, float]:
    return bundle.get("GPU", 0.0), bundle["CPU"]


def shortage(bundles: Bundles, available: Mapping[str, float]) -> Bundle:
    """What all bundles together need beyond what is available."""
    needed = total_of(bundles.resources)
    return {name: n - available.get(name, 0.0) for name, n in needed.items() if n > available.get(name, 0.0) + 1e-9}


def describe(resources: Mapping[str, float]) -> str:
    """GPUs and CPUs in words: `1 GPU and 0.75 CPUs`."""
    parts = [
        f"{count:.6g} {name}{'' if count == 1 else 's'}"
        for name in ("GPU", "CPU")
        if (count := resources.get(name, 0.0))
    ]
    return " and ".join(parts) or "no CPUs"


MIN_WAIT_S = 30.0
"""Free bundles are placed in milliseconds; those that another run is releasing take seconds."""
_POLL_S = 1.0
_WAIT_SLICE_S = 10
_MAX_BACKOFF_S = 16.0


@dataclass(slots=True)
class RunPlacementGroup:
    """The group and the bundle of each actor.

    Order: `create`, `is_ready` until it is, then actors with the options of their bundles, `remove`. Without a group
    (`handle` is None) Ray places the actors. wait_s: for the bundle of a lost node.
    """

    handle: Any = None
    bundles: Bundles | None = None
    wait_s: float = MIN_WAIT_S
    watch: ProgressWatch = field(default_factory=ProgressWatch)
    _reserved: Any = None
    _devices: dict[int, tuple[str, list[str]]] = field(default_factory=dict)
    """Node and GPU ids of each bundle that was asked for them."""

    def create(self, bundles: Bundles) -> None:
        """Request the bundles in place of those requested before; until they are ready, Ray tries to place them."""
        import ray

        self.remove()
        self.handle = ray.util.placement_group(list(bundles.resources), strategy=bundles.strategy)
        self._reserved = self.handle.ready()
        self.bundles = bundles

    def is_ready(self, timeout_s: float) -> bool:
        """Whether all bundles have been reserved, waiting up to `timeout_s`."""
        import ray

        # `PlacementGroup.wait` counts whole seconds: with a fraction it returns at once.
        return bool(ray.wait([self._reserved], timeout=timeout_s)[0])

    @property
    def on_several_nodes(self) -> bool:
        """Whether a lost bundle can move to another node."""
        return self.handle is not None and len(alive_nodes()) > 1

    def get(self, call: Any, phase: Phase) -> Any:
        """`ray.get` for an actor call. Raises TrainingError (`no_resources`) when the actor's node stays lost, Stalled
        when the call does not return within the time-out of `phase`."""
        self.wait_for_one([call], phase)
        return result_of(call)

    def wait_for_one(self, calls: Sequence[Any], phase: Phase) -> list[Any]:
        """Wait until one of these actor calls or streams is ready; which. Raises as `get` does, and Interrupted."""
        import ray

        watch = self.watch
        watch.begin(phase)
        while not (ready := ray.wait([*calls], num_returns=1, timeout=min(_POLL_S, watch.remaining_s))[0]):
            if self.handle is not None:
                # A call to an actor whose bundle cannot be rescheduled never returns.
                self._await_rescheduling()
            watch.check()
        watch.progressed()
        return list(ready)

    def _await_rescheduling(self) -> None:
        # In slices: the watchdog does not know that a wait is excluded before it ends, and no signal interrupts it.
        left = math.ceil(self.wait_s)
        while True:
            with self.watch.excluded():
                if self.handle.wait(timeout_seconds=min(left, _WAIT_SLICE_S)):
                    return
            self.watch.check_interrupted()
            if (left := left - _WAIT_SLICE_S) <= 0:
                raise TrainingError(
                    f"a node of this run was lost, and no other node had room for its processes within "
                    f"{self.wait_s:.0f} s (placement.wait_s); add workers, then retry",
                    reason="no_resources",
                )

    def back_off(self, restarts: int) -> None:
        """Sleep before the n-th restart of an actor: until Ray notices a lost node (about 30 s) it schedules actors
        there, which die at once."""
        if self.on_several_nodes:
            with self.watch.excluded():
                time.sleep(min(2.0**restarts, _MAX_BACKOFF_S))

    def remove(self) -> None:
        """Remove the placement group; Ray kills its actors."""
        if self.handle is not None:
            import ray

            ray.util.remove_placement_group(self.handle)
            self.handle = self.bundles = None
            self._devices.clear()

    def learner_options(self, rank: int) -> dict[str, Any]:
        """Ray options that place learner rank `rank` in its bundle."""
        return self._bundle_options(self.bundles.learner[rank]) if self.bundles else {}

    def sampler_options(self, index: int) -> dict[str, Any]:
        """Ray options that place engine `index`; the verifier is with the first."""
        return self._bundle_options(self.bundles.engines[index]) if self.bundles else {}

    def _bundle_options(self, bundle: int) -> dict[str, Any]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self.handle, bundle)}

    def learner_device(self, rank: int) -> str:
        """GPU id of a learner rank that shares its bundle with an engine; each rank of a bundle has its own."""
        assert self.bundles is not None
        bundle = self.bundles.learner[rank]
        return self.devices(bundle)[self.bundles.learner[:rank].count(bundle)]

    def devices(self, bundle: int) -> list[str]:
        """GPU ids of a bundle on its node, sorted; call it before an engine that occupies them starts in a new place.

        They are asked for again when the bundle's node has changed. Ray gives the engine the same ids in any order.
        """
        import ray

        self._await_rescheduling()
        node = str(ray.util.placement_group_table(self.handle)["bundles_to_node_id"][bundle])
        if self._devices.get(bundle, ("", []))[0] != node:
            assert self.bundles is not None
            gpus = self.bundles.resources[bundle]["GPU"]
            ask = ray.remote(_visible_devices).options(num_cpus=0, num_gpus=gpus, **self._bundle_options(bundle))
            self._devices[bundle] = (node, sorted(self.get(ask.remote(), "setup")))
        return self._devices[bundle][1]


def _visible_devices() -> list[str]:
    """Ids of the GPUs that Ray has assigned to this task, as CUDA_VISIBLE_DEVICES names them."""
    import ray

    return [str(gpu) for gpu in ray.get_runtime_context().get_accelerator_ids()["GPU"]]


def alive_nodes() -> list[dict[str, float]]:
    """Resources of each node of the cluster, used or not."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def result_of(call: Any) -> Any:
    """`ray.get`, which raises a GxpoError of an actor with its message alone; Ray's own begins with the traceback."""
    import ray

    try:
        return ray.get(call)
    except GxpoError as error:
        cause = getattr(error, "cause", None)
        if not isinstance(cause, GxpoError):
            raise
        raise cause from error


def missing(bundles: Bundles, available: Mapping[str, float], nodes: int) -> str:
    """What the bundles wait for, such as `3 GPUs and 2 CPUs`. available: what is not in use of the cluster's nodes."""
    if bundles.strategy == "STRICT_SPREAD" and nodes < len(bundles.resources):
        return "a second node"  # nothing that others release takes its place
    if short := shortage(bundles, available):
        return describe(short)
    # The sum fits, but no node has room for one of the bundles, which are never divided among nodes.
    return f"a node with {describe(max(bundles.resources, key=_size))}"


def unplaced(bundles: Bundles, nodes: Sequence[Mapping[str, float]], waited_s: float) -> ConfigError:
    """The error (`no_resources`) of bundles that Ray could not reserve. nodes: resources of the cluster's nodes."""
    largest = describe(max(bundles.resources, key=_size))
    where, pack = "", ""
    if bundles.strategy == "STRICT_SPREAD":
        where, pack = " on separate nodes", ', set placement.strategy = "pack"'
    return ConfigError(
        f"placement requires {_counted(bundles.resources)}{where}, which Ray could not reserve within {waited_s:.0f} "
        f"s; its nodes have {_counted(nodes) or 'nothing'}: lower the placement settings{pack}, add nodes with at "
        f"least {largest}, or raise placement.wait_s",
        reason="no_resources",
    )


def _counted(resources: Iterable[Mapping[str, float]]) -> str:
    """Equal nodes or bundles once, with their number."""
    numbers = Counter(map(describe, resources))
    return "; ".join(text if count == 1 else f"{count} × ({text})" for text, count in numbers.items())
