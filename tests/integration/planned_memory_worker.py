"""One learner rank that counts the bytes of its tensors: `python planned_memory_worker.py JOB.json RANK`.

For each case of the job a learner takes one step of its rule; rank 0 writes the bytes of all distinct storages that are
then alive to `<job>.out`.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gxpo_trainer.algo.batch import ScoredSequence, StepBatch, shard, with_scale
from gxpo_trainer.config import RunConfig


def batch() -> StepBatch:
    """Eight short sequences."""
    rng = np.random.default_rng(0)

    def ids(count: int) -> Any:
        return rng.integers(5, 500, count).astype(np.int32)

    sequences = [ScoredSequence(ids(6), ids(4), float(rng.normal()), np.zeros(4, np.float32)) for _ in range(8)]
    return with_scale(sequences, 16)


def alive() -> dict[int, torch.Tensor]:
    """Every tensor that Python can reach, and its gradient, by storage."""
    found: dict[int, torch.Tensor] = {}
    for item in gc.get_objects():
        if type(item) in (torch.Tensor, torch.nn.Parameter):
            for tensor in (item, item.grad if item.is_leaf else None):
                if tensor is not None:
                    found[tensor.untyped_storage().data_ptr()] = tensor
    return found


def main() -> None:
    path, rank = Path(sys.argv[1]), int(sys.argv[2])
    job = json.loads(path.read_text())
    world = job["world_size"]
    torch.set_num_threads(1)
    from gxpo_trainer.learner.deepspeed_learner import DeepSpeedLearner
    from gxpo_trainer.rules.contract import make_rule

    counted = []
    for settings in job["cases"]:
        config = RunConfig.model_validate({"learner": settings, "placement": {"learner_ranks": world}})
        gc.collect()
        before = set(alive())
        learner = DeepSpeedLearner(config, rank=rank, world_size=world, master_port=job["port"])
        learner.load_batches([shard(batch(), world)[rank]])
        rule: Any = make_rule(config.learner.rule)
        rule.step(learner)
        gc.collect()
        counted.append(sum(t.untyped_storage().nbytes() for key, t in alive().items() if key not in before))
        learner.close()
        del learner, rule
    if rank == 0:
        path.with_suffix(".out").write_text(json.dumps(counted))


if __name__ == "__main__":
    main()
