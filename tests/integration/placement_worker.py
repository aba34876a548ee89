"""What a run's placement does on a Ray with fake GPUs: small actors in place of engines and learner ranks.

usage: placement_worker.py

Two nodes of two GPUs each, named 0,1 and 4,5; then the second is lost and one with the GPUs 6,7 takes its place.
Prints one JSON object.
"""

from __future__ import annotations

import json
import os
from typing import Any

import ray
from two_nodes import OBJECT_STORE_BYTES, start_cluster

from gxpo_trainer.config import RunConfig
from gxpo_trainer.runtime.placement import Placement
from gxpo_trainer.runtime.ray_session import connect_ray, reserve

SETTINGS = {
    "device": "gpu",
    "learner_ranks": 4,
    "samplers": 2,
    "tensor_parallel": 2,
    "learner_cpus": 0.25,
    "sampler_cpus": 0.25,
    "verifier_cpus": 0.25,
}


class Process:
    """Reports where it is."""

    def where(self) -> tuple[str, str]:
        return ray.get_runtime_context().get_node_id(), os.environ.get("CUDA_VISIBLE_DEVICES", "unset")


def start(options: dict[str, Any]) -> Any:
    return ray.remote(Process).options(**options).remote()


def devices(placement: Placement, actors: list[Any]) -> list[str]:
    return [placement.group.get(actor.where.remote(), "setup")[1] for actor in actors]


def two_gpus(devices: str) -> dict[str, Any]:
    return {"num_cpus": 2, "num_gpus": 2, "env_vars": {"CUDA_VISIBLE_DEVICES": devices}}


def main() -> None:
    cluster, (*_, second) = start_cluster({"num_cpus": 0, "include_dashboard": False}, two_gpus("0,1"), two_gpus("4,5"))
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    placement = Placement.decide(
        RunConfig.model_validate({"placement": SETTINGS | {"ray_address": cluster.address, "wait_s": 300}})
    )
    placed: dict[str, Any] = {}
    connect_ray(placement)
    placement = reserve(placement, owned=False)
    placed["colocated"] = placement.colocated
    engines = [start(placement.sampler_options(index)) for index in range(2)]
    ranks = [start(placement.learner_options(rank)) for rank in range(4)]
    placed["engines"], placed["ranks"] = devices(placement, engines), devices(placement, ranks)
    # A restarted rank, while the engine occupies the GPUs.
    ray.kill(ranks[3])
    placed["restarted"] = devices(placement, [start(placement.learner_options(3))])
    # A lost node: its bundle moves to another with other GPUs.
    cluster.remove_node(second)
    cluster.add_node(**two_gpus("6,7"), object_store_memory=OBJECT_STORE_BYTES)
    moved = next(index for index, gpus in enumerate(placed["engines"]) if "4" in gpus)
    engine = start(placement.sampler_options(moved))
    rank = start(placement.learner_options(2 * moved))
    placed["moved_engine"], placed["moved_rank"] = devices(placement, [engine, rank])
    placement.group.remove()
    print(json.dumps(placed))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
