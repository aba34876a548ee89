"""The Ray placement group of a run on several nodes: all bundles are reserved, or none.

Without it Ray places learner and sampler wherever a CPU is free. The reservation outlives its actors: a restarted
actor returns to its bundle, which Ray reschedules when its node dies.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gxpo_trainer.errors import ConfigError, TrainingError

MIN_WAIT_S = 30.0
"""Free bundles are placed in milliseconds; those that another run is releasing take seconds."""
_POLL_S = 5.0
_MAX_BACKOFF_S = 16.0


@dataclass(slots=True)
class RunPlacementGroup:
    """Filled by `reserve`; on a single node `handle` stays None and Ray places the actors.

    Order of the bundles: the learner's (one per rank, or one for all ranks), then that of sampler and verifier.
    """

    handle: Any = None
    num_learner_bundles: int = 0
    wait_s: float = MIN_WAIT_S

    def reserve(self, bundles: Sequence[dict[str, float]], strategy: str, *, deadline: float) -> None:
        """Reserve the bundles; nodes may join until `deadline` (monotonic clock, at least MIN_WAIT_S from now).

        Raises ConfigError (`no_resources`) when they cannot be placed by then.
        """
        import ray

        nodes = [node for node in ray.nodes() if node["Alive"]]
        if strategy == "PACK" and len(nodes) == 1:
            return
        group = ray.util.placement_group(list(bundles), strategy=strategy)
        if not group.wait(timeout_seconds=max(MIN_WAIT_S, deadline - time.monotonic())):
            ray.util.remove_placement_group(group)
            available = "; ".join(_describe(node["Resources"]) for node in ray.nodes() if node["Alive"])
            requested = " and ".join(_describe(bundle) for bundle in bundles)
            how = "on separate nodes" if strategy == "STRICT_SPREAD" else "at the same time"
            raise ConfigError(
                f"placement requires {requested} {how}; Ray's nodes have {available}, partly used by other runs. Lower "
                'the placement settings, add workers, or set placement.strategy = "pack"',
                reason="no_resources",
            )
        self.handle, self.num_learner_bundles = group, len(bundles) - 1

    def get(self, call: Any) -> Any:
        """`ray.get` for an actor call. Raises TrainingError (`no_resources`) when the actor's node stays lost."""
        import ray

        while self.handle is not None and not ray.wait([call], timeout=_POLL_S)[0]:
            # A call to an actor whose bundle cannot be rescheduled never returns.
            if not self.handle.wait(timeout_seconds=self.wait_s):
                raise TrainingError(
                    f"a node of this run was lost, and no other node had room for its processes within "
                    f"{self.wait_s:.0f} s (placement.wait_s); add workers, then retry",
                    reason="no_resources",
                )
        return ray.get(call)

    def back_off(self, restarts: int) -> None:
        """Sleep before the n-th restart of an actor: until Ray notices a lost node (about 30 s) it schedules actors
        there, which die at once."""
        if self.handle is not None:
            time.sleep(min(2.0**restarts, _MAX_BACKOFF_S))

    def remove(self) -> None:
        """Remove the placement group; Ray kills its actors."""
        if self.handle is not None:
            import ray

            ray.util.remove_placement_group(self.handle)
            self.handle = None

    def learner_options(self, rank: int) -> dict[str, Any]:
        """Ray options that place learner rank `rank` in its bundle."""
        return self._bundle_options(min(rank, self.num_learner_bundles - 1))

    def sampler_options(self) -> dict[str, Any]:
        """Ray options that place the sampler or the verifier."""
        return self._bundle_options(self.num_learner_bundles)

    def _bundle_options(self, bundle: int) -> dict[str, Any]:
        if self.handle is None:
            return {}
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self.handle, bundle)}


def _describe(resources: dict[str, float]) -> str:
    cpus, gpus = resources.get("CPU", 0), resources.get("GPU", 0)
    return f"{cpus:g} CPUs" + (f" + {gpus:g} GPUs" if gpus else "")
