"""`python -m benchmarks [NAME ...]`: run all benchmarks, or those named; each prints and saves JSON."""

from __future__ import annotations

import importlib
import sys

ALL = (
    "step_time",
    "rules",
    "tools_demo",
    "predictors",
    "rollout_pool",
    "async_rollouts",
    "driver_load",
    "grader",
    "service",
    "service_load",
    "dashboard",
    "gpu",
)


def main() -> int:
    wanted = sys.argv[1:] or list(ALL)
    unknown = [name for name in wanted if name not in ALL]
    if unknown:
        print(f"unknown benchmark {', '.join(unknown)}; choose from {', '.join(ALL)}", file=sys.stderr)
        return 2
    for name in wanted:
        try:
            importlib.import_module(f"benchmarks.{name}").main()
        except SystemExit as missing:
            print(f"{name}: {missing}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
