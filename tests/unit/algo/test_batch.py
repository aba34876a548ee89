"""Batches: advantages, rates, weights, layouts, shards; no way of cutting a batch changes its loss or gradient.

Of a response that an environment wrote parts of, only sampled tokens are in loss, statistics and denominators.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
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
    FloatArray,
    LossScale,
    Rewards,
    ScoredSequence,
    StepBatch,
    group_advantages,
    learning_rate,
    make_batch,
    mini_batches,
    prompt_groups,
    reward_metrics,
    rewards_array,
    shard,
    step_advantages,
    with_scale,
    zero_variance,
)
from gxpo_trainer.algo.losses import combine_statistics, policy_loss
from gxpo_trainer.algo.packing import Layout, MicroBatch, pack
from gxpo_trainer.config import AdvantageSettings, LossConfig, OptimizerConfig
from gxpo_trainer.config.run import MaxRLAdvantageConfig, ShrinkageAdvantageConfig
from gxpo_trainer.errors import TrainingError
from gxpo_trainer.learner.logprobs import PolicyModule
from gxpo_trainer.types import Group, Prompt, Sample, ScoredGroup, Verdict, VerdictStatus

AGGREGATIONS: tuple[Aggregation, ...] = ("token_mean", "sequence_mean", "sequence_sum")
LAYOUTS: tuple[Layout, ...] = ("padded", "shared", "packed")
TOKEN_LEVEL = LossConfig(kl_beta=0.3, correction="token_truncate", importance_high=1.5)
SEQUENCE_LEVEL = LossConfig(surrogate="gspo", correction="sequence_mask", importance_low=1e-6, importance_high=1e6)

OFFSET = 0.3
"""Of old and reference log-probabilities, by their token, so that both sides agree on them without sharing code."""


def run_micro_batches(
    policy: PolicyModule, micros: list[MicroBatch], options: LossConfig = TOKEN_LEVEL
) -> tuple[float, Tensor, dict[str, Tensor]]:
    """Accumulated over micro-batches; old and reference log-probabilities are made up from the token ids."""
    policy.zero_grad()
    total, sums = 0.0, None
    for micro in micros:
        outputs = policy(micro, 1.0, False)
        old = outputs.logprobs.detach() + OFFSET * torch.sin(micro.target_ids.double())
        reference = outputs.logprobs.detach() + OFFSET * torch.cos(micro.target_ids.double())
        loss, statistics = policy_loss(outputs, micro, old, reference if options.kl_beta else None, options)
        loss.backward()
        total += loss.item()
        sums = statistics if sums is None else combine_statistics(sums, statistics)
    assert sums is not None
    return total, gradient_vector(policy), sums


def loop_over_sequences(
    policy: PolicyModule, batch: StepBatch, aggregation: Aggregation, options: LossConfig
) -> tuple[float, Tensor, dict[str, float]]:
    """The loss of each sequence alone, without packing or masks, and statistics."""
    policy.zero_grad()
    sums: list[Tensor] = []
    gaps: list[Tensor] = []
    for sequence in (batch.sequences[i] for i in batch.in_loss()):
        kept = slice(None) if sequence.sampled is None else torch.from_numpy(sequence.sampled)
        logprobs = plain_logprobs(policy.model, sequence)[0][kept]
        ids, sampler = (torch.from_numpy(x)[kept].double() for x in (sequence.response_ids, sequence.sampler_logprobs))
        old = logprobs.detach() + OFFSET * torch.sin(ids)
        log_ratio, a = logprobs - old, sequence.advantage
        ratio = torch.exp(log_ratio.mean().expand_as(ids) if options.surrogate == "gspo" else log_ratio)
        weight = torch.exp(old - sampler).clamp(max=1.5)
        if options.correction == "sequence_mask":
            whole = torch.exp((old - sampler).sum())
            weight = whole if 1e-6 <= whole <= 1e6 else torch.tensor(0.0)
        terms = -weight * torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
        if options.kl_beta:
            q = logprobs.detach() + OFFSET * torch.cos(ids) - logprobs
            terms = terms + options.kl_beta * (torch.exp(q) - q - 1)
        sums.append(terms.mean() if aggregation == "sequence_mean" else terms.sum())
        gaps.append((logprobs.detach() - sampler).abs())
    gap = torch.cat(gaps)
    scales = {"token_mean": len(gap), "sequence_mean": len(sums), "sequence_sum": len(sums) * TOKEN_LIMIT}
    loss = torch.stack(sums).sum() / scales[aggregation]
    loss.backward()
    expected = {"tokens": float(len(gap)), "logprob_gap_mean": float(gap.sum()), "logprob_gap_max": float(gap.max())}
    return loss.item(), gradient_vector(policy), expected


@pytest.fixture(scope="module")
def policy() -> PolicyModule:
    return PolicyModule(tiny_policy(dtype=torch.float64))


@pytest.mark.parametrize(
    ("layout", "prompt", "responses", "token_budget", "shapes"),
    [
        # Rows fill the budget and stay within it.
        ("shared", 30, [20] * 8, 70, [(1, 70)] * 4), ("shared", 30, [20] * 8, 89, [(1, 70)] * 4),
        ("padded", 4, [6] * 4, 20, [(2, 10)] * 2), ("padded", 4, [6] * 4, 29, [(2, 10)] * 2),
        ("packed", 4, [6] * 4, 20, [(1, 20)] * 2), ("packed", 4, [6] * 4, 29, [(1, 20)] * 2),
        # Sequences of 60, 50, 50 and 40 tokens in rows of 100: in order they would take three rows.
        ("packed", 4, [56, 46, 46, 36], 100, [(1, 100)] * 2),
        # A response joins a row only where that costs less: with n prompt tokens and m a response when
        # m + ((n + 2m)² − (n + m)²)/1024 < n + m + (n + m)²/1024, which is 2m² < n² + 1024n. n = 38: 40,356, between
        # 2·142² = 40,328 and 2·143². n = m = 1024: equal, so not joined.
        ("shared", 38, [142] * 2, 4096, [(1, 322)]), ("shared", 38, [143] * 2, 4096, [(2, 181)]),
        ("shared", 1024, [1024] * 2, 4096, [(2, 2048)]),
    ],
)  # fmt: skip
def test_rows_of_each_layout(
    layout: Layout, prompt: int, responses: list[int], token_budget: int, shapes: list[tuple[int, int]]
) -> None:
    prompt_ids, *rows = (np.arange(length, dtype=np.int32) % 30 for length in (prompt, *responses))
    sequences = [ScoredSequence(prompt_ids, row, 1.0, np.zeros(len(row), np.float32)) for row in rows]
    batch = with_scale(sequences, TOKEN_LIMIT)
    micros = pack(batch, token_budget=token_budget, layout=layout, aggregation="token_mean", pad_id=0)
    assert [tuple(micro.input_ids.shape) for micro in micros] == shapes
    shared = layout == "shared" and shapes[0][0] == 1
    assert all((micro.attention_mask is not None) == shared for micro in micros)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 5), st.sampled_from([0.0, 0.5, 1.0]), st.data())
def test_shards_are_a_balanced_partition_without_an_empty_rank(
    seed: int, num_prompts: int, num_samples: int, left_out: float, data: st.DataObject
) -> None:
    batch = random_batch(seed=seed, num_prompts=num_prompts, num_samples=num_samples, left_out=left_out)
    num_ranks = data.draw(st.integers(1, len(batch.sequences)))
    parts = shard(batch, num_ranks)
    assert len(parts) == num_ranks
    assert all(part.sequences and part.scale == batch.scale for part in parts)
    assert sorted(id(s) for p in parts for s in p.sequences) == sorted(id(s) for s in batch.sequences)
    loads = [sum(s.num_tokens for s in part.sequences if s.in_loss) for part in parts]
    units = (
        prompt_groups(batch) if len(prompt_groups(batch)) >= num_ranks else [[i] for i in range(len(batch.sequences))]
    )
    largest = max(sum(batch.sequences[i].num_tokens for i in unit if batch.sequences[i].in_loss) for unit in units)
    assert max(loads) - min(loads) <= largest


def test_mini_batches_are_whole_groups_with_their_own_denominators() -> None:
    batch = random_batch(num_prompts=5, num_samples=3, seed=9)
    parts = mini_batches(batch, 2)
    assert [len(part.sequences) for part in parts] == [9, 6]
    assert tuple(s for part in parts for s in part.sequences) == batch.sequences
    for part in parts:
        assert part.scale == with_scale(part.sequences, TOKEN_LIMIT).scale
    assert mini_batches(batch, 1) == [batch]
    # Eight prompts of one text: groups are divided by their number, and their samples stay together.
    batch, _ = make_batch([scored_group("a", ["correct", "wrong"]) for _ in range(8)], LossConfig(), token_limit=9)
    assert prompt_groups(batch) == [[i, i + 1] for i in range(0, 16, 2)]
    assert [len(part.sequences) for part in mini_batches(batch, 8)] == [2] * 8
    for share in shard(mini_batches(batch, 2)[1], 2):
        assert prompt_groups(share) == [[0, 1], [2, 3]]


def test_a_batch_without_a_sequence_in_the_loss_is_one_idle_pass_from_a_first_token_to_a_second() -> None:
    batch = random_batch(left_out=1.0)
    (dummy,) = pack(batch, token_budget=64, layout="packed", aggregation="sequence_mean", pad_id=3)
    assert (dummy.input_ids.tolist(), dummy.position_ids.tolist()) == ([[3, 3]], [[0, 1]])
    assert (dummy.target_index.tolist(), dummy.target_ids.tolist(), dummy.sequence_index.tolist()) == ([0], [3], [0])
    for values in (dummy.advantages, dummy.token_weights, dummy.sampler_logprobs):
        assert values.tolist() == [0.0]


def scored_group(name: str, statuses: list[VerdictStatus], truncated: tuple[int, ...] = ()) -> ScoredGroup:
    samples = tuple(
        Sample(
            text="",
            token_ids=np.arange(1, i + 2, dtype=np.int32),
            logprobs=np.full(i + 1, -1.0, dtype=np.float32),
            finish_reason="length" if i in truncated else "stop",
        )
        for i in range(len(statuses))
    )
    group = Group(Prompt(name, name, "1"), np.array([5, len(name)], dtype=np.int32), samples, weights_version=1)
    return ScoredGroup(group, tuple(Verdict(status, None, 0.0) for status in statuses))


def test_make_batch_by_hand() -> None:
    scored = [
        scored_group("a", ["correct", "wrong", "timeout", "unparsed"], truncated=(3,)),
        scored_group("bb", ["correct", "correct", "error"]),
    ]
    batch, metrics = make_batch(scored, LossConfig(advantage_std=False), token_limit=9)
    third = 1 / 3
    assert [s.advantage for s in batch.sequences] == pytest.approx([2 * third, -third, 0, -third, 0, 0, 0])
    assert [s.in_loss for s in batch.sequences] == [True, True, False, True, True, True, False]
    # Response lengths are 1, 2, 3, 4 and 1, 2, 3.
    assert batch.scale == LossScale(num_tokens=1 + 2 + 4 + 1 + 2, num_sequences=5, token_limit=9)
    assert metrics["reward/mean"] == pytest.approx(3 / 5)
    assert metrics["reward/zero_variance_fraction"] == pytest.approx(1 / 2)
    assert metrics["policy/advantage_abs_mean"] == pytest.approx((2 * third + third + third) / 5)
    # A teacher scores every response, whatever its verdict.
    batch, metrics = make_batch(scored, LossConfig(), token_limit=9, distilled=True)
    assert {(s.in_loss, s.advantage) for s in batch.sequences} == {(True, 0.0)}
    assert batch.scale.num_tokens == 1 + 2 + 3 + 4 + 1 + 2 + 3
    assert metrics["reward/mean"] == pytest.approx(3 / 5)
    assert "policy/advantage_abs_mean" not in metrics
    # Groups of equal rewards are left out unless they are kept.
    for option in ("drop", "resample"):
        batch, _ = make_batch(scored, LossConfig.model_validate({"zero_variance": option}), token_limit=9)
        assert [s.in_loss for s in batch.sequences] == [True, True, False, True, False, False, False]
        assert batch.scale.num_sequences == 3
    # A masked truncated response still counts in its group's mean.
    batch, _ = make_batch(scored[:1], LossConfig(advantage_std=False, mask_truncated=True), token_limit=9)
    assert [s.in_loss for s in batch.sequences] == [True, True, False, False]
    assert batch.sequences[0].advantage == pytest.approx(2 * third)


def conversations(seed: int) -> StepBatch:
    """Random sequences; of most, random parts were written by an environment. At least one token is sampled."""
    rng = np.random.default_rng(seed)
    sequences: list[ScoredSequence] = []
    for sequence in random_batch(seed=seed, num_prompts=4, num_samples=3, left_out=0.2).sequences:
        sampled = rng.random(len(sequence.response_ids)) < rng.choice([0.2, 0.5, 0.9])
        sampled[rng.integers(len(sampled))] = True
        sequences.append(replace(sequence, sampled=sampled if rng.random() < 0.8 else None))
    return with_scale(sequences, TOKEN_LIMIT)


@pytest.mark.parametrize("options", [TOKEN_LEVEL, SEQUENCE_LEVEL], ids=["token_level", "sequence_level"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6), token_budget=st.sampled_from([1, 50, 100_000]), num_ranks=st.integers(1, 3))
def test_gradient_equals_a_loop_over_the_sequences_with_other_than_sampled_tokens_as_context_alone(
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
    # Weights and sampler log-probabilities are float32: one part in 10⁶ of terms of order 1, which may cancel in a sum.
    loss, gradient, statistics = run_micro_batches(policy, micros, options)
    expected_loss, expected_gradient, expected = loop_over_sequences(policy, batch, aggregation, options)
    assert loss == pytest.approx(expected_loss, rel=1e-5, abs=1e-6)
    assert relative_difference(gradient, expected_gradient) < 1e-5
    assert {name: float(statistics[name]) for name in expected} == pytest.approx(expected, rel=1e-5)


def test_rows_of_a_response_share_its_advantage_and_count_as_one_by_hand() -> None:
    """Responses of 3 + 1 and of 2 sampled tokens, rewards 1 and 0: advantages ±0.5, of each response half the loss."""

    def row(mask: list[bool], prompt: list[int] | None = None, **more: Any) -> Sample:
        ids, logprobs = np.arange(4, 4 + len(mask), dtype=np.int32), np.zeros(len(mask), dtype=np.float32)
        own = None if prompt is None else np.array(prompt, dtype=np.int32)
        return Sample("", ids, logprobs, "stop", sampled=np.array(mask), prompt_token_ids=own, **more)

    branch = row([True], [1, 7])
    samples = row([True, True, False, True], [1, 2], branches=(branch,)), row([True, True])
    assert [sample.num_sampled for sample in samples] == [4, 2]
    assert samples[0].num_observed == 1
    group = Group(Prompt("a", "a", "1"), np.array([1, 2], dtype=np.int32), samples, weights_version=1)
    verdicts = tuple(Verdict(status, None, 0.0) for status in ("correct", "wrong"))
    scored = [ScoredGroup(group, verdicts)]  # type: ignore[arg-type]
    batch, _ = make_batch(scored, LossConfig(advantage_std=False), token_limit=9)
    assert [s.prompt_ids.tolist() for s in batch.sequences] == [[1, 2], [1, 7], [1, 2]]
    assert [s.advantage for s in batch.sequences] == [0.5, 0.5, -0.5]
    assert (batch.scale.num_tokens, batch.scale.num_sequences) == (6, 2)
    expected = {"token_mean": [1 / 6] * 6, "sequence_mean": [1 / 8] * 4 + [1 / 4] * 2, "sequence_sum": [1 / 18] * 6}
    for aggregation, weights in expected.items():
        for parts in ([batch], shard(batch, 3)):
            micros = [
                m for b in parts for m in pack(b, token_budget=64, layout="padded", aggregation=aggregation, pad_id=0)
            ]
            by_row = {
                i: m.token_weights[m.sequence_index == i].tolist() for m in micros for i in m.sequence_index.tolist()
            }
            if len(parts) == 1:
                assert [w for i in sorted(by_row) for w in by_row[i]] == pytest.approx(weights)
            assert sum(float(m.token_weights.sum()) for m in micros) == pytest.approx(sum(weights))


def test_a_mini_batch_has_whole_groups_although_their_rows_have_several_prompts() -> None:
    rows = [(0, [1]), (0, [1, 2]), (0, [1]), (0, [1, 3]), (1, [5]), (1, [5])]
    ids, logprobs = np.ones(1, np.int32), np.zeros(1, np.float32)
    sequences = [ScoredSequence(np.array(prompt, np.int32), ids, 1.0, logprobs, group=group) for group, prompt in rows]
    parts = mini_batches(with_scale(sequences, TOKEN_LIMIT), 2)
    assert [[sequence.group for sequence in part.sequences] for part in parts] == [[0] * 4, [1] * 2]


def of_group(rewards: Rewards, *, use_std: bool = True, epsilon: float = 1e-6) -> FloatArray:
    return group_advantages(rewards_array(rewards), use_std=use_std, epsilon=epsilon)


def test_advantages_by_hand() -> None:
    # mean 1/4; squared deviations 9/16 + 3/16 = 3/4; n − 1 = 3; std = 1/2, to which epsilon is added.
    assert of_group([1, 0, 0, 0], epsilon=1e-12) == pytest.approx([1.5, -0.5, -0.5, -0.5])
    assert of_group([1, 0, 0, 0], epsilon=0.5) == pytest.approx([0.75, -0.25, -0.25, -0.25])
    assert of_group([1, 0, 0, 0], use_std=False) == pytest.approx([0.75, -0.25, -0.25, -0.25])
    # Samples without evidence enter neither mean nor std.
    with_gap = of_group([1, None, 0, 0, None, 0])
    assert np.isnan(with_gap[[1, 4]]).all()
    assert with_gap[[0, 2, 3, 5]] == pytest.approx(of_group([1, 0, 0, 0]), abs=0)
    # Rounding is no signal: the float mean of seven times 0.1 is not 0.1.
    assert (of_group([0.1] * 7, epsilon=1e-20) == 0).all()
    for kind in (MaxRLAdvantageConfig(), ShrinkageAdvantageConfig()):
        for equal in ([[0.1] * 6], [[0.1] * 6, [0.1] * 7]):
            assert all((made == 0).all() for made in step_advantages(equal, LossConfig(), kind))
    # Without noise within the groups, λ = 0: each reward is compared with its own group alone.
    for made in step_advantages([[0.1] * 6, [0.7] * 6], LossConfig(), ShrinkageAdvantageConfig()):
        assert (made == 0).all()
    with pytest.raises(ValueError, match="not finite"):
        of_group([1.0, float("nan")])
    with pytest.raises(TrainingError, match="maxrl"):
        step_advantages([[1.0, -1.0]], LossConfig(), MaxRLAdvantageConfig())


@pytest.mark.parametrize(
    ("settings", "groups", "expected"),
    [
        # (R − mean)/mean: mean ¼ gives 3, −1, −1, −1; no success gives 0; a sample without evidence is left out.
        (MaxRLAdvantageConfig(), [[1, 0, 0, 0], [0, 0], [1, None, 0]], [[3, -1, -1, -1], [0, 0], [1, None, -1]]),
        # Means ½, 1, 0; variances of them ½/2, 0, 0.
        # First group: v = 0, so λ = 0, b is the other sample's reward. Second: the others have v = ⅛ and means ½, 0,
        # s = 1/16; λ = ⅔·⅔ = 4/9, b = 5/9·1 + 4/9·¼ = ⅔. Third: b = 4/9·¾ = ⅓.
        (ShrinkageAdvantageConfig(), [[1, 0], [1, 1], [0, 0]], [[1, -1], [1 / 3, 1 / 3], [-1 / 3, -1 / 3]]),
        # First: the others' means ⅓, 0 have variances ⅓/3, 0; v = 1/18, s = 1/36; λ = 4/9, b = 5/9 + 4/9·⅙ = 17/27.
        # Second: v = 0. Third: means 1, ⅓; s = 1/9; λ = ⅔·⅓ = 2/9, b = 2/9·⅔.
        (
            ShrinkageAdvantageConfig(),
            [[1, 1], [1, 0, 0], [0, 0]],
            [[10 / 27, 10 / 27], [1, -0.5, -0.5], [-4 / 27, -4 / 27]],
        ),
        # Alone it is leave-one-out, a single reward is compared with the other group, nothing with nothing.
        (ShrinkageAdvantageConfig(), [[1, 0, 0]], [[1, -0.5, -0.5]]),
        (ShrinkageAdvantageConfig(), [[1, None], [0, 0]], [[1, None], [0, 0]]),
        (ShrinkageAdvantageConfig(), [[1, None], [None, None]], [[0, None], [None, None]]),
    ],
)
def test_other_advantages_by_hand(
    settings: AdvantageSettings, groups: list[list[float | None]], expected: list[list[float | None]]
) -> None:
    for made, wanted in zip(step_advantages(groups, LossConfig(), settings), expected, strict=True):
        assert [None if np.isnan(value) else value for value in made] == pytest.approx(wanted, abs=1e-12)


def test_zero_variance_means_nothing_to_compare() -> None:
    alike: tuple[Rewards, ...] = ([1, 1, 1], [1, None, 1], [1, None], [None, None], [0])
    assert [zero_variance(rewards) for rewards in (*alike, [1, 0])] == [True] * 5 + [False]


def test_reward_metrics_by_hand() -> None:
    metrics = reward_metrics([[1, 0, None], [1, 1, 1], [None, None, None], [0, 0, 1]])
    # Evidence: 1 0 | 1 1 1 | 0 0 1 = 5 of 8; one of three groups with evidence has no variance.
    assert metrics["reward/mean"] == pytest.approx(5 / 8)
    assert metrics["reward/std"] == pytest.approx(math.sqrt((5 * (3 / 8) ** 2 + 3 * (5 / 8) ** 2) / 7))
    assert metrics["reward/zero_variance_fraction"] == pytest.approx(1 / 3)
    # Two rewards are enough for a spread: deviations ±1/2, √(2 · 1/4 / 1). Without data a metric is left out.
    assert reward_metrics([[1, 0]])["reward/std"] == pytest.approx(math.sqrt(0.5))
    assert reward_metrics([[None, None]]) == {}
    assert "reward/std" not in reward_metrics([[1.0, None]])


@pytest.mark.parametrize(
    ("total", "settings", "expected"),
    [
        # Warm-up rises evenly and reaches the rate at its last step.
        (None, {"warmup_steps": 4}, [0.2, 0.4, 0.6, 0.8, 0.8, 0.8]),
        (None, {"warmup_steps": 0}, [0.8]),
        # Linear decay starts after it: 0, 1/4, 1/2, 3/4 of the four steps are done at steps 3 to 6.
        (6, {"schedule": "linear", "warmup_steps": 2}, [0.4, 0.8, 0.8, 0.6, 0.4, 0.2, 0.0, 0.0]),
        # (1 + cos(π/4))/2 = 0.853553 after a quarter, 1/2 after half, (1 − cos(π/4))/2 after three quarters.
        (4, {"schedule": "cosine"}, [0.8, 0.6828427, 0.4, 0.1171573, 0.0, 0.0]),
    ],
)
def test_learning_rates_by_hand(total: int | None, settings: dict[str, Any], expected: list[float]) -> None:
    chosen = OptimizerConfig(learning_rate=0.8, **settings)
    rates = [learning_rate(chosen, step, step - 1, total) for step in range(1, len(expected) + 1)]
    assert rates == pytest.approx(expected, abs=1e-7)
