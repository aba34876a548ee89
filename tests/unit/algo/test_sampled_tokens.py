"""Responses that an environment wrote parts of: only sampled tokens are in loss, statistics and denominators."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_policy import (
    TOKEN_LIMIT,
    gradient_vector,
    plain_logprobs,
    random_batch,
    relative_difference,
    tiny_policy,
)
from torch import Tensor

from gxpo_trainer.algo.batch import (
    Aggregation,
    LossScale,
    ScoredSequence,
    StepBatch,
    make_batch,
    mini_batches,
    shard,
    with_scale,
)
from gxpo_trainer.algo.losses import combine_statistics, finish_statistics, policy_loss
from gxpo_trainer.algo.packing import Layout, MicroBatch, pack
from gxpo_trainer.config import LossConfig
from gxpo_trainer.learner.logprobs import PolicyModule
from gxpo_trainer.types import Group, Prompt, Sample, ScoredGroup, Verdict

LAYOUTS: tuple[Layout, ...] = ("padded", "shared", "packed")
AGGREGATIONS: tuple[Aggregation, ...] = ("token_mean", "sequence_mean", "sequence_sum")
TOKEN_LEVEL = LossConfig(kl_beta=0.3, correction="token_truncate", importance_high=1.5)
SEQUENCE_LEVEL = LossConfig(surrogate="gspo", correction="sequence_mask", importance_low=1e-6, importance_high=1e6)

# By their token, so that the reference and the packed batch agree on them without sharing code.
OLD_OFFSET = 0.3
REFERENCE_OFFSET = 0.3


@pytest.fixture(scope="module")
def policy() -> PolicyModule:
    return PolicyModule(tiny_policy(dtype=torch.float64))


def conversations(seed: int, *, num_prompts: int = 4, num_samples: int = 3, left_out: float = 0.2) -> StepBatch:
    """Random sequences; of most, random parts were written by an environment. At least one token is sampled."""
    rng = np.random.default_rng(seed)
    sequences: list[ScoredSequence] = []
    batch = random_batch(seed=seed, num_prompts=num_prompts, num_samples=num_samples, left_out=left_out)
    for sequence in batch.sequences:
        sampled = rng.random(len(sequence.response_ids)) < rng.choice([0.2, 0.5, 0.9])
        sampled[rng.integers(len(sampled))] = True
        sequences.append(replace(sequence, sampled=sampled if rng.random() < 0.8 else None))
    return with_scale(sequences, TOKEN_LIMIT)


def is_sampled(sequence: ScoredSequence, token: int) -> bool:
    return sequence.sampled is None or bool(sequence.sampled[token])


def run_micro_batches(
    policy: PolicyModule, micros: list[MicroBatch], options: LossConfig
) -> tuple[float, Tensor, dict[str, Tensor]]:
    policy.zero_grad()
    total, sums = 0.0, None
    for micro in micros:
        outputs = policy(micro, 1.0, False)
        old = outputs.logprobs.detach() + OLD_OFFSET * torch.sin(micro.target_ids.double())
        reference = outputs.logprobs.detach() + REFERENCE_OFFSET * torch.cos(micro.target_ids.double())
        loss, statistics = policy_loss(outputs, micro, old, reference if options.kl_beta else None, options)
        loss.backward()
        total += loss.item()
        sums = combine_statistics(sums, statistics)
    assert sums is not None
    return total, gradient_vector(policy), sums


def loop_over_tokens(
    policy: PolicyModule, batch: StepBatch, aggregation: Aggregation, options: LossConfig
) -> tuple[float, Tensor, dict[str, float]]:
    """The loss token by token: each sequence alone, without packing, masks or vectors."""
    policy.zero_grad()
    sequence_sums: list[Any] = []
    counts: list[int] = []
    gaps: list[float] = []
    for sequence in batch.sequences:
        if not sequence.in_loss:
            continue
        logprobs, _ = plain_logprobs(policy.model, sequence)
        tokens = [t for t in range(len(sequence.response_ids)) if is_sampled(sequence, t)]
        old = {t: logprobs[t].item() + OLD_OFFSET * np.sin(float(sequence.response_ids[t])) for t in tokens}
        log_ratios = {t: logprobs[t] - old[t] for t in tokens}
        log_weights = {t: old[t] - float(sequence.sampler_logprobs[t]) for t in tokens}
        a = sequence.advantage
        terms = []
        for t in tokens:
            if options.surrogate == "gspo":
                ratio = torch.exp(sum(log_ratios.values()) / torch.tensor(len(tokens), dtype=torch.float64))
            else:
                ratio = torch.exp(log_ratios[t])
            clipped = min(max(ratio.item(), 0.8), 1.2)
            # min(ρA, clip(ρ)A): the gradient vanishes where the clipped one is smaller.
            surrogate = ratio * a if ratio.item() * a <= clipped * a else torch.tensor(clipped * a).double()
            if options.correction == "sequence_mask":
                whole = np.exp(sum(log_weights.values()))
                weight = whole if 1e-6 <= whole <= 1e6 else 0.0
            else:
                weight = min(np.exp(log_weights[t]), 1.5)
            term = -weight * surrogate
            if options.kl_beta:
                reference = logprobs[t].item() + REFERENCE_OFFSET * np.cos(float(sequence.response_ids[t]))
                q = reference - logprobs[t]
                term = term + options.kl_beta * (torch.exp(q) - q - 1)
            terms.append(term)
            gaps.append(abs(logprobs[t].item() - float(sequence.sampler_logprobs[t])))
        sequence_sums.append(sum(terms))
        counts.append(len(tokens))
    if aggregation == "token_mean":
        loss = sum(sequence_sums) / sum(counts)
    elif aggregation == "sequence_mean":
        loss = sum(s / n for s, n in zip(sequence_sums, counts, strict=True)) / len(counts)
    else:
        loss = sum(sequence_sums) / (len(counts) * TOKEN_LIMIT)
    loss.backward()
    expected = {"tokens": float(sum(counts)), "logprob_gap": sum(gaps), "logprob_gap_max": max(gaps)}
    return loss.item(), gradient_vector(policy), expected


def assert_same(
    found: tuple[float, Tensor, dict[str, Tensor]], expected: tuple[float, Tensor, dict[str, float]]
) -> None:
    # Weights and sampler log-probabilities are float32: one part in 10⁶ of terms of order 1, which may cancel in a sum.
    assert found[0] == pytest.approx(expected[0], rel=1e-5, abs=1e-6)
    assert relative_difference(found[1], expected[1]) < 1e-5
    for name, value in expected[2].items():
        assert float(found[2][name]) == pytest.approx(value, rel=1e-5), name


@pytest.mark.parametrize("options", [TOKEN_LEVEL, SEQUENCE_LEVEL], ids=["token_level", "sequence_level"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6), token_budget=st.sampled_from([1, 50, 100_000]), num_ranks=st.integers(1, 3))
def test_gradient_equals_a_loop_over_the_sampled_tokens(
    policy: PolicyModule,
    layout: Layout,
    aggregation: Aggregation,
    options: LossConfig,
    seed: int,
    token_budget: int,
    num_ranks: int,
) -> None:
    batch = conversations(seed)
    if not batch.in_loss():
        return
    micros = [
        micro
        for part in shard(batch, num_ranks)
        for micro in pack(part, token_budget=token_budget, layout=layout, aggregation=aggregation, pad_id=0)
    ]
    assert_same(run_micro_batches(policy, micros, options), loop_over_tokens(policy, batch, aggregation, options))


def test_mini_batches_have_the_denominators_of_their_sampled_tokens(policy: PolicyModule) -> None:
    for part in mini_batches(conversations(3, num_prompts=6, left_out=0.0), 3):
        micros = pack(part, token_budget=60, layout="shared", aggregation="token_mean", pad_id=0)
        assert_same(
            run_micro_batches(policy, micros, TOKEN_LEVEL), loop_over_tokens(policy, part, "token_mean", TOKEN_LEVEL)
        )


@pytest.mark.parametrize("options", [TOKEN_LEVEL, SEQUENCE_LEVEL], ids=["token_level", "sequence_level"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probabilities_of_observation_tokens_have_no_influence(
    policy: PolicyModule, layout: Layout, options: LossConfig
) -> None:
    batch = conversations(5)
    rng = np.random.default_rng(1)

    def changed(sequence: ScoredSequence) -> ScoredSequence:
        if sequence.sampled is None:
            return sequence
        noise = rng.normal(-20.0, 10.0, len(sequence.response_ids)).astype(np.float32)
        return replace(sequence, sampler_logprobs=np.where(sequence.sampled, sequence.sampler_logprobs, noise))

    other = with_scale([changed(sequence) for sequence in batch.sequences], TOKEN_LIMIT)
    changes = [
        np.any(a.sampler_logprobs != b.sampler_logprobs)
        for a, b in zip(batch.sequences, other.sequences, strict=True)
        if a.in_loss
    ]
    assert sum(changes) > 3
    one, two = (
        run_micro_batches(
            policy, pack(b, token_budget=90, layout=layout, aggregation="sequence_mean", pad_id=0), options
        )
        for b in (batch, other)
    )
    assert one[0] == two[0]
    assert torch.equal(one[1], two[1])
    assert finish_statistics(one[2]) == finish_statistics(two[2])


def test_observation_tokens_are_context_of_later_sampled_tokens(policy: PolicyModule) -> None:
    """The other direction: another observation changes what follows it, and nothing before it."""
    prompt, response = np.array([1, 2], dtype=np.int32), np.array([3, 4, 5, 6, 7, 8], dtype=np.int32)
    sampled = np.array([True, True, False, False, True, True])
    other = response.copy()
    other[2:4] = 30
    logprobs = []
    for ids in (response, other):
        batch = with_scale([ScoredSequence(prompt, ids, 1.0, np.zeros(6, np.float32), sampled=sampled)], TOKEN_LIMIT)
        (micro,) = pack(batch, token_budget=99, layout="packed", aggregation="token_mean", pad_id=0)
        assert micro.target_ids.tolist() == [3, 4, 7, 8]
        logprobs.append(policy(micro, 1.0, False).logprobs.detach())
    assert torch.equal(logprobs[0][:2], logprobs[1][:2])
    assert (logprobs[0][2:] - logprobs[1][2:]).abs().min() > 1e-3


def test_targets_of_a_conversation_by_hand() -> None:
    """Prompt 1 2; turn 3 4; observation 5 6 7; turn 8 9."""
    sampled = np.array([1, 1, 0, 0, 0, 1, 1], dtype=np.bool_)
    ids = np.array([3, 4, 5, 6, 7, 8, 9], dtype=np.int32)
    logprobs = np.array([-1, -2, 0, 0, 0, -3, -4], dtype=np.float32)
    batch = with_scale([ScoredSequence(ids[:2], ids, 0.5, logprobs, sampled=sampled)], TOKEN_LIMIT)
    assert batch.scale == LossScale(num_tokens=4, num_sequences=1, token_limit=TOKEN_LIMIT)
    (micro,) = pack(batch, token_budget=99, layout="padded", aggregation="sequence_mean", pad_id=0)
    assert micro.input_ids.tolist() == [[3, 4, *ids.tolist()]]
    # Position 1 is the prompt's last, 2 the first of the response: 8 is predicted by the last observation token.
    assert micro.target_index.tolist() == [1, 2, 6, 7]
    assert micro.target_ids.tolist() == [3, 4, 8, 9]
    assert micro.sampler_logprobs.tolist() == [-1, -2, -3, -4]
    assert micro.token_weights.tolist() == [0.25] * 4
    assert micro.advantages.tolist() == [0.5] * 4
    assert micro.sequence_index.tolist() == [0] * 4


def test_make_batch_takes_over_who_wrote_each_token() -> None:
    ids, logprobs = np.array([4, 5, 6], dtype=np.int32), np.array([-1, 0, -1], dtype=np.float32)
    masks = [np.array([True, False, True]), np.array([False, False, False]), None]
    samples = tuple(Sample("", ids, logprobs, "stop", sampled=mask) for mask in masks)
    group = Group(Prompt("a", "a", "1"), np.array([1, 2], dtype=np.int32), samples, weights_version=1)
    verdicts = tuple(Verdict(status, None, 0.0) for status in ("correct", "wrong", "wrong"))
    batch, _ = make_batch([ScoredGroup(group, verdicts)], LossConfig(), token_limit=9)  # type: ignore[arg-type]
    assert [s.in_loss for s in batch.sequences] == [True, False, True]
    assert batch.scale == LossScale(num_tokens=2 + 3, num_sequences=2, token_limit=9)
    for sequence, mask in zip(batch.sequences, masks, strict=True):
        assert sequence.sampled is mask


def test_a_mask_that_does_not_fit_its_response_is_refused() -> None:
    ids, logprobs = np.array([1, 2], dtype=np.int32), np.array([-1.0, -1.0], dtype=np.float32)
    with pytest.raises(ValueError, match=r"2 response_ids but sampled is bool\[3\]"):
        ScoredSequence(ids, ids, 0.0, logprobs, sampled=np.array([True, False, True]))
    # An array of 0 and 1 would select tokens by their index.
    with pytest.raises(ValueError, match=r"2 response_ids but sampled is int64\[2\]"):
        ScoredSequence(ids, ids, 0.0, logprobs, sampled=np.array([0, 1]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has 0 sampled tokens"):
        ScoredSequence(ids, ids, 0.0, logprobs, sampled=np.array([False, False]))
    assert not ScoredSequence(ids, ids, 0.0, logprobs, in_loss=False, sampled=np.array([False, False])).num_sampled
