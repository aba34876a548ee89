"""The components that ship."""

from __future__ import annotations

from gxpo_trainer.rewards.base import Reward, RewardInput
from gxpo_trainer.verify.extract import count_boxes


class Correctness:
    """1 when the final answer is the gold, else 0."""

    def __call__(self, sample: RewardInput) -> float:
        return 1.0 if sample.status == "correct" else 0.0


class Format:
    """1 when the answer stands in exactly one box and the response came to its end, else 0.

    Boxes inside a thinking part are not counted.
    """

    def __call__(self, sample: RewardInput) -> float:
        return 1.0 if not sample.truncated and count_boxes(sample.response) == 1 else 0.0


OWN: dict[str, type[Reward]] = {"correctness": Correctness, "format": Format}
