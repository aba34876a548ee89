"""A Ray of two nodes and a head without CPUs on this machine, and what is done there.

usage: two_nodes.py OUT

First a run into OUT whose learner and sampler are on different nodes; then what a dead learner has published is
fetched, and the error is printed.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster

from gxpo_trainer.config import RunConfig
from gxpo_trainer.errors import WeightsUnavailable
from gxpo_trainer.training.run import train_run
from gxpo_trainer.weights.buckets import BucketPacker
from gxpo_trainer.weights.transports import ObjectStorePublisher, fetch

CONFIG = {
    "name": "two nodes",
    "model": {"max_length": 192},
    "data": {"num_problems": 64},
    "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 40, "max_num_seqs": 32},
    "evaluation": {"every_steps": 0, "samples_per_prompt": 1, "num_problems": 4, "at_start": False},
    "learner": {"rule": {"name": "gxpo"}},
    "budget": {"steps": 2},
    "placement": {"strategy": "split", "learner_threads": 1, "sampler_threads": 1},
}


class Learner:
    """What a learner's process does for a publication, and no more."""

    def publish(self):
        self.publisher = ObjectStorePublisher()
        return self.publisher.publish(BucketPacker(iter([("a", torch.ones(200_000))])), 1, 0)


def gone() -> None:
    # It needs a CPU, which the node of this process has not.
    learner = ray.remote(Learner).options(num_cpus=1).remote()
    bucket = ray.get(learner.publish.remote())
    ray.kill(learner)
    with suppress(ray.exceptions.RayActorError):
        ray.get(learner.publish.remote())
    try:
        fetch(bucket)
    except WeightsUnavailable as error:
        print(error)


OBJECT_STORE_BYTES = 100 * 1024 * 1024


def start_cluster(*nodes: dict[str, Any]) -> tuple[Cluster, list[Any]]:
    """A cluster of these nodes. Ray gives one 30 s to come up, which a busy machine can miss: try again."""
    for left in (2, 1, 0):
        cluster = Cluster()
        try:
            return cluster, [cluster.add_node(**node, object_store_memory=OBJECT_STORE_BYTES) for node in nodes]
        except Exception:
            cluster.shutdown()
            if not left:
                raise
    raise AssertionError


def main() -> None:
    cluster, _ = start_cluster(*({"num_cpus": cpus} for cpus in (0, 1, 1)))
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    try:
        train_run(RunConfig.model_validate(CONFIG), Path(sys.argv[1]))
        gone()
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
