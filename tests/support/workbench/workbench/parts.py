"""Implementations of the settings classes, and classes without settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gxpo_trainer.config import LossSettings
from gxpo_trainer.environments import Observation, Problem, Turn
from gxpo_trainer.grading.rewards import RewardInput
from workbench.settings import BrevityReward, EchoEnvironment, FromBestAdvantage, LinearLoss, LinesLogger, RepeatedRule


class Repeated:
    def __init__(self, settings: RepeatedRule) -> None:
        self.name, self.settings = settings.name, settings

    def step(self, learner: Any, *, last: bool = True) -> Any:
        from gxpo_trainer.rules.contract import finish_plain_step
        from gxpo_trainer.types import StepReport

        reports = [finish_plain_step(learner, learner.backward()) for _ in range(self.settings.repeats)]
        return StepReport(reports[-1].metrics, backward_passes=len(reports))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert not state


class Linear:
    def __init__(self, settings: LinearLoss) -> None:
        self.scale = settings.scale

    def __call__(self, log_ratio: Any, logprobs: Any, micro: Any) -> tuple[Any, Any]:
        ratio = log_ratio.exp()
        return ratio, -self.scale * ratio * micro.advantages


class FromBest:
    def __init__(self, settings: FromBestAdvantage, loss: LossSettings) -> None:
        self.offset = settings.offset

    def __call__(self, groups: Sequence[npt.NDArray[np.float64]]) -> list[npt.NDArray[np.float64]]:
        return [rewards - np.nanmax(rewards) + self.offset for rewards in groups]


class Brevity:
    def __init__(self, settings: BrevityReward) -> None:
        self.longest = settings.longest

    def __call__(self, sample: RewardInput) -> float:
        return max(0.0, 1 - sample.num_tokens / self.longest)


class Plain:
    """A reward without settings."""

    def __call__(self, sample: RewardInput) -> float:
        return 0.5


class Echo:
    def __init__(self, settings: EchoEnvironment) -> None:
        self.prefix = settings.prefix

    def reset(self, problem: Problem, seed: int) -> Observation:
        return Observation.of_text(problem.text)

    def step(self, action: str) -> Turn:
        return Turn(observation=self.prefix + action)


class Lines:
    name = "lines"

    def __init__(self, settings: LinesLogger, out_dir: Path, *, run_name: str, config: Mapping[str, Any]) -> None:
        self.every = settings.every
        self.file = (out_dir / "lines.txt").open("w", encoding="utf-8")
        print(run_name, config["seed"], file=self.file)

    def write(self, row: Mapping[str, Any]) -> None:
        if row["step"] % self.every == 0:
            print(row["step"], sorted(row["metrics"]), file=self.file)

    def close(self) -> None:
        self.file.close()
