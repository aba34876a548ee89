"""A Ray of two nodes on this machine, and a run whose learner and sampler sit on different ones.

usage: two_nodes.py OUT STEPS
"""

from __future__ import annotations

import sys
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from gxpo_trainer.config import RunConfig
from gxpo_trainer.train import train_run

CONFIG = {
    "name": "two nodes",
    "model": {"max_length": 192},
    "data": {"num_problems": 64},
    "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 40, "max_num_seqs": 32},
    "evaluation": {"every_steps": 0, "samples_per_prompt": 1, "num_problems": 4, "at_start": False},
    "learner": {"rule": {"name": "gxpo"}},
    "placement": {"strategy": "split", "learner_threads": 1, "sampler_threads": 1},
}


def main() -> int:
    out, steps = Path(sys.argv[1]), int(sys.argv[2])
    cluster = Cluster()
    # The head has no CPU, as in the compose file: only the driver runs there.
    for cpus in (0, 1, 1):
        cluster.add_node(num_cpus=cpus, object_store_memory=100 * 1024 * 1024)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    try:
        train_run(RunConfig.model_validate({**CONFIG, "budget": {"steps": steps}}), out)
    finally:
        ray.shutdown()
        cluster.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
