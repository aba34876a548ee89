"""One learner rank that watches its memory while it loads: `python load_memory_worker.py JOB.json RANK`.

For each case of the job a learner is built and closed. Every rank writes private bytes, above those before, to
`<job>.<rank>.out`: `load`, the peak while the policy is loaded; `start`, the peak until the learner is ready; `held`.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from gxpo_trainer.config import RunConfig


def resident() -> tuple[int, int]:
    """Private and file-backed resident bytes of this process."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    anonymous, mapped = (int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile"))
    return anonymous, mapped


class Peak:
    """The most private memory since the last `take`, sampled by a thread."""

    def __init__(self) -> None:
        self._most, self._done = 0, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._done.wait(0.0005):
            self._most = max(self._most, resident()[0])

    def take(self) -> int:
        most, self._most = max(self._most, resident()[0]), 0
        return most

    def close(self) -> None:
        self._done.set()
        self._thread.join()


def settle() -> int:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return resident()[0]


def measure(settings: dict[str, Any], job: dict[str, Any], rank: int) -> dict[str, int]:
    from gxpo_trainer.learner import deepspeed_learner

    config = RunConfig.model_validate({"model": {"path": settings.pop("path")}, "learner": settings})
    before, peak, found = settle(), Peak(), {}
    initialize = deepspeed_learner.open_engine

    def watched(*arguments: Any) -> Any:
        found["load"] = peak.take() - before
        return initialize(*arguments)

    deepspeed_learner.open_engine = watched
    try:
        learner = deepspeed_learner.DeepSpeedLearner(
            config, rank=rank, world_size=job["world_size"], master_port=job["port"]
        )
    finally:
        deepspeed_learner.open_engine = initialize
    found["start"] = max(found["load"], peak.take() - before)
    peak.close()
    found["held"] = settle() - before
    learner.close()
    return found


def main() -> None:
    path, rank = Path(sys.argv[1]), int(sys.argv[2])
    job = json.loads(path.read_text())
    torch.set_num_threads(1)
    # The first learner brings imports and process groups along.
    measure({"path": "starter"}, job, rank)
    found = [measure(dict(case), job, rank) for case in job["cases"]]
    path.with_suffix(f".{rank}.out").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
