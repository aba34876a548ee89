"""A run's reservation on a running Ray, with a small actor in place of its processes.

usage: waiting_worker.py SETTINGS

SETTINGS: those of a run as JSON, with placement.ray_address. Prints what it waits for, one line a change, then `ready`
once its actor runs. When a line comes in it removes the reservation and ends.
"""

from __future__ import annotations

import json
import sys

import ray

from gxpo_trainer.config import RunConfig
from gxpo_trainer.runtime.placement import Placement
from gxpo_trainer.runtime.ray_session import connect_ray, reserve


class Process:
    def answer(self) -> str:
        return "ready"


def main() -> None:
    reported = ""

    def on_wait(missing: str) -> None:
        nonlocal reported
        if missing != reported:
            reported = missing
            print(f"waiting for {missing}", flush=True)

    placement = Placement.decide(RunConfig.model_validate(json.loads(sys.argv[1])))
    connect_ray(placement)
    placement = reserve(placement, owned=True, on_wait=on_wait)
    actor = ray.remote(Process).options(**placement.sampler_options(0)).remote()
    print(placement.group.get(actor.answer.remote(), "setup"), flush=True)
    sys.stdin.readline()
    placement.group.remove()
    ray.shutdown()


if __name__ == "__main__":
    main()
