"""Surrogates and corrections by hand, and corrections of stale samples by enumeration of a toy vocabulary."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from gxpo_trainer.algo.losses import TokenOutputs, finish_statistics, policy_loss
from gxpo_trainer.algo.packing import MicroBatch
from gxpo_trainer.config import LossConfig

VOCABULARY, LENGTH = 3, 2
LOW, HIGH = 0.6, 1.4
UNCLIPPED = {"clip_low": 1.0, "clip_high": 1e9}


def micro_batch(
    advantages: list[float], weights: list[float], sampler: list[float], sequences: list[int]
) -> MicroBatch:
    n = len(advantages)
    return MicroBatch(
        input_ids=torch.zeros(1, n + 1, dtype=torch.int64),
        position_ids=torch.arange(n + 1)[None],
        attention_mask=None,
        target_index=torch.arange(n),
        target_ids=torch.zeros(n, dtype=torch.int64),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        token_weights=torch.tensor(weights, dtype=torch.float64),
        sampler_logprobs=torch.tensor(sampler, dtype=torch.float64),
        sequence_index=torch.tensor(sequences),
    )


def logs(*ratios: float) -> Tensor:
    return torch.tensor([math.log(r) for r in ratios], dtype=torch.float64)


def test_gspo_clips_the_geometric_mean_of_a_response_by_hand() -> None:
    # Response 7: ρ = 4, 1 → s = 2, A = 1: clipped at 1.2. Response 3: ρ = 1/4, 1, 1/2 → s = 1/2, A = −1: clipped at
    # 0.8. Response 9: ρ = 1.21, 1 → s = 1.1, A = 1.
    ratios = logs(4, 1, 0.25, 1, 0.5, 1.21, 1).requires_grad_()
    micro = micro_batch([1, 1, -1, -1, -1, 1, 1], [0.1] * 7, [0.0] * 7, [7, 7, 3, 3, 3, 9, 9])
    settings = LossConfig(surrogate="gspo")
    old = torch.zeros(7, dtype=torch.float64)
    loss, sums = policy_loss(TokenOutputs(ratios, None), micro, old, None, settings)
    assert loss.item() == pytest.approx(0.1 * (2 * -1.2 + 3 * 0.8 + 2 * -1.1), abs=1e-14)
    loss.backward()
    assert ratios.grad is not None
    # d(−w·2·s)/d log ρ_t = −w·2·s/2 for each token of the response that is not clipped.
    assert ratios.grad.tolist() == pytest.approx([0, 0, 0, 0, 0, -0.11, -0.11], abs=1e-14)
    assert finish_statistics(sums)["clip_fraction"] == pytest.approx(5 / 7)


def test_cispo_weighs_the_gradient_of_every_token_by_its_clipped_ratio_by_hand() -> None:
    logprobs = logs(0.5, 0.5, 0.5).requires_grad_()
    old = logprobs.detach() - logs(3.0, 1.1, 0.5)
    micro = micro_batch([1, -1, 1], [0.2, 0.3, 0.5], [0.0] * 3, [0, 1, 2])
    loss, _ = policy_loss(TokenOutputs(logprobs, None), micro, old, None, LossConfig(surrogate="cispo"))
    # ρ = 3, 1.1, 0.5 clipped to 1.2, 1.1, 0.8.
    expected = [-0.2 * 1.2, 0.3 * 1.1, -0.5 * 0.8]
    assert loss.item() == pytest.approx(sum(expected) * math.log(0.5), abs=1e-14)
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(expected, abs=1e-14)


def test_the_ratio_to_the_sampler_is_bounded_where_the_clip_does_not_bound_it() -> None:
    """A < 0 with a large ratio: the clipped surrogate lets it pass, the truncated weight does not."""
    logprobs = logs(5.0, 1.1).requires_grad_()
    micro = micro_batch([-1, 1], [1, 1], [0.0, 0.0], [0, 1])
    settings = LossConfig(proximal="sampler", correction="token_truncate", importance_high=2.0)
    loss, sums = policy_loss(TokenOutputs(logprobs, None), micro, None, None, settings)
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([2.0, -1.1], abs=1e-14)
    metrics = finish_statistics(sums)
    assert metrics["importance_mean"] == pytest.approx(3.05)
    assert metrics["importance_max"] == pytest.approx(5.0)
    assert metrics["importance_effective_sample_fraction"] == pytest.approx(3.1**2 / (2 * (4 + 1.21)))


def test_masked_tokens_leave_the_effective_sample() -> None:
    micro = micro_batch([1] * 4, [1] * 3 + [0], [0.0] * 4, [0, 0, 1, 2])
    settings = LossConfig(proximal="sampler", correction="token_mask", importance_low=0.5, importance_high=2.0)
    # 0.4 is masked; the last token is in no sequence of the loss.
    _, sums = policy_loss(TokenOutputs(logs(1, 0.4, 1, 100), None), micro, None, None, settings)
    metrics = finish_statistics(sums)
    assert metrics["importance_max"] == pytest.approx(1.0)
    assert metrics["importance_effective_sample_fraction"] == pytest.approx(2**2 / (3 * 2))


def test_the_mask_of_a_response_uses_its_whole_weight_by_hand() -> None:
    # U = 0.75·0.75 = 0.5625 < 0.6 masks both tokens; 2·0.5 = 1 keeps both, with weight 1 and not their own.
    logprobs = logs(0.75, 0.75, 2, 0.5).requires_grad_()
    micro = micro_batch([1] * 4, [1] * 4, [0.0] * 4, [4, 4, 5, 5])
    settings = LossConfig(
        **UNCLIPPED, proximal="sampler", correction="sequence_mask", importance_low=LOW, importance_high=HIGH
    )
    policy_loss(TokenOutputs(logprobs, None), micro, None, None, settings)[0].backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0, 0, -1, -1], abs=1e-14)


class Toy:
    """Two policies over all responses of two tokens from a vocabulary of three, given by tables of probabilities.

    A table has a row for the first token and one for the second after each first token.
    """

    def __init__(self, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self.logits = torch.tensor(draw.normal(size=(1 + VOCABULARY, VOCABULARY)), requires_grad=True)
        self.target = torch.softmax(self.logits.detach(), dim=1).numpy()
        moved = self.logits.detach() + torch.tensor(draw.normal(scale=0.6, size=self.logits.shape))
        self.behaviour = torch.softmax(moved, dim=1).numpy()
        self.responses = list(itertools.product(range(VOCABULARY), repeat=LENGTH))
        self.advantages = draw.normal(size=len(self.responses))

    @staticmethod
    def rows(response: tuple[int, ...]) -> list[tuple[int, int]]:
        """Row and column of the table for each token."""
        first, second = response
        return [(0, first), (1 + first, second)]

    def expectation(self, weights: str, *, under: np.ndarray) -> np.ndarray:
        """Σ_y under(y) Σ_t v_t(y) A(y) ∇log π(y_t), by the definition of v_t, with respect to the logits."""
        total = np.zeros_like(self.target)
        for response, advantage in zip(self.responses, self.advantages, strict=True):
            rows = self.rows(response)
            tokens = [self.target[row] / self.behaviour[row] for row in rows]
            whole = math.prod(tokens)
            probability = math.prod(under[row] for row in rows)
            for (row, column), token in zip(rows, tokens, strict=True):
                value = {
                    "one": 1.0,
                    "none": token,
                    "token_truncate": min(token, HIGH),
                    "token_mask": token if LOW <= token <= HIGH else 0.0,
                    "sequence_mask": whole if LOW <= whole <= HIGH else 0.0,
                }[weights]
                gradient = -self.target[row]
                gradient[column] += 1.0
                total[row] += probability * value * advantage * gradient
        return total

    def measured(self, settings: LossConfig) -> np.ndarray:
        """The same from `policy_loss`: every response once, weighted by its probability under the behaviour policy."""
        rows = [row for response in self.responses for row in self.rows(response)]
        behaviour = [self.behaviour[row] for row in rows]
        probabilities = [math.prod(self.behaviour[row] for row in self.rows(r)) for r in self.responses]
        micro = micro_batch(
            np.repeat(self.advantages, LENGTH).tolist(),
            np.repeat(probabilities, LENGTH).tolist(),
            np.log(behaviour).tolist(),
            np.repeat(np.arange(len(self.responses)), LENGTH).tolist(),
        )
        table = torch.log_softmax(self.logits, dim=1)
        logprobs = torch.stack([table[row] for row in rows])
        self.logits.grad = None
        policy_loss(TokenOutputs(logprobs, None), micro, None, None, settings)[0].backward()
        assert self.logits.grad is not None
        return -self.logits.grad.numpy()


@pytest.mark.parametrize("proximal", ["learner", "sampler"])
@pytest.mark.parametrize("correction", ["none", "token_truncate", "token_mask", "sequence_mask"])
def test_expectation_of_each_correction_equals_its_formula(proximal: str, correction: str) -> None:
    toy = Toy(seed=3)
    settings = LossConfig(
        **UNCLIPPED, proximal=proximal, correction=correction, importance_low=LOW, importance_high=HIGH
    )
    weights = "one" if (proximal, correction) == ("learner", "none") else correction
    assert toy.measured(settings) == pytest.approx(toy.expectation(weights, under=toy.behaviour), abs=1e-14)


def test_each_correction_differs_from_the_others_on_the_toy_policies() -> None:
    toy = Toy(seed=3)
    names = ("one", "none", "token_truncate", "token_mask", "sequence_mask")
    found = [toy.expectation(name, under=toy.behaviour) for name in names]
    assert all(np.abs(a - b).max() > 1e-3 for a, b in itertools.combinations(found, 2))


@pytest.mark.parametrize("proximal", ["learner", "sampler"])
def test_whole_unbounded_weights_give_the_on_policy_gradient(proximal: str) -> None:
    toy = Toy(seed=4)
    settings = LossConfig(
        **UNCLIPPED, proximal=proximal, correction="sequence_mask", importance_low=0.0, importance_high=1e9
    )
    assert toy.measured(settings) == pytest.approx(toy.expectation("one", under=toy.target), abs=1e-14)


@pytest.mark.parametrize("proximal", ["learner", "sampler"])
@pytest.mark.parametrize("correction", ["none", "token_truncate", "token_mask", "sequence_mask"])
@pytest.mark.parametrize("surrogate", ["ppo", "gspo"])
def test_samples_of_the_target_policy_need_no_correction(surrogate: str, proximal: str, correction: str) -> None:
    """A frozen learner: whatever the version that sampled, the gradient is the on-policy one."""
    toy = Toy(seed=5)
    toy.behaviour = toy.target
    settings = LossConfig(surrogate=surrogate, proximal=proximal, correction=correction)
    assert toy.measured(settings) == pytest.approx(toy.expectation("one", under=toy.target), abs=1e-14)


def test_automatic_values_follow_the_depth() -> None:
    strict, ahead = LossConfig().resolved(0), LossConfig().resolved(2)
    assert (strict.proximal, strict.correction) == ("learner", "none")
    assert (ahead.proximal, ahead.correction) == ("learner", "token_truncate")
    chosen = LossConfig(proximal="sampler", correction="none").resolved(1)
    assert (chosen.proximal, chosen.correction) == ("sampler", "none")
