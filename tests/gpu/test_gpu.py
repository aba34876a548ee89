"""What only a CUDA device can show: the compiled extrapolation, and the learner in bf16."""

from __future__ import annotations

import pytest
import torch
from support.toy_learner import ToyLearner, quadratic, relative_error

from gxpo_trainer.config import GateConfig, GxpoRule
from gxpo_trainer.rules.contract import AdamWRecurrence
from gxpo_trainer.rules.gxpo import GXPO
from gxpo_trainer.rules.predictors import Plan, extrapolate_by_ratio, extrapolate_by_replay

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible")]


def shards(device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(100_003, generator=generator).to(device) for _ in range(4)]


@pytest.mark.parametrize("k", [2, 3, 5, 10])
def test_the_compiled_pass_equals_the_plain_one(k: int) -> None:
    plan = Plan.of(GxpoRule(k=k), 1e-8, trial=False)
    theta, *others = shards("cpu")
    expected = theta.clone()
    sums = extrapolate_by_ratio(plan, expected, *others)
    live = theta.cuda()
    compiled = torch.compile(extrapolate_by_ratio, dynamic=True)(plan, live, *(t.cuda() for t in others))
    assert torch.allclose(live.cpu(), expected, rtol=1e-5, atol=1e-6)
    assert torch.allclose(compiled.cpu(), sums, rtol=1e-5)


def test_the_compiled_replay_equals_the_plain_one() -> None:
    plan, recurrence = Plan.of(GxpoRule(k=5), 1e-8, trial=False), AdamWRecurrence(1e-3, 0.9, 0.999, 1e-8, 0.01)
    theta, theta0, g0, g1 = shards("cpu")
    moments = [g0.clone(), g1.square()]
    expected = theta.clone()
    extrapolate_by_replay(plan, recurrence, 2, False, 2, expected, theta0, g0, g1, *moments)
    live = theta.cuda()
    on_gpu = [t.cuda() for t in (theta0, g0, g1, *moments)]
    torch.compile(extrapolate_by_replay, dynamic=True)(plan, recurrence, 2, False, 2, live, *on_gpu)
    assert torch.allclose(live.cpu(), expected, rtol=1e-5, atol=1e-6)


def test_a_step_on_the_gpu_equals_the_step_on_the_cpu() -> None:
    start, curvature = torch.randn(1000, dtype=torch.float64), torch.rand(1000, dtype=torch.float64)
    settings = GxpoRule(k=5, gate=GateConfig(mode="never"))
    left = ToyLearner(start, quadratic(curvature), lr=0.5)
    right = ToyLearner(start.cuda(), quadratic(curvature.cuda()), lr=0.5)
    GXPO(settings).step(left)
    GXPO(settings).step(right)
    assert relative_error(right.flat().cpu(), left.flat(), start) < 1e-9
