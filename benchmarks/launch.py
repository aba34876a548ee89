"""Time from `gxpo train` to its first step, with the placement group and with Ray placing each process by itself."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.measure import median, ratio, save
from benchmarks.rules import first_step_seconds

ROUNDS = 3
WITHOUT_GROUP = (
    "import sys; import gxpo_trainer.runtime.ray_session as session; from gxpo_trainer.cli import main; "
    "session.reserve = lambda placement, **_: placement; sys.exit(main(sys.argv[1:]))"
)


def main() -> None:
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        first_step_seconds(root, 0)  # fills the caches
        for number in range(ROUNDS):
            seconds["with"].append(first_step_seconds(root, 2 * number + 1))
            seconds["without"].append(first_step_seconds(root, 2 * number + 2, "-c", WITHOUT_GROUP))
    figures = [
        median("first step with a placement group", seconds["with"], "s"),
        median("first step without", seconds["without"], "s"),
        ratio("with / without", seconds["with"], seconds["without"]),
    ]
    save("launch", figures, {"rounds": ROUNDS})


if __name__ == "__main__":
    main()
