"""When a look-ahead pays: its speed-up in time as a function of the share of a step that sampling takes. Pure.

A baseline step is 1 = s + u: sampling and verifying s, one update u = 1 − s. A candidate's step samples as much and
updates p times, p its backward passes a step. It reaches the baseline's accuracy in 1/r of the steps:

    synchronous     r (s + u) / (s + p u)
    asynchronous    r max(s, u) / max(s, p u)        sampling runs during the update
"""

from __future__ import annotations

from dataclasses import dataclass

from gxpo_trainer.compare.groups import GroupResult
from gxpo_trainer.compare.intervals import Interval

SHARES = (0.0, 0.25, 0.5, 0.7, 0.8, 0.9, 0.95)
"""Shares that tables show."""


@dataclass(frozen=True, slots=True)
class Payoff:
    """A candidate against a baseline.

    steps: speed-up in steps, with its interval over seeds. passes: backward passes of a candidate's step, in those of
    the baseline's.
    """

    steps: Interval
    passes: float

    def speed_up(self, share: float, *, asynchronous: bool = False) -> Interval:
        """Speed-up in time at a sampling share in [0, 1). Raises ValueError outside."""
        if not 0 <= share < 1:
            raise ValueError(f"sampling share {share} is out of range; set it in [0, 1)")
        update = 1 - share
        if asynchronous:
            factor = max(share, update) / max(share, self.passes * update)
        else:
            factor = 1 / (share + self.passes * update)
        low, high = (None if bound is None else bound * factor for bound in (self.steps.low, self.steps.high))
        return Interval(self.steps.mean * factor, low, high, self.steps.num)

    @property
    def break_even(self) -> Interval:
        """The synchronous sampling share above which the candidate is faster: (p − r)/(p − 1).

        Below 0 it always is, above 1 never. Its bounds are those of r, reversed. Raises ValueError for p = 1, whose
        speed-up does not depend on the share.
        """
        if self.passes == 1:
            raise ValueError("a candidate with the baseline's passes has no break-even share")

        def share(ratio: float | None) -> float | None:
            return None if ratio is None else (self.passes - ratio) / (self.passes - 1)

        mean = share(self.steps.mean)
        assert mean is not None
        return Interval(mean, share(self.steps.high), share(self.steps.low), self.steps.num)


def payoff_of(group: GroupResult, baseline: GroupResult) -> Payoff | None:
    """The payoff of a group; None unless every shared seed reached the baseline's peak."""
    ratio = group.seed_speed_ups["steps"]
    if ratio is None or group.num_reached < group.num_paired or group.name == baseline.name:
        return None
    per_step = [found.final.backward_passes / found.final.steps for found in (group, baseline)]
    return Payoff(ratio, per_step[0] / per_step[1])
