"""A learner on one process whose loss is given by a gradient function: for rules in float64."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from gxpo_trainer.config import GateConfig, GxpoRule
from gxpo_trainer.rules.contract import AdamWRecurrence, BackwardResult, SGDRecurrence
from gxpo_trainer.rules.gxpo import GXPO


class ToyOptimizerState:
    def __init__(self, optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> None:
        self._optimizer, self._parameters, self._step = optimizer, parameters, 0
        for p in parameters:
            if isinstance(optimizer, torch.optim.AdamW):
                state = {"step": torch.zeros(()), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                optimizer.state[p] = state
            elif optimizer.param_groups[0]["momentum"]:
                optimizer.state[p] = {"momentum_buffer": torch.zeros_like(p)}

    @property
    def step(self) -> int:
        return self._step

    def set_step(self, step: int) -> None:
        self._step = step
        for p in self._parameters:
            if "step" in self._optimizer.state[p]:
                self._optimizer.state[p]["step"].fill_(step)

    def moments(self) -> dict[str, list[Tensor]]:
        names = [n for n in self._optimizer.state[self._parameters[0]] if n != "step"]
        return {n: [self._optimizer.state[p][n] for p in self._parameters] for n in names}


class ToyLearner:
    """`gradient(theta, pass_index)` over a list of flat tensors; torch.optim does the optimizer's steps."""

    def __init__(
        self,
        theta: list[Tensor] | Tensor,
        gradient: Callable[[list[Tensor], int], list[Tensor]],
        optimizer: str = "sgd",
        lr: float = 0.1,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        max_grad_norm: float = float("inf"),
        entropy: Callable[[int], float] | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
    ) -> None:
        shards = [theta] if isinstance(theta, Tensor) else theta
        self.theta = [t.clone() for t in shards]
        self._gradient, self._entropy, self.max_grad_norm = gradient, entropy, max_grad_norm
        if optimizer == "adamw":
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
                self.theta, lr=lr, weight_decay=weight_decay, betas=betas, foreach=False
            )
            self._recurrence: AdamWRecurrence | SGDRecurrence = AdamWRecurrence(lr, *betas, 1e-8, weight_decay)
        else:
            self.optimizer = torch.optim.SGD(self.theta, lr=lr, momentum=momentum, weight_decay=weight_decay)
            self._recurrence = SGDRecurrence(lr, momentum, weight_decay)
        self._state = ToyOptimizerState(self.optimizer, self.theta)
        self.passes = 0
        self.published = 0

    def backward(self) -> BackwardResult:
        gradients = [g.clone() for g in self._gradient(self.theta, self.passes)]
        norm = float(torch.sqrt(sum((g.double() ** 2).sum() for g in gradients)))
        scale = min(1.0, self.max_grad_norm / norm) if norm > 0 else 1.0
        for p, g in zip(self.theta, gradients, strict=True):
            p.grad = g * scale
        statistics = {"entropy": self._entropy(self.passes)} if self._entropy else {}
        self.passes += 1
        return BackwardResult(loss=0.0, grad_norm=norm, statistics=statistics)

    def optimizer_step(self) -> None:
        self.optimizer.step()
        self._state._step += 1

    def parameters(self) -> list[Tensor]:
        return self.theta

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.theta]

    def recurrence(self) -> AdamWRecurrence | SGDRecurrence:
        return self._recurrence

    def publish(self) -> None:
        self.published += 1

    def all_reduce(self, scalars: Tensor) -> Tensor:
        return scalars

    def optimizer_state(self) -> ToyOptimizerState:
        return self._state

    def flat(self) -> Tensor:
        return torch.cat([t.reshape(-1) for t in self.theta])


class RankLearner(ToyLearner):
    """What LearnerRank calls on a learner in addition to the verbs of a rule."""

    index = 0

    def load_batches(self, batches: object) -> None:
        self.index = 0

    def use_batch(self, index: int) -> None:
        self.index = index

    def set_learning_rate(self, learning_rate: float) -> None:
        pass

    def reset_optimizer(self) -> None:
        for moments in self._state.moments().values():
            for moment in moments:
                moment.zero_()
        self._state.set_step(0)

    def logprob_gap(self) -> tuple[float, float]:
        return 0.0, 0.0

    def own_metrics(self) -> dict[str, float]:
        return {}


def on_ranks(size: int, call: Callable[[ToyLearner, int], Any]) -> list[Any]:
    """What the call returns on each of several ranks, given a learner that reduces over them and the rank."""
    together, given = threading.Barrier(size, timeout=60), [torch.empty(0)] * size

    def run(rank: int) -> Any:
        def all_reduce(scalars: Tensor) -> Tensor:
            given[rank] = scalars
            together.wait()
            total = torch.stack(given).sum(0)
            together.wait()  # all have read before the next is given
            return total

        learner = ToyLearner(torch.zeros(1), lambda theta, _: theta)
        learner.all_reduce = all_reduce
        return call(learner, rank)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))


def quadratic(hessian: Tensor, center: Tensor | None = None) -> Callable[[list[Tensor], int], list[Tensor]]:
    """∇ of ½(θ−c)ᵀH(θ−c); a vector stands for a diagonal H."""

    def gradient(theta: list[Tensor], _: int) -> list[Tensor]:
        offset = theta[0] if center is None else theta[0] - center
        return [hessian * offset if hessian.dim() == 1 else hessian @ offset]

    return gradient


def random_problem(seed: int) -> tuple[Tensor, Callable[[list[Tensor], int], list[Tensor]]]:
    """A start and the gradient of a positive quadratic in four dimensions, in float64."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    return torch.randn(4, generator=generator, dtype=torch.float64), quadratic(basis @ basis.T / 4)


def finite_except(at: int) -> Callable[[list[Tensor], int], list[Tensor]]:
    """The gradient θ, which is NaN in pass `at`."""
    return lambda theta, taken: [theta[0] * (float("nan") if taken == at else 1.0)]


def relative_error(actual: Tensor, expected: Tensor, start: Tensor) -> float:
    """‖Δ − Δ_ref‖/‖Δ_ref‖ of parameter changes: a tolerance on parameters would pass a step that does nothing."""
    reference = expected - start
    return float((actual - expected).norm() / reference.norm())


def gxpo(**rule: object) -> GXPO:
    """GXPO with a gate that never fires."""
    return GXPO(GxpoRule.model_validate({"gate": GateConfig(mode="never"), **rule}))
