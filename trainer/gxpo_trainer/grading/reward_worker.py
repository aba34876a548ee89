"""A verifier process that scores reward components too.

`python -m gxpo_trainer.grading.reward_worker MEMORY_MB PARENT REWARDS`, where REWARDS is the JSON
of a list of RewardConfig. The protocol is in `grading/worker.py`.
"""

from __future__ import annotations

import json
import os
import sys

from gxpo_trainer.errors import ConfigError
from gxpo_trainer.grading.rewards import Scorer
from gxpo_trainer.grading.worker import serve

UNUSABLE_REWARDS_EXIT = 2


def main(arguments: list[str]) -> int:
    """Serve answers until the input ends. Exit code 2: the rewards cannot be used; else as `serve`."""
    memory_mb, parent, rewards = int(arguments[0]), int(arguments[1]), json.loads(arguments[2])
    try:
        scorer = Scorer.load(rewards, os.environ)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return UNUSABLE_REWARDS_EXIT
    return serve(memory_mb, parent, scorer.score)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
