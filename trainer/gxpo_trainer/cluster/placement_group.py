"""The places of a run on a Ray of several nodes, kept by a placement group: all of them or none.

Left to itself Ray would put learner and sampler wherever a CPU is free. A place outlives what sits there: an actor
that is started anew comes back to its node, or, when that has died, to the one that Ray has found for its bundle.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gxpo_trainer.errors import ConfigError, TrainingError

LEAST_WAIT_S = 30.0
"""Bundles are placed in milliseconds where there is room; what another run is giving back takes seconds."""
_LOOK_S = 5.0
_LONGEST_PAUSE_S = 16.0


@dataclass(slots=True)
class Seats:
    """Filled by `take`; empty on one node, where there is nothing to choose.

    Order of the bundles: the learner's (one a rank, or one of all ranks), then that of sampler and verifier.
    """

    group: Any = None
    num_learner: int = 0
    wait_s: float = LEAST_WAIT_S

    def take(self, bundles: Sequence[dict[str, float]], strategy: str, *, until: float) -> None:
        """Reserve the bundles. until: on the monotonic clock, how long nodes may still join.

        Raises ConfigError (`no_resources`) when they cannot be placed by then.
        """
        import ray

        nodes = [node for node in ray.nodes() if node["Alive"]]
        if strategy == "PACK" and len(nodes) == 1:
            return
        group = ray.util.placement_group(list(bundles), strategy=strategy)
        if not group.wait(timeout_seconds=max(LEAST_WAIT_S, until - time.monotonic())):
            ray.util.remove_placement_group(group)
            there = "; ".join(_describe(node["Resources"]) for node in ray.nodes() if node["Alive"])
            wanted = " and ".join(_describe(bundle) for bundle in bundles)
            how = "on nodes of their own" if strategy == "STRICT_SPREAD" else "at the same time"
            error = ConfigError(
                f"placement wants {wanted} {how}, and Ray's nodes have {there}, in part for other runs; lower the "
                'figures, add workers, or set placement.strategy = "pack"'
            )
            error.reason = "no_resources"
            raise error
        self.group, self.num_learner = group, len(bundles) - 1

    def answer(self, call: Any) -> Any:
        """What an actor answers. Raises what it raises; TrainingError (`no_resources`) when its node stays away."""
        import ray

        while self.group is not None and not ray.wait([call], timeout=_LOOK_S)[0]:
            # An actor whose node is lost waits for ever, unless somebody asks after its place.
            if not self.group.wait(timeout_seconds=self.wait_s):
                raise TrainingError(
                    f"a node of this run is lost and no other had room for its processes within {self.wait_s:.0f} s "
                    "(placement.wait_s); add workers, then retry",
                    reason="no_resources",
                )
        return ray.get(call)

    def pause(self, restarts: int) -> None:
        """Before an actor is started anew, for the n-th time: Ray takes half a minute to notice that a node is gone,
        and until then starts what belongs there, where it dies at once."""
        if self.group is not None:
            time.sleep(min(2.0**restarts, _LONGEST_PAUSE_S))

    def release(self) -> None:
        """Give the places back; whoever still sits there is ended by Ray."""
        if self.group is not None:
            import ray

            ray.util.remove_placement_group(self.group)
            self.group = None

    def learner(self, rank: int) -> dict[str, Any]:
        """Ray options that put learner rank `rank` into its place."""
        return self._place(min(rank, self.num_learner - 1))

    def sampler(self) -> dict[str, Any]:
        """The same for the sampler and the verifier."""
        return self._place(self.num_learner)

    def _place(self, bundle: int) -> dict[str, Any]:
        if self.group is None:
            return {}
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, bundle)}


def _describe(resources: dict[str, float]) -> str:
    cpus, gpus = resources.get("CPU", 0), resources.get("GPU", 0)
    return f"{cpus:g} CPUs" + (f" + {gpus:g} GPUs" if gpus else "")
