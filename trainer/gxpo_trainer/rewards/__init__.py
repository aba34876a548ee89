"""What a response is rewarded for, beside and beyond being right. Pure.

A reward component is a class that is built without arguments, once a worker process, and called for each response:

    from gxpo_trainer.rewards import RewardInput

    class Brevity:
        def __call__(self, sample: RewardInput) -> float:
            return 1.0 if sample.num_tokens <= 200 else 0.0

It is named in the run file as `package.module:Class`, and runs only where the machine's administrator has listed it in
the environment variable GXPO_REWARD_ALLOWLIST. How it runs is said in docs/evaluation.md.
"""

from gxpo_trainer.rewards.base import Reward, RewardInput

__all__ = ["Reward", "RewardInput"]
