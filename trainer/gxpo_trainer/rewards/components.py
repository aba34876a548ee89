"""Built-in reward components."""

from __future__ import annotations

from gxpo_trainer.rewards.base import Reward, RewardInput
from gxpo_trainer.verify.boxes import count_boxes


class Correctness:
    """1 if the final answer equals the gold answer, else 0."""

    def __call__(self, sample: RewardInput) -> float:
        return 1.0 if sample.status == "correct" else 0.0


class Format:
    """1 if the response is not truncated and has exactly one box, not counting its thinking part; else 0."""

    def __call__(self, sample: RewardInput) -> float:
        return 1.0 if not sample.truncated and count_boxes(sample.response) == 1 else 0.0


class EnvironmentReward:
    """Sum of the environment's rewards, 0 where it gave none."""

    def __call__(self, sample: RewardInput) -> float:
        return sample.environment_reward or 0.0


OWN: dict[str, type[Reward]] = {"correctness": Correctness, "format": Format, "environment": EnvironmentReward}
