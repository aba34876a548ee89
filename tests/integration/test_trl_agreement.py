"""Loss, gradient, clip and KL metrics agree with TRL's GRPOTrainer on the same batch.

TRL's own trainer is built on CPU around a small random policy, and its loss is asked about a hand-made batch: left
padded prompts, right padded responses. TRL's names for the aggregations: `bnpo` and `dapo` are the mean over tokens,
`grpo` the mean over sequences of their means, `dr_grpo` the sum over the token limit.
"""

from typing import Any

import numpy as np
import pytest
import torch
from support.tiny_policy import TOKEN_LIMIT, VOCABULARY, gradient_vector, random_batch, relative_difference, tiny_policy
from torch import Tensor

from gxpo_trainer.algo.batch import Aggregation, StepBatch, group_advantages
from gxpo_trainer.algo.losses import combine_statistics, finish_statistics, policy_loss
from gxpo_trainer.algo.packing import pack
from gxpo_trainer.config import LossConfig
from gxpo_trainer.learner.logprobs import PolicyModule

trl = pytest.importorskip("trl", reason="trl, an optional test dependency, is not installed")

PAIRS: list[tuple[Aggregation, str]] = [
    ("token_mean", "bnpo"),
    ("token_mean", "dapo"),
    ("sequence_mean", "grpo"),
    ("sequence_sum", "dr_grpo"),
]
TEMPERATURE = 0.8


def small_tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, VOCABULARY)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from datasets import Dataset

    args = trl.GRPOConfig(
        output_dir=str(tmp_path_factory.mktemp("trl")),
        use_cpu=True,
        bf16=False,
        report_to=[],
        per_device_train_batch_size=2,
        num_generations=2,
        max_completion_length=TOKEN_LIMIT,
        temperature=TEMPERATURE,
        # Off: its k3 term is not multiplied by ρ, as in the paper of GRPO.
        use_bias_correction_kl=False,
        gradient_checkpointing=False,
    )
    return trl.GRPOTrainer(
        model=tiny_policy(),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["w2", "w3"]}),
        processing_class=small_tokenizer(),
    )


def apply_settings(trainer: Any, loss_type: str, settings: LossConfig) -> None:
    """What the trainer keeps as attributes of its own; so one trainer serves all cases."""
    trainer.loss_type = loss_type
    trainer.epsilon_low, trainer.epsilon_high = settings.clip_low, settings.clip_high
    trainer.importance_sampling_level = "sequence" if settings.surrogate == "gspo" else "token"
    if settings.surrogate == "cispo":
        # TRL's bound is the largest weight itself, and it has no lower one.
        trainer.epsilon_high = 1 + settings.clip_high
    trainer.beta = settings.kl_beta
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = settings.corrects
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    trainer.model.zero_grad()


def shifted(batch: StepBatch, scale: float, salt: int) -> list[Tensor]:
    """Made-up log-probabilities of another policy: the plain ones of the policy, moved by `scale`·noise."""
    generator = torch.Generator().manual_seed(salt)
    policy = PolicyModule(tiny_policy())
    micros = pack(batch, token_budget=10_000, layout="padded", aggregation="token_mean", pad_id=0)
    with torch.no_grad():
        own = torch.cat([policy(m, TEMPERATURE, False).logprobs for m in micros])
    owners = torch.cat([m.sequence_index for m in micros])
    noise = scale * torch.randn(own.shape, generator=generator)
    return [(own + noise)[owners == i] for i in range(len(batch.sequences))]


def padded(rows: list[Tensor], side: str, value: float = 0.0) -> Tensor:
    width = max(len(row) for row in rows)
    pads = [torch.full((width - len(row),), value, dtype=row.dtype) for row in rows]
    return torch.stack([torch.cat([p, r] if side == "left" else [r, p]) for p, r in zip(pads, rows, strict=True)])


def trl_inputs(batch: StepBatch, old: list[Tensor], reference: list[Tensor], settings: LossConfig) -> dict[str, Tensor]:
    prompts = [torch.from_numpy(s.prompt_ids).long() for s in batch.sequences]
    responses = [torch.from_numpy(s.response_ids).long() for s in batch.sequences]
    inputs = {
        "prompt_ids": padded(prompts, "left"),
        "prompt_mask": padded([torch.ones_like(p) for p in prompts], "left"),
        "completion_ids": padded(responses, "right"),
        "completion_mask": padded([torch.ones_like(r) for r in responses], "right"),
        "advantages": torch.tensor([s.advantage for s in batch.sequences]),
        "old_per_token_logps": padded(old, "right"),
        "ref_per_token_logps": padded(reference, "right"),
        "num_items_in_batch": torch.tensor(sum(len(r) for r in responses)),
    }
    if settings.corrects:
        # What TRL calculates besides its loss, by the documentation of its modes.
        gaps = [o - torch.from_numpy(s.sampler_logprobs) for o, s in zip(old, batch.sequences, strict=True)]
        whole = settings.correction == "sequence_mask"
        ratios = padded([(gap.sum().expand_as(gap) if whole else gap).exp() for gap in gaps], "right")
        kept = (ratios >= settings.importance_low) & (ratios <= settings.importance_high)
        truncated = settings.correction == "token_truncate"
        inputs["importance_sampling_ratio"] = ratios.clamp(max=settings.importance_high) if truncated else ratios * kept
    return inputs


def ours(
    batch: StepBatch, old: list[Tensor], reference: list[Tensor], aggregation: Aggregation, settings: LossConfig
) -> tuple[dict[str, float], Tensor]:
    policy = PolicyModule(tiny_policy())
    sums = None
    for micro in pack(batch, token_budget=60, layout="padded", aggregation=aggregation, pad_id=0):
        owners = micro.sequence_index.unique_consecutive().tolist()
        loss, part = policy_loss(
            policy(micro, TEMPERATURE, True),
            micro,
            torch.cat([old[i] for i in owners]),
            torch.cat([reference[i] for i in owners]) if settings.kl_beta > 0 else None,
            settings,
        )
        loss.backward()
        sums = part if sums is None else combine_statistics(sums, part)
    return finish_statistics(sums), gradient_vector(policy)


def compared(
    trainer: Any, aggregation: Aggregation, loss_type: str, settings: LossConfig, seed: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Our metrics and those that TRL logs of one batch; loss, gradient and KL are equal."""
    batch = random_batch(num_prompts=5, num_samples=4, seed=seed)
    old, reference = shifted(batch, 0.3, 1), shifted(batch, 0.4, 2)
    metrics, gradient = ours(batch, old, reference, aggregation, settings)
    apply_settings(trainer, loss_type, settings)
    loss = trainer.compute_loss(trainer.model, trl_inputs(batch, old, reference, settings))
    loss.backward()
    logged = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert relative_difference(gradient, gradient_vector(trainer.model)) < 1e-5
    if settings.kl_beta > 0:
        assert metrics["kl"] == pytest.approx(logged["kl"], rel=1e-5)
    return metrics, logged


SETTINGS = {
    "plain": LossConfig(),
    "clip_higher_with_kl": LossConfig(clip_low=0.1, clip_high=0.28, kl_beta=0.04),
    "token_truncate": LossConfig(kl_beta=0.5, correction="token_truncate", importance_high=1.3),
    "token_mask": LossConfig(correction="token_mask", importance_low=0.7, importance_high=1.3),
    "sequence_mask": LossConfig(correction="sequence_mask", importance_low=0.5, importance_high=2.0),
    "gspo": LossConfig(surrogate="gspo", clip_low=0.05, clip_high=0.08),
}
CISPO = LossConfig(surrogate="cispo", clip_low=1.0, clip_high=0.2, kl_beta=0.1)
CASES = [
    *(pytest.param(*pair, given, id=f"{name}-{pair[1]}") for name, given in SETTINGS.items() for pair in PAIRS),
    # TRL's loss of this name has one aggregation.
    pytest.param("token_mean", "cispo", CISPO, id="cispo"),
]


@pytest.mark.parametrize(("aggregation", "loss_type", "settings"), CASES)
def test_loss_and_metrics_agree(trainer: Any, aggregation: Aggregation, loss_type: str, settings: LossConfig) -> None:
    cispo = settings.surrogate == "cispo"
    metrics, logged = compared(trainer, aggregation, loss_type, settings, 11)
    if cispo:
        assert metrics["clip_high_fraction"] == pytest.approx(logged["cispo_clip_ratio"], abs=1e-6)
    elif settings.surrogate != "gspo":  # TRL counts clipped responses then, not tokens
        assert metrics["clip_fraction"] == pytest.approx(logged["clip_ratio/region_mean"], abs=1e-6)
        assert metrics["clip_low_fraction"] == pytest.approx(logged["clip_ratio/low_mean"], abs=1e-6)
        assert metrics["clip_high_fraction"] == pytest.approx(logged["clip_ratio/high_mean"], abs=1e-6)
    assert metrics["entropy"] == pytest.approx(logged["entropy"], rel=1e-5)
    assert 0.05 < metrics["clip_fraction"] < 0.9, "the batch clips too little or too much to compare"


def test_group_advantages_agree_with_trls_standard_deviation() -> None:
    from trl.trainer.utils import nanstd

    rewards = np.random.default_rng(0).random((6, 5))
    table = torch.from_numpy(rewards)
    expected = (table - table.mean(1, keepdim=True)) / (nanstd(table, dim=1)[:, None] + 1e-4)
    own = np.stack([group_advantages(row, use_std=True, epsilon=1e-4) for row in rewards])
    assert own == pytest.approx(expected.numpy(), abs=1e-12)
