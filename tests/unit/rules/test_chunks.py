"""No reduction over a shard works on more than a chunk of it at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.toy_learner import ToyLearner
from torch.utils._python_dispatch import TorchDispatchMode

from gxpo_trainer.config import GrpoRule, GxpoRule, SfpoRule
from gxpo_trainer.rules import contract
from gxpo_trainer.rules.contract import make_rule
from gxpo_trainer.rules.diagnostics import ratio_noise, take_trajectory

SIZE, CHUNK = 10_000, 1_000
VIEWS = {"detach", "slice", "split", "view", "alias", "_unsafe_view", "as_strided", "narrow", "select"}
# Whole shards are copied on purpose, and scaled, moved or stepped on in place: nothing is allocated for it.
WHOLE = {"clone", "copy_", "empty_like", "mul_", "add_", "sub_"}


class Sizes(TorchDispatchMode):
    """The largest tensor that each operation reads or makes."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        if name not in VIEWS | WHOLE:
            tensors = [x for x in torch.utils._pytree.tree_leaves((args, out)) if isinstance(x, torch.Tensor)]
            self.largest[name] = max([self.largest.get(name, 0), *(t.numel() for t in tensors)])
        return out


class InPlaceLearner(ToyLearner):
    """Its own gradient and optimizer step are no reductions: they are left out of the count."""

    sizes: Sizes | None = None

    def backward(self) -> Any:
        with torch.utils._python_dispatch._disable_current_modes():
            return super().backward()

    def optimizer_step(self) -> None:
        with torch.utils._python_dispatch._disable_current_modes():
            super().optimizer_step()


def make_learner() -> InPlaceLearner:
    start = torch.linspace(-1, 1, SIZE)
    curvature = torch.linspace(0.1, 0.9, SIZE)
    return InPlaceLearner(start, lambda theta, _: [curvature * theta[0]], optimizer="adamw", lr=1e-3)


def step(settings: Any) -> Callable[[Any], Any]:
    return lambda learner: make_rule(settings).step(learner).metrics


def diagnosed(settings: Any) -> Callable[[Any], Any]:
    def run(learner: Any) -> Any:
        rule: Any = make_rule(settings)
        rule.trajectory = take_trajectory(learner, settings.k)
        return rule.step(learner).metrics

    return run


NEVER = {"mode": "never"}
CASES: dict[str, Callable[[Any], Any]] = {
    **{name: step(GxpoRule(predictor=name, gate=NEVER)) for name in ("gradient", "displacement", "replay")},
    "one probe": step(GxpoRule(predictor="replay", probes=1, gate=NEVER)),
    "sfpo": step(SfpoRule(gate=NEVER)),
    "gxpo, diagnosed": diagnosed(GxpoRule(gate=NEVER)),
    "sfpo, diagnosed": diagnosed(SfpoRule(gate=NEVER)),
    "ratio noise": lambda learner: ratio_noise(learner, make_rule(GxpoRule())),
    "update norm of a plain step": step(GrpoRule()),
    "gradient norm": lambda learner: {"norm": (learner.backward(), contract.norm(learner, learner.gradients()))[1]},
}


@pytest.mark.parametrize("name", CASES)
def test_every_reduction_works_on_chunks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = CASES[name](make_learner())
    monkeypatch.setattr(contract, "CPU_CHUNK", CHUNK)
    monkeypatch.setattr(contract, "DEVICE_CHUNK", CHUNK)
    learner = make_learner()
    with Sizes() as sizes:
        metrics = CASES[name](learner)
    assert sizes.largest
    assert {op: size for op, size in sizes.largest.items() if size > CHUNK} == {}
    assert metrics == pytest.approx(expected, rel=1e-9)  # only the order of summation differs


def test_slices_are_cache_sized_on_a_cpu_and_bounded_on_a_gpu() -> None:
    assert contract.chunk_size(torch.device("cpu")) == 1 << 15
    assert contract.chunk_size(torch.device("cuda", 0)) == 1 << 25


def test_the_norm_of_shards_that_fit_a_chunk_is_that_of_whole_shards_to_the_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    shards = [torch.randn(size, generator=generator) for size in (300_000, 7, 65_536)]
    learner = ToyLearner(shards, lambda theta, _: theta)
    whole = torch.stack([torch.linalg.vector_norm(s, dtype=torch.float64).square() for s in shards]).sum()
    assert contract.norm(learner, shards) == float(whole) ** 0.5
