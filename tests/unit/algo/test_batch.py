"""Batches: weights, layouts, shards, and that no way of cutting a batch changes its loss or gradient."""

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
    prompt_groups,
    shard,
    with_scale,
)
from gxpo_trainer.algo.losses import policy_loss
from gxpo_trainer.algo.packing import Layout, MicroBatch, dummy_micro_batch, pack
from gxpo_trainer.config import LossConfig
from gxpo_trainer.learner.logprobs import PolicyModule
from gxpo_trainer.types import Group, Prompt, Sample, ScoredGroup, Verdict, VerdictStatus

AGGREGATIONS: tuple[Aggregation, ...] = ("token_mean", "sequence_mean", "sequence_sum")
LAYOUTS: tuple[Layout, ...] = ("padded", "shared", "packed")
OPTIONS = LossConfig(kl_beta=0.3, correction="token_truncate", importance_high=1.5)


def loss_and_gradient(policy: PolicyModule, micros: list[MicroBatch]) -> tuple[float, Tensor]:
    """Accumulated over micro-batches; old and reference log-probabilities are made up from the token ids."""
    policy.zero_grad()
    total = 0.0
    for micro in micros:
        outputs = policy(micro, 1.0, False)
        old = outputs.logprobs.detach() + 0.3 * torch.sin(micro.target_ids.double())
        reference = outputs.logprobs.detach() + 0.3 * torch.cos(micro.target_ids.double())
        loss, _ = policy_loss(outputs, micro, old, reference, OPTIONS)
        loss.backward()
        total += loss.item()
    return total, gradient_vector(policy)


def reference_loss(policy: PolicyModule, batch: StepBatch, aggregation: Aggregation) -> tuple[float, Tensor]:
    """The same loss written sequence by sequence, unpadded, from the formulas."""
    policy.zero_grad()
    sums, means = [], []
    for sequence in batch.sequences:
        if not sequence.in_loss:
            continue
        logprobs, _ = plain_logprobs(policy.model, sequence)
        ids = torch.from_numpy(sequence.response_ids).double()
        old = logprobs.detach() + 0.3 * ids.sin()
        q = logprobs.detach() + 0.3 * ids.cos() - logprobs
        ratio, advantage = (logprobs - old).exp(), sequence.advantage
        surrogate = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        cap = (old - torch.from_numpy(sequence.sampler_logprobs)).exp().clamp(max=1.5)
        token = -cap * surrogate + 0.3 * (q.exp() - q - 1)
        sums.append(token.sum())
        means.append(token.mean())
    lengths = sum(len(s.response_ids) for s in batch.sequences if s.in_loss)
    loss = {
        "token_mean": sum(sums) / lengths,
        "sequence_mean": sum(means) / len(means),
        "sequence_sum": sum(sums) / (len(sums) * TOKEN_LIMIT),
    }[aggregation]
    assert isinstance(loss, Tensor)
    loss.backward()
    return loss.item(), gradient_vector(policy)


@pytest.fixture(scope="module")
def policy() -> PolicyModule:
    return PolicyModule(tiny_policy(dtype=torch.float64))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("token_budget", [1, 60, 100_000])
def test_accumulated_gradient_equals_that_of_the_formula(
    policy: PolicyModule, aggregation: Aggregation, layout: Layout, token_budget: int
) -> None:
    batch = random_batch(left_out=0.2)
    expected_loss, expected = reference_loss(policy, batch, aggregation)
    micros = pack(batch, token_budget=token_budget, layout=layout, aggregation=aggregation, pad_id=0)
    loss, gradient = loss_and_gradient(policy, micros)
    # The per-token weights are float32, so one part in 10⁷ is the limit.
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert relative_difference(gradient, expected) < 1e-6


@pytest.mark.parametrize("layout", LAYOUTS)
def test_accumulated_gradient_equals_one_big_batch(policy: PolicyModule, layout: Layout) -> None:
    batch = random_batch(seed=1)
    big = pack(batch, token_budget=100_000, layout=layout, aggregation="token_mean", pad_id=0)
    many = pack(batch, token_budget=40, layout=layout, aggregation="token_mean", pad_id=0)
    assert len(big) == 1
    assert len(many) > 3
    (loss_big, gradient_big), (loss, gradient) = loss_and_gradient(policy, big), loss_and_gradient(policy, many)
    assert loss == pytest.approx(loss_big, rel=1e-12)
    assert relative_difference(gradient, gradient_big) < 1e-12


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("layout", ["packed", "shared"])
def test_layouts_agree_in_fp32(layout: Layout, attention: str) -> None:
    policy = PolicyModule(tiny_policy(seed=2))
    policy.model.set_attn_implementation(attention)
    batch = random_batch(seed=2, num_prompts=6)
    loss, gradient = loss_and_gradient(policy, pack_all(batch, "padded"))
    other_loss, other_gradient = loss_and_gradient(policy, pack_all(batch, layout))
    assert other_loss == pytest.approx(loss, rel=1e-5)
    assert relative_difference(other_gradient, gradient) < 1e-5


def same_prompt(response_lengths: list[int], prompt_length: int) -> StepBatch:
    prompt = np.arange(prompt_length, dtype=np.int32) % 30
    rows = [np.arange(m, dtype=np.int32) % 30 for m in response_lengths]
    return with_scale([ScoredSequence(prompt, r, 1.0, np.zeros(len(r), np.float32)) for r in rows], TOKEN_LIMIT)


def test_short_responses_share_their_prompt() -> None:
    (micro,) = pack(same_prompt([20] * 8, 30), token_budget=4096, layout="shared", aggregation="token_mean", pad_id=0)
    assert micro.input_ids.shape == (1, 30 + 8 * 20)
    assert micro.attention_mask is not None
    assert micro.attention_mask.shape == (1, 1, 190, 190)


def test_long_responses_do_not_share_and_need_no_mask() -> None:
    # Joining 500 tokens to a row of 530 would cost 500 + (1030² − 530²)/1024 = 1262, alone they cost 530 + 274.
    (micro,) = pack(same_prompt([500] * 2, 30), token_budget=4096, layout="shared", aggregation="token_mean", pad_id=0)
    assert micro.input_ids.shape == (2, 530)
    assert micro.attention_mask is None


@pytest.mark.parametrize("token_budget", [70, 89])
def test_shared_rows_fill_the_budget_and_stay_within_it(token_budget: int) -> None:
    batch = same_prompt([20] * 8, 30)
    micros = pack(batch, token_budget=token_budget, layout="shared", aggregation="token_mean", pad_id=0)
    assert [micro.input_ids.shape for micro in micros] == [(1, 70)] * 4


@pytest.mark.parametrize(("prompt", "response", "width"), [(38, 142, 322), (38, 143, 181), (1024, 1024, 2048)])
def test_a_response_joins_a_row_only_where_that_costs_less(prompt: int, response: int, width: int) -> None:
    # With n prompt tokens and m a response: joined when m + ((n + 2m)² − (n + m)²)/1024 < n + m + (n + m)²/1024, which
    # is 2m² < n² + 1024n. n = 38: 40,356, between 2·142² = 40,328 and 2·143². n = m = 1024: equal, so not joined.
    batch = same_prompt([response] * 2, prompt)
    (micro,) = pack(batch, token_budget=4096, layout="shared", aggregation="token_mean", pad_id=0)
    assert micro.input_ids.shape[1] == width


@pytest.mark.parametrize(("layout", "shape"), [("padded", (2, 10)), ("packed", (1, 20))])
@pytest.mark.parametrize("token_budget", [20, 29])
def test_micro_batches_fill_the_budget_and_stay_within_it(
    layout: Layout, shape: tuple[int, int], token_budget: int
) -> None:
    batch = same_prompt([6] * 4, 4)
    micros = pack(batch, token_budget=token_budget, layout=layout, aggregation="token_mean", pad_id=0)
    assert [tuple(micro.input_ids.shape) for micro in micros] == [shape] * 2


def test_model_without_full_attention_refuses_shared_prompts(policy: PolicyModule) -> None:
    (micro,) = pack(same_prompt([3, 3], 4), token_budget=99, layout="shared", aggregation="token_mean", pad_id=0)
    sliding = PolicyModule(tiny_policy())
    sliding.model.config.layer_types = ["full_attention", "sliding_attention"]
    assert policy.can_share_prompts
    assert not sliding.can_share_prompts
    with pytest.raises(ValueError, match=r"learner\.packing = .shared. needs full attention"):
        sliding(micro, 1.0, False)


def pack_all(batch: StepBatch, layout: Layout) -> list[MicroBatch]:
    return pack(batch, token_budget=90, layout=layout, aggregation="sequence_mean", pad_id=0)


def test_padding_token_is_irrelevant(policy: PolicyModule) -> None:
    batch = random_batch(seed=3)
    runs = [
        loss_and_gradient(policy, pack(batch, token_budget=200, layout="padded", aggregation="token_mean", pad_id=pad))
        for pad in (0, 36)
    ]
    assert runs[0][0] == runs[1][0]
    assert torch.equal(runs[0][1], runs[1][1])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_shards_sum_to_the_whole(policy: PolicyModule, aggregation: Aggregation, num_ranks: int) -> None:
    batch = random_batch(seed=4, num_prompts=5, left_out=0.3)

    def run(part: StepBatch) -> tuple[float, Tensor]:
        micros = pack(part, token_budget=64, layout="padded", aggregation=aggregation, pad_id=0)
        return loss_and_gradient(policy, micros)

    loss, gradient = run(batch)
    parts = [run(part) for part in shard(batch, num_ranks)]
    assert sum(part[0] for part in parts) == pytest.approx(loss, rel=1e-12)
    total = torch.stack([part[1] for part in parts]).sum(0)
    assert relative_difference(total, gradient) < 1e-12


def visible_context(micro: MicroBatch, place: int) -> list[int]:
    """The token ids that the token at a flat place sees, itself included, by the rules of causal attention.

    With a mask: what it allows. Without: what stands before it in its row, back to the last position 0.
    """
    row, column = divmod(place, micro.input_ids.shape[1])
    ids, positions = micro.input_ids[row], micro.position_ids[row]
    if micro.attention_mask is None:
        start = int((positions[: column + 1] == 0).nonzero()[-1])
        seen = torch.arange(start, column + 1)
    else:
        seen = micro.attention_mask[row, 0, column].nonzero()[:, 0]
    assert positions[seen].tolist() == list(range(len(seen)))
    return ids[seen].tolist()


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10**6), st.integers(1, 8), st.integers(1, 4), st.integers(1, 300), st.sampled_from(LAYOUTS),
    st.sampled_from([0.0, 0.4, 1.0]),
)  # fmt: skip
def test_each_token_in_the_loss_is_packed_exactly_once(
    seed: int, num_prompts: int, num_samples: int, token_budget: int, layout: Layout, left_out: float
) -> None:
    batch = random_batch(seed=seed, num_prompts=num_prompts, num_samples=num_samples, left_out=left_out)
    micros = pack(batch, token_budget=token_budget, layout=layout, aggregation="token_mean", pad_id=0)
    assert micros
    seen: dict[int, list[int]] = {}
    for micro in micros:
        rows, width = micro.input_ids.shape
        alone = len(micro.sequence_index.unique()) == 1
        assert rows * width <= token_budget or alone
        if micro.token_weights.sum() == 0:
            continue
        for owner in micro.sequence_index.unique().tolist():
            mine = micro.sequence_index == owner
            sequence = batch.sequences[owner]
            assert owner not in seen
            seen[owner] = micro.target_ids[mine].tolist()
            whole = [*sequence.prompt_ids.tolist(), *sequence.response_ids.tolist()]
            for t, place in enumerate(micro.target_index[mine].tolist()):
                assert visible_context(micro, place) == whole[: len(sequence.prompt_ids) + t]
            assert micro.advantages[mine].tolist() == pytest.approx([sequence.advantage] * int(mine.sum()), rel=1e-6)
            assert micro.sampler_logprobs[mine].tolist() == sequence.sampler_logprobs.tolist()
    expected = {i: batch.sequences[i].response_ids.tolist() for i in batch.in_loss()}
    assert seen == expected


def test_token_weights_by_hand() -> None:
    scale = LossScale(num_tokens=10, num_sequences=4, token_limit=8)
    assert scale.token_weight(5, "token_mean") == pytest.approx(0.1)
    assert scale.token_weight(5, "sequence_mean") == pytest.approx(0.05)
    assert scale.token_weight(5, "sequence_sum") == pytest.approx(1 / 32)
    for unknown in ("mean", "sequence", "token_sum", "zeros"):
        with pytest.raises(ValueError, match=f"aggregation = '{unknown}'"):
            scale.token_weight(5, unknown)  # type: ignore[arg-type]


def test_scale_counts_only_sequences_in_the_loss() -> None:
    batch = random_batch(seed=5, left_out=0.5)
    inside = [s for s in batch.sequences if s.in_loss]
    assert 0 < len(inside) < len(batch.sequences)
    assert batch.scale == LossScale(sum(len(s.response_ids) for s in inside), len(inside), TOKEN_LIMIT)


def test_padded_rows_are_of_similar_length() -> None:
    batch = random_batch(num_prompts=40, seed=6)
    micros = pack(batch, token_budget=120, layout="padded", aggregation="token_mean", pad_id=0)
    real = sum(s.num_tokens for s in batch.sequences)
    padded = sum(m.input_ids.numel() for m in micros)
    assert padded < 1.1 * real


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


def test_shard_keeps_prompt_groups_whole() -> None:
    batch = random_batch(num_prompts=6, num_samples=4, seed=8)
    for part in shard(batch, 3):
        assert all(len(group) == 4 for group in prompt_groups(part))


def test_more_ranks_than_sequences_is_refused() -> None:
    with pytest.raises(ValueError, match=r"placement\.learner_ranks = 13"):
        shard(random_batch(), 13)


def test_mini_batches_are_whole_groups_with_their_own_denominators() -> None:
    batch = random_batch(num_prompts=5, num_samples=3, seed=9)
    parts = mini_batches(batch, 2)
    assert [len(part.sequences) for part in parts] == [9, 6]
    assert tuple(s for part in parts for s in part.sequences) == batch.sequences
    for part in parts:
        assert part.scale == with_scale(part.sequences, TOKEN_LIMIT).scale


def test_more_mini_batches_than_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"learner\.mini_batches = 5"):
        mini_batches(random_batch(num_prompts=4), 5)


def test_batch_without_a_sequence_in_the_loss_packs_to_one_idle_pass(policy: PolicyModule) -> None:
    batch = random_batch(left_out=1.0)
    micros = pack(batch, token_budget=64, layout="packed", aggregation="sequence_mean", pad_id=3)
    assert len(micros) == 1
    loss, gradient = loss_and_gradient(policy, micros)
    assert loss == 0
    assert gradient.abs().max() == 0
    assert torch.equal(micros[0].input_ids, dummy_micro_batch(3).input_ids)


def test_an_idle_pass_predicts_its_second_token_from_its_first() -> None:
    dummy = dummy_micro_batch(3)
    assert (dummy.input_ids.tolist(), dummy.position_ids.tolist()) == ([[3, 3]], [[0, 1]])
    assert (dummy.target_index.tolist(), dummy.target_ids.tolist(), dummy.sequence_index.tolist()) == ([0], [3], [0])
    for values in (dummy.advantages, dummy.token_weights, dummy.sampler_logprobs):
        assert values.tolist() == [0.0]


def test_unknown_layout_and_budget_are_refused() -> None:
    with pytest.raises(ValueError, match=r"learner\.packing = 'diagonal'"):
        pack(random_batch(), token_budget=8, layout="diagonal", aggregation="token_mean", pad_id=0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"learner\.token_budget = 0"):
        pack(random_batch(), token_budget=0, layout="packed", aggregation="token_mean", pad_id=0)


def test_malformed_sequences_are_refused() -> None:
    ids, none = np.array([1, 2], dtype=np.int32), np.array([], dtype=np.int32)
    logprobs = np.array([-1.0, -1.0], dtype=np.float32)
    with pytest.raises(ValueError, match="prompt_ids is empty"):
        ScoredSequence(none, ids, 0.0, logprobs)
    with pytest.raises(ValueError, match="2 response_ids but 1"):
        ScoredSequence(ids, ids, 0.0, logprobs[:1])
    with pytest.raises(ValueError, match="in_loss = False"):
        ScoredSequence(ids, none, 0.0, logprobs[:0])
    with pytest.raises(ValueError, match="advantage nan"):
        ScoredSequence(ids, ids, float("nan"), logprobs)


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


def test_neighbouring_groups_with_equal_prompts_stay_apart() -> None:
    """Eight prompts of one text: groups are divided by their number, and their samples stay together."""
    statuses: list[VerdictStatus] = ["correct", "wrong"]
    batch, _ = make_batch([scored_group("a", statuses) for _ in range(8)], LossConfig(), token_limit=9)
    assert prompt_groups(batch) == [[i, i + 1] for i in range(0, 16, 2)]
    assert [len(part.sequences) for part in mini_batches(batch, 8)] == [2] * 8
    for share in shard(mini_batches(batch, 2)[1], 2):
        assert prompt_groups(share) == [[0, 1], [2, 3]]


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


@pytest.mark.parametrize("option", ["drop", "resample"])
def test_groups_of_equal_rewards_are_left_out_unless_kept(option: str) -> None:
    scored = [scored_group("a", ["correct", "wrong"]), scored_group("bb", ["correct", "correct"])]
    settings = LossConfig.model_validate({"zero_variance": option})
    batch, _ = make_batch(scored, settings, token_limit=9)
    assert [s.in_loss for s in batch.sequences] == [True, True, False, False]
    assert batch.scale.num_sequences == 2


def test_masked_truncated_response_still_counts_in_its_groups_mean() -> None:
    scored = [scored_group("a", ["correct", "wrong", "wrong", "wrong"], truncated=(1,))]
    settings = LossConfig(advantage_std=False, mask_truncated=True)
    batch, _ = make_batch(scored, settings, token_limit=9)
    assert [s.in_loss for s in batch.sequences] == [True, False, True, True]
    assert batch.sequences[0].advantage == pytest.approx(0.75)


def test_step_without_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="no scored group"):
        make_batch([], LossConfig(), token_limit=9)
