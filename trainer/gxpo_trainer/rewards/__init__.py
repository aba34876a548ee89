"""Reward components. Pure, except for `http`, which asks a server.

A reward component is a class without constructor arguments, created once per worker process and called for each
response:

    from gxpo_trainer.rewards import RewardInput

    class Brevity:
        def __call__(self, sample: RewardInput) -> float:
            return 1.0 if sample.num_tokens <= 200 else 0.0

The run file refers to it as `package.module:Class`. It runs only if the machine's administrator has listed it in the
environment variable GXPO_REWARD_ALLOWLIST; see docs/evaluation.md.
"""

from gxpo_trainer.rewards.base import Reward, RewardInput

__all__ = ["Reward", "RewardInput"]
