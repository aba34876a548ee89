"""`gxpo demo` in a process of its own, as it is but for Ray and its trainers, which are stand-ins.

usage: stand_in_demo.py FOLDER PASSES TASK
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

from gxpo_services.local.demo import demo
from gxpo_services.local.ray_head import RayHead
from gxpo_services.local.supervisor import Child
from gxpo_services.local.up import Stack

SCHEDULER = Path(__file__).with_name("chaos_scheduler.py")
QUICK = {"GXPO_QUOTA_CPUS": "1000", "GXPO_QUOTA_GPUS": "0", "GXPO_TICK_S": "0.2"}


class StandInStack(Stack):
    """Jobs are processes of this machine."""

    def ray_head(self) -> RayHead | None:
        return None

    def scheduler(self, env: dict[str, str]) -> Child:
        return Child("scheduler", [sys.executable, str(SCHEDULER)], lambda: True, env | QUICK)


if __name__ == "__main__":
    arguments = Namespace(out=Path(sys.argv[1]), passes=int(sys.argv[2]), task=sys.argv[3], no_dashboard=True)
    sys.exit(demo(arguments, stack_of=StandInStack))
