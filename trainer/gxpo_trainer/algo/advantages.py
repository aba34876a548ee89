"""Group-relative advantages: A = (R − mean(R_group)) / (std(R_group) + ε).

GRPO as in DeepSeekMath (arXiv 2402.03300, eq. 4). Without the division it is Dr. GRPO's advantage (arXiv
2503.20783), which does not favour groups that are nearly all correct or nearly all wrong. The standard deviation is
the sample one (n − 1), as in common implementations.

A reward of None (the verifier timed out or failed) is no evidence about the policy: such a sample is excluded from the
mean and the spread of its group and gets no advantage. Pure numpy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gxpo_trainer.types import Metrics

Rewards = Sequence[float | None]
FloatArray = npt.NDArray[np.float64]


def rewards_array(rewards: Rewards) -> FloatArray:
    """Rewards as float64[n], NaN where there is no evidence.

    Raises ValueError for a reward that is NaN or infinite, which means a broken verifier.
    """
    values = np.array([np.nan if reward is None else reward for reward in rewards], dtype=np.float64)
    known = np.array([reward is not None for reward in rewards], dtype=bool)
    if not np.isfinite(values[known]).all():
        raise ValueError(f"a reward is not finite: {list(rewards)}; return None where there is no evidence")
    return values


def zero_variance(rewards: Rewards) -> bool:
    """True when the group carries no signal: no two samples with evidence differ in reward.

    Groups with fewer than two samples with evidence are included: nothing can be compared in them.
    """
    values = [reward for reward in rewards if reward is not None]
    return all(value == values[0] for value in values)


def group_advantages(rewards: Rewards, *, use_std: bool = True, epsilon: float = 1e-6) -> FloatArray:
    """Advantages of one group, float64[n]; NaN where the reward is None.

    A group of equal rewards gets exactly 0 everywhere (rounding of its mean must not become a signal when the
    spread, and with it the divisor, is nearly 0).
    """
    values = rewards_array(rewards)
    evidence = ~np.isnan(values)
    advantages = np.where(evidence, 0.0, np.nan)
    if zero_variance(rewards):
        return advantages
    centred = values[evidence] - values[evidence].mean()
    if use_std:
        centred = centred / (values[evidence].std(ddof=1) + epsilon)
    advantages[evidence] = centred
    return advantages


def reward_metrics(groups: Sequence[Rewards]) -> Metrics:
    """`reward/mean`, `reward/std` (n − 1) over all samples with evidence; `reward/zero_variance_fraction` over groups.

    Groups without any evidence are left out of the fraction. A value without data is left out.
    """
    metrics: Metrics = {}
    values = np.array([reward for rewards in groups for reward in rewards if reward is not None], dtype=np.float64)
    with_evidence = [rewards for rewards in groups if any(reward is not None for reward in rewards)]
    if values.size:
        metrics["reward/mean"] = float(values.mean())
        metrics["reward/zero_variance_fraction"] = sum(map(zero_variance, with_evidence)) / len(with_evidence)
    if values.size > 1:
        metrics["reward/std"] = float(values.std(ddof=1))
    return metrics


def advantage_metrics(advantages: Sequence[float]) -> Metrics:
    """`policy/advantage_abs_mean` over the sequences that are in the loss; empty when there are none."""
    if not len(advantages):
        return {}
    return {"policy/advantage_abs_mean": float(np.abs(np.asarray(advantages, dtype=np.float64)).mean())}
