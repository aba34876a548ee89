"""One rank that watches its memory while it loads a policy: `python load_memory_worker.py JOB.json RANK`.

Every rank writes private bytes of each case of the job, above those before, to `<job>.<rank>.out`: `peak` while the
policy is loaded, `held` then.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import threading
from pathlib import Path

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


def measure(path: str, zero_stage: int) -> dict[str, int]:
    from gxpo_trainer.learner.setup import load_partitioned

    config = RunConfig.model_validate({"model": {"path": path}, "learner": {"zero_stage": zero_stage}})
    before, peak = settle(), Peak()
    model = load_partitioned(config, "sdpa", torch.device("cpu"))
    measured = {"peak": peak.take() - before}
    peak.close()
    measured["held"] = settle() - before
    del model
    return measured


def main() -> None:
    from gxpo_trainer.learner.setup import join_process_group

    path, rank = Path(sys.argv[1]), int(sys.argv[2])
    job = json.loads(path.read_text())
    torch.set_num_threads(1)
    join_process_group(
        rank=rank, world_size=job["world_size"], master_address="127.0.0.1", master_port=job["port"], device="cpu"
    )
    # The first model of each kind brings imports along.
    for _, stage in job["cases"]:
        measure("starter", stage)
    measured = [measure(folder, stage) for folder, stage in job["cases"]]
    path.with_suffix(f".{rank}.out").write_text(json.dumps(measured))


if __name__ == "__main__":
    main()
