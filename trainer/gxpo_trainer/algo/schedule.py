"""The learning rate of a training step: one per step, however many optimizer steps the rule takes in it."""

from __future__ import annotations

import math

from gxpo_trainer.config import OptimizerConfig


def learning_rate(settings: OptimizerConfig, step: int, total_steps: int | None) -> float:
    """η at training step `step`, counted from 1. total_steps: needed by the decaying schedules.

    Warm-up is linear up to η at step `warmup_steps`; `linear` and `cosine` then fall to 0 after `total_steps`.
    """
    base = settings.learning_rate
    if step <= settings.warmup_steps:
        return base * step / settings.warmup_steps
    if settings.schedule == "constant":
        return base
    if total_steps is None:
        raise ValueError(f'learner.optimizer.schedule = "{settings.schedule}" needs budget.steps')
    done = min(1.0, (step - 1 - settings.warmup_steps) / max(1, total_steps - settings.warmup_steps))
    return base * (1 - done) if settings.schedule == "linear" else base * (1 + math.cos(math.pi * done)) / 2
