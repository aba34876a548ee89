"""Surrogates, corrections and statistics by hand; corrections of stale samples by enumerating a toy vocabulary."""

from __future__ import annotations

import itertools
import math
from typing import Literal

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from torch import Tensor

from gxpo_trainer.algo.losses import TokenOutputs, finish_statistics, k3_divergence, policy_loss
from gxpo_trainer.algo.packing import MicroBatch
from gxpo_trainer.algo.passk import majority_at_n, pass_at_k, proportion_interval
from gxpo_trainer.config import DppoLossConfig, LossConfig, LossSettings


def micro_batch(
    advantages: list[float],
    weights: list[float],
    sampler: list[float] | None = None,
    sequences: list[int] | None = None,
) -> MicroBatch:
    """A loss sees nothing of the ids and their places."""
    n = len(advantages)
    unused = torch.zeros(n, dtype=torch.int64)
    numbers = (torch.tensor(values, dtype=torch.float64) for values in (advantages, weights, sampler or [0.0] * n))
    return MicroBatch(unused, unused, None, unused, unused, *numbers, torch.tensor(sequences or [0] * n))


def logs(*ratios: float) -> Tensor:
    return torch.tensor([math.log(r) for r in ratios], dtype=torch.float64)


def differentiated(
    logprobs: Tensor, micro: MicroBatch, settings: LossSettings, old: Tensor | None = None
) -> tuple[list[float], float, dict[str, Tensor]]:
    """The gradient with respect to the log-probabilities, the loss and its statistics."""
    leaf = logprobs.detach().requires_grad_()
    loss, sums = policy_loss(TokenOutputs(leaf, None), micro, old, None, settings)
    loss.backward()
    assert leaf.grad is not None
    return leaf.grad.tolist(), loss.item(), sums


ZERO4 = torch.zeros(4, dtype=torch.float64)


def test_clipped_surrogate_by_hand_and_which_tokens_count_as_clipped() -> None:
    # ρ = 1.5, 1.5, 0.5, 0.5 with A = 2, −1, ½, −3 and ε = 0.2:
    # −min(3, 2.4) = −2.4; −min(−1.5, −1.2) = 1.5; −min(0.25, 0.4) = −0.25; −min(−1.5, −2.4) = 2.4.
    micro = micro_batch([2, -1, 0.5, -3], [0.1, 0.2, 0.3, 0.4])
    loss, sums = policy_loss(TokenOutputs(logs(1.5, 1.5, 0.5, 0.5), None), micro, ZERO4, None, LossConfig())
    assert loss.item() == pytest.approx(0.1 * -2.4 + 0.2 * 1.5 + 0.3 * -0.25 + 0.4 * 2.4, abs=1e-14)
    metrics = finish_statistics(sums)
    # Clipped where the bound holds the gradient back: first (high) and last (low).
    assert metrics["clip_fraction"] == pytest.approx(0.5)
    assert metrics["clip_high_fraction"] == pytest.approx(0.25)
    assert metrics["clip_low_fraction"] == pytest.approx(0.25)
    assert metrics["ratio_mean"] == pytest.approx(1.0)
    assert metrics["loss"] == pytest.approx(loss.item())
    assert not {"kl", "entropy", "importance_mean"} & metrics.keys()
    # Only beyond the bound and against the advantage. ε = 0.5, so that the bounds 0.5 and 1.5 are exact. In order: at
    # the lower bound, below it with A < 0, with A = 0,
    # with A > 0; at the upper bound, above it with A > 0, with A = 0, with A < 0; and a clipped token of weight 0.
    ratios = torch.tensor([0.5, 0.4, 0.4, 0.4, 1.5, 1.6, 1.6, 1.6, 1.6], dtype=torch.float64)
    micro = micro_batch([-1, -1, 0, 1, 1, 1, 0, -1, 1], [0.125] * 8 + [0.0])
    settings = LossConfig(clip_low=0.5, clip_high=0.5)
    _, sums = policy_loss(TokenOutputs(ratios.log(), None), micro, torch.zeros_like(ratios), None, settings)
    assert torch.equal(ratios.log().exp()[[0, 4]], ratios[[0, 4]]), "the bounds survive log and exp"
    clipped = [sums[f"clip_{name}"] for name in ("fraction", "low_fraction", "high_fraction")]
    assert (sums["tokens"], *clipped) == (8, 2, 1, 1)


def test_kl_by_hand_is_added_with_beta_and_not_scaled_by_the_importance_weight() -> None:
    # q = log π_ref − log π = ln 2 and −ln 2: 2 − ln 2 − 1 and 1/2 + ln 2 − 1.
    kl = k3_divergence(logs(1.0, 2.0), logs(2.0, 1.0))
    assert kl.tolist() == pytest.approx([1 - math.log(2), math.log(2) - 0.5], abs=1e-15)
    micro = micro_batch([1.0], [1.0], sampler=[math.log(0.5)])
    settings = LossConfig(kl_beta=0.1, correction="token_truncate", importance_high=1.5)
    old = logs(1.0)
    loss, sums = policy_loss(TokenOutputs(logs(1.1), None), micro, old, logs(2.2), settings)
    # importance weight min(1/0.5, 1.5) = 1.5; surrogate −1.1; KL with q = ln 2.
    assert loss.item() == pytest.approx(-1.5 * 1.1 + 0.1 * (1 - math.log(2)), abs=1e-14)
    assert finish_statistics(sums)["kl"] == pytest.approx(1 - math.log(2))


def test_entropy_and_gap_are_means_over_tokens_that_count() -> None:
    micro = micro_batch([1, 1, 1], [0.5, 0.5, 0.0], sampler=[-1.0, -2.0, -3.0])
    outputs = TokenOutputs(torch.tensor([-1.5, -2.1, -99.0]), torch.tensor([0.2, 0.4, 50.0]))
    metrics = finish_statistics(policy_loss(outputs, micro, None, None, LossConfig())[1])
    assert metrics["entropy"] == pytest.approx(0.3)
    assert metrics["logprob_gap_mean"] == pytest.approx(0.3)
    assert metrics["logprob_gap_max"] == pytest.approx(0.5)


LOW, HIGH = 0.6, 1.4
UNCLIPPED = {"clip_low": 1.0, "clip_high": 1e9}


def test_gspo_clips_the_geometric_mean_of_a_response_by_hand() -> None:
    # Response 7: ρ = 4, 1 → s = 2, A = 3: clipped at 1.2. Response 3: ρ = 1/4, 1, 1/2 → s = 1/2, A = −½: clipped at
    # 0.8. Response 9: ρ = 1.21, 1 → s = 1.1, A = 1.
    ratios = logs(4, 1, 0.25, 1, 0.5, 1.21, 1)
    micro = micro_batch([3, 3, -0.5, -0.5, -0.5, 1, 1], [0.1] * 7, [0.0] * 7, [7, 7, 3, 3, 3, 9, 9])
    gradient, loss, sums = differentiated(ratios, micro, LossConfig(surrogate="gspo"), torch.zeros_like(ratios))
    assert loss == pytest.approx(0.1 * (2 * -3.6 + 3 * 0.4 + 2 * -1.1), abs=1e-14)
    # d(−w·2·s)/d log ρ_t = −w·2·s/2 for each token of the response that is not clipped.
    assert gradient == pytest.approx([0, 0, 0, 0, 0, -0.11, -0.11], abs=1e-14)
    assert finish_statistics(sums)["clip_fraction"] == pytest.approx(5 / 7)


def test_cispo_weighs_the_gradient_of_every_token_by_its_clipped_ratio_by_hand() -> None:
    logprobs = logs(0.5, 0.5, 0.5)
    old = logprobs - logs(3.0, 1.1, 0.5)
    micro = micro_batch([3, -1, 0.5], [0.2, 0.3, 0.5], [0.0] * 3, [0, 1, 2])
    gradient, loss, _ = differentiated(logprobs, micro, LossConfig(surrogate="cispo"), old)
    # ρ = 3, 1.1, 0.5 clipped to 1.2, 1.1, 0.8.
    expected = [-0.2 * 3.6, 0.3 * 1.1, -0.5 * 0.4]
    assert loss == pytest.approx(sum(expected) * math.log(0.5), abs=1e-14)
    assert gradient == pytest.approx(expected, abs=1e-14)


@pytest.mark.parametrize(
    ("divergence", "delta", "masked"),
    [
        # |π − μ| = 0.25, 0.1, 0.25, 0.1, 0.25, 0.25, 0.25; δ itself is not too far.
        ("tv", 0.2, {0, 2}),
        ("tv", 0.25, set()),
        # μ log(μ/π) + (1 − μ) log((1 − μ)/(1 − π)) = ½ log(1/(4π(1 − π))) with μ = ½: 0.1438, 0.0204, …
        ("kl", 0.14, {0, 2}),
        ("kl", 0.15, set()),
    ],
)
def test_dppo_masks_what_moved_too_far_by_hand(divergence: Literal["tv", "kl"], delta: float, masked: set[int]) -> None:
    probabilities, advantages = [0.75, 0.6, 0.25, 0.4, 0.25, 0.75, 0.75], [1.0, 1, -1, -1, 0.5, -0.5, 0]
    micro = micro_batch(advantages, [1.0] * 7, [math.log(0.5)] * 7)
    settings = DppoLossConfig(divergence=divergence, clip_low=delta, clip_high=delta)
    # The anchor is the policy that sampled, whatever the learner's log-probabilities were before the step.
    gradient, loss, sums = differentiated(logs(*probabilities), micro, settings, torch.zeros(7))
    # −ρA with ρ = π / μ, and its gradient with respect to log π is the same number.
    wanted = [0 if t in masked else -2 * p * a for t, (p, a) in enumerate(zip(probabilities, advantages, strict=True))]
    assert gradient == pytest.approx(wanted, abs=1e-14)
    assert loss == pytest.approx(sum(wanted), abs=1e-14)
    metrics = finish_statistics(sums)
    assert metrics["clip_high_fraction"] == metrics["clip_low_fraction"] == pytest.approx(len(masked) / 14)
    assert metrics["ratio_mean"] == pytest.approx(7.5 / 7)


def test_dppo_thresholds_are_one_for_each_direction_and_certain_tokens_stay_finite() -> None:
    micro = micro_batch([1, -1, 1, -1], [1.0] * 4, [math.log(0.5), math.log(0.5), 0.0, 1e-9])
    settings = DppoLossConfig(divergence="kl", clip_low=0.1, clip_high=0.3)
    gradient, _, _ = differentiated(logs(0.8, 0.2, 0.5, 0.5), micro, settings)
    # 0.2231 is beyond 0.1 and within 0.3. μ = 1, or rounded above it: KL = log 2, which counts where A < 0.
    assert gradient == pytest.approx([-1.6, 0, -0.5, 0], abs=1e-14)


def test_the_ratio_to_the_sampler_is_bounded_where_the_clip_does_not_bound_it() -> None:
    """A < 0 with a large ratio: the clipped surrogate lets it pass, the truncated weight does not."""
    micro = micro_batch([-1, 1], [1, 1], [0.0, 0.0], [0, 1])
    settings = LossConfig(proximal="sampler", correction="token_truncate", importance_high=2.0)
    gradient, _, sums = differentiated(logs(5.0, 1.1), micro, settings)
    assert gradient == pytest.approx([2.0, -1.1], abs=1e-14)
    metrics = finish_statistics(sums)
    assert metrics["importance_mean"] == pytest.approx(3.05)
    assert metrics["importance_max"] == pytest.approx(5.0)
    assert metrics["importance_effective_sample_fraction"] == pytest.approx(3.1**2 / (2 * (4 + 1.21)))


@pytest.mark.parametrize("correction", ["token_mask", "sequence_mask"])
def test_a_mask_keeps_weights_at_its_bounds_and_may_leave_nothing(correction: str) -> None:
    settings = LossConfig(
        **UNCLIPPED, proximal="sampler", correction=correction, importance_low=0.5, importance_high=2.0
    )

    def masked(*ratios: float) -> tuple[list[float], float]:
        num = len(ratios)
        micro = micro_batch([1.0] * num, [1.0] * num, [0.0] * num, list(range(num)))
        gradient, _, sums = differentiated(logs(*ratios), micro, settings)
        return gradient, finish_statistics(sums)["importance_effective_sample_fraction"]

    gradient, fraction = masked(0.5, 2.0, 0.499, 2.001)
    assert gradient == pytest.approx([-0.5, -2.0, 0.0, 0.0], abs=1e-14)
    assert fraction == pytest.approx(2.5**2 / (4 * 4.25))
    assert masked(0.1, 9.0) == ([0.0, 0.0], 0.0)


@pytest.mark.parametrize("proximal", ["learner", "sampler"])
@pytest.mark.parametrize("correction", ["none", "token_truncate", "token_mask", "sequence_mask"])
def test_expectation_of_each_correction_equals_its_formula(proximal: str, correction: str) -> None:
    """Over all responses of two tokens from a vocabulary of three: Σ_y μ(y) A(y) Σ_t v_t ∇log π(y_t).

    A table of log-probabilities has a row for the first token and one for the second after each first token.
    """
    draw = np.random.default_rng(3)
    logits = torch.tensor(draw.normal(size=(4, 3)), requires_grad=True)
    tables = (logits, logits.detach() + torch.tensor(draw.normal(scale=0.6, size=(4, 3))))
    responses = itertools.product(range(3), repeat=2)
    places = [place for first, second in responses for place in ((0, first), (1 + first, second))]
    target, sampler = (torch.stack([torch.log_softmax(table, 1)[place] for place in places]) for table in tables)
    advantages = torch.tensor(draw.normal(size=9)).repeat_interleave(2)
    probability = sampler.reshape(9, 2).sum(1).exp().repeat_interleave(2)
    token = (target - sampler).detach().exp()
    whole = token.reshape(9, 2).prod(1).repeat_interleave(2)
    weights = {
        "none": token if proximal == "sampler" else torch.ones_like(token),
        "token_truncate": token.clamp(max=HIGH),
        "token_mask": token * ((token >= LOW) & (token <= HIGH)),
        "sequence_mask": whole * ((whole >= LOW) & (whole <= HIGH)),
    }
    expectation = (probability * weights[correction] * advantages * target).sum()
    settings = LossConfig(
        **UNCLIPPED, proximal=proximal, correction=correction, importance_low=LOW, importance_high=HIGH
    )
    sequences = np.repeat(np.arange(9), 2).tolist()
    micro = micro_batch(advantages.tolist(), probability.tolist(), sampler.tolist(), sequences)
    loss = policy_loss(TokenOutputs(target, None), micro, None, None, settings)[0]
    (expected,), (measured,) = (torch.autograd.grad(value, logits, retain_graph=True) for value in (expectation, -loss))
    assert measured.numpy() == pytest.approx(expected.numpy(), abs=1e-14)


# pass@k, maj@n and their intervals.


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_equals_average_over_all_subsets(n: int) -> None:
    for c in range(n + 1):
        samples = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            subsets = [any(subset) for subset in itertools.combinations(samples, k)]
            assert pass_at_k(n, c, k) == pytest.approx(sum(subsets) / len(subsets), abs=1e-12)


@pytest.mark.parametrize(
    ("answers", "correct", "expected"),
    [
        (["3", "3", "4"], [True, True, False], 1.0),
        (["3", "4", "4"], [True, False, False], 0.0),
        (["3", "4"], [True, False], 0.5),
        (["3", "4", "5"], [True, False, False], 1 / 3),
        ([None, None, None, "3"], [False, False, False, True], 1.0),
        ([None, None], [False, False], 0.0),
        (["1/2", "0.5", "2", "2"], [True, True, False, False], 0.5),
        ([" 4", "4 ", "3"], [False, False, True], 0.0),
    ],
)
def test_majority_vote_by_hand(answers: list[str | None], correct: list[bool], expected: float) -> None:
    assert majority_at_n(answers, correct) == pytest.approx(expected)


@pytest.mark.parametrize(("correct", "problems"), [(0, 1), (0, 16), (1, 16), (5, 16), (16, 16), (93, 256)])
def test_an_answer_a_problem_has_wilsons_interval(correct: int, problems: int) -> None:
    reference = binomtest(correct, problems).proportion_ci(0.95, method="wilson")
    values = [1.0] * correct + [0.0] * (problems - correct)
    assert proportion_interval(values) == pytest.approx((reference.low, reference.high), abs=1e-12)


def test_scores_between_count_as_their_spread_says() -> None:
    # Mean 3/8 and variance 3/64: 4 · (15/64)/(3/64) = 20 answers, of which 7.5 are correct.
    z = 1.959963984540054
    center, root = (7.5 + z * z / 2) / (20 + z * z), z * math.sqrt(7.5 * 12.5 / 20 + z * z / 4) / (20 + z * z)
    alike = proportion_interval([0.25] * 11)
    for score in (0.3, 2 / 3, 0.7):  # equal scores, whose mean is rounded
        low, high = proportion_interval([score] * 11)
        assert high - low > (alike[1] - alike[0]) / 2
    assert proportion_interval([0.0, 0.5, 0.5, 0.5]) == pytest.approx((center - root, center + root), abs=1e-12)
