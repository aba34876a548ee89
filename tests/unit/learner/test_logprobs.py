"""PolicyModule: log-probabilities and gradients of plain log_softmax, in bounded memory; each family of models; and
variable-length attention.

The kernel of the latter runs on GPUs only (tests/gpu/test_learner.py); here it is computed sequence by sequence.
"""

from __future__ import annotations

import copy
import json
import shutil
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file
from support.tiny_families import FAMILIES, save_family
from support.tiny_policy import (
    VOCABULARY,
    by_sequence,
    gradient_vector,
    plain_logprobs,
    random_batch,
    relative_difference,
    tiny_policy,
)
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, Qwen2ForCausalLM

from gxpo_trainer.algo.batch import supervised_batch
from gxpo_trainer.algo.losses import combine_statistics, finish_statistics, supervised_loss
from gxpo_trainer.algo.packing import Layout, pack
from gxpo_trainer.config import LearnerConfig, LoraConfig, ModelConfig, RunConfig
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.learner.checkpoint import write_policy
from gxpo_trainer.learner.logprobs import (
    PolicyModule,
    TokenScorer,
    can_share_prompts,
    layer_types,
    sequence_boundaries,
    varlen_attention,
)
from gxpo_trainer.learner.models import STARTER_FOLDER, config_json, load_policy
from gxpo_trainer.planner import architectures

CHUNKS = [1, 7 * VOCABULARY, 2**25]
"""One token at a time, seven, everything at once (kept for the backward pass)."""


def weights_for(targets: Tensor) -> Tensor:
    return torch.sin(targets.double() + 1)


def module_results(
    policy: PolicyModule, temperature: float = 1.0, layout: Layout = "padded"
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities and entropies in the order of the batch, and the gradient of a weighted sum of them."""
    micros = pack(random_batch(seed=3), token_budget=70, layout=layout, aggregation="token_mean", pad_id=0)
    policy.zero_grad()
    logprobs, entropies = [], []
    for micro in micros:
        outputs = policy(micro, temperature, True)
        (outputs.logprobs * weights_for(micro.target_ids)).sum().backward()
        logprobs.append((micro.sequence_index, outputs.logprobs))
        entropies.append((micro.sequence_index, outputs.entropy))
    return by_sequence(logprobs), by_sequence(entropies), gradient_vector(policy)


@pytest.mark.parametrize("layout", ["padded", "shared", "packed"])
def test_supervised_loss_and_gradient_are_those_of_transformers(layout: Layout) -> None:
    sampled = [sequence for sequence in random_batch(seed=5, left_out=0.2).sequences if sequence.in_loss]
    prompts, completions = [s.prompt_ids for s in sampled], [s.response_ids for s in sampled]
    policy = PolicyModule(tiny_policy(dtype=torch.float64))
    loss = torch.zeros(())
    parts = None
    for micro in pack(
        supervised_batch(prompts, completions, 99), token_budget=70, layout=layout, aggregation="token_mean", pad_id=0
    ):
        part, statistics = supervised_loss(policy(micro, 1.0, True), micro)
        part.backward()
        loss, parts = loss + part.detach(), statistics if parts is None else combine_statistics(parts, statistics)
    plain = tiny_policy(dtype=torch.float64)
    width = max(s.num_tokens for s in sampled)
    ids = torch.zeros(len(sampled), width, dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        ids[row, : len(prompt) + len(completion)] = torch.from_numpy(np.concatenate([prompt, completion]))
        labels[row, len(prompt) : len(prompt) + len(completion)] = torch.from_numpy(completion)
    expected = plain(input_ids=ids, labels=labels).loss
    expected.backward()
    # Token weights are float32.
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert relative_difference(gradient_vector(policy), gradient_vector(plain)) < 1e-6
    metrics = finish_statistics(parts or {})
    assert metrics.keys() == {"loss", "entropy", "cross_entropy"}, "no ratio, no sampler to differ from"
    assert metrics["cross_entropy"] == pytest.approx(expected.item(), rel=1e-6)


def plain_results(model: nn.Module, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    model.zero_grad()
    logprobs, entropies = [], []
    for sequence in random_batch(seed=3).sequences:
        values, entropy = plain_logprobs(model, sequence, temperature)
        (values * weights_for(torch.from_numpy(sequence.response_ids))).sum().backward()
        logprobs.append(values.detach())
        entropies.append(entropy.detach())
    return torch.cat(logprobs), torch.cat(entropies), gradient_vector(model)


@pytest.mark.parametrize("chunk_elements", CHUNKS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("tied", [True, False])
def test_equals_full_log_softmax_in_float64(chunk_elements: int, temperature: float, tied: bool) -> None:
    policy = PolicyModule(tiny_policy(dtype=torch.float64, tied=tied), chunk_elements=chunk_elements)
    expected = plain_results(tiny_policy(dtype=torch.float64, tied=tied), temperature)
    for value, reference in zip(module_results(policy, temperature), expected, strict=True):
        assert relative_difference(value, reference) < 1e-12


@pytest.mark.parametrize("chunk_elements", CHUNKS)
def test_bf16_is_as_close_as_bf16_allows(chunk_elements: int) -> None:
    # Against float64 with the same (bf16) weights; 8 bits of mantissa through two layers.
    model = tiny_policy(dtype=torch.bfloat16)
    expected = plain_results(copy.deepcopy(model).double())
    logprobs, entropy, gradient = module_results(PolicyModule(model, chunk_elements=chunk_elements))
    assert relative_difference(logprobs, expected[0]) < 0.01
    assert relative_difference(entropy, expected[1]) < 0.01
    assert relative_difference(gradient, expected[2]) < 0.03


def lora(model: nn.Module, **options: Any) -> Any:
    torch.manual_seed(9)
    names = ["q_proj", "v_proj"]
    return peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules=names, init_lora_weights=False, **options))


@pytest.mark.parametrize("chunk_elements", CHUNKS)
def test_lora_gets_the_adapters_gradient_only(chunk_elements: int) -> None:
    policy = PolicyModule(lora(tiny_policy(dtype=torch.float64)), chunk_elements=chunk_elements)
    trained = [name for name, p in policy.named_parameters() if p.requires_grad]
    assert len(trained) == 8
    assert all("lora_" in name for name in trained)
    expected = plain_results(lora(tiny_policy(dtype=torch.float64)))
    for value, reference in zip(module_results(policy), expected, strict=True):
        assert relative_difference(value, reference) < 1e-12


def test_a_head_that_was_replaced_or_has_a_bias_is_refused() -> None:
    policy = PolicyModule(tiny_policy())
    micro = pack(random_batch(), token_budget=500, layout="padded", aggregation="token_mean", pad_id=0)[0]
    policy.model.lm_head.weight = nn.Parameter(policy.model.lm_head.weight.detach().clone())
    with pytest.raises(RuntimeError, match="replaced"):
        policy(micro, 1.0, False)

    biased: Qwen2ForCausalLM = tiny_policy(tied=False)
    biased.lm_head = nn.Linear(16, VOCABULARY, bias=True)
    with pytest.raises(ValueError, match="linear map without bias"):
        PolicyModule(biased)


class LiveMemory(TorchDispatchMode):
    """Peak bytes of tensors made by operations under the mode, and the largest single one."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                self.live.setdefault(reference.cdata, (reference, storage.nbytes()))
                self.largest = max(self.largest, storage.nbytes())
        self.live = {key: entry for key, entry in self.live.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return result


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize(("dtype", "gradient"), [(torch.float32, 4), (torch.bfloat16, 6)])
def test_large_vocabulary_never_has_all_logits_at_once(dtype: torch.dtype, gradient: int, with_entropy: bool) -> None:
    """gradient: bytes an element of the head, as the planner counts them."""
    vocabulary, width, num_tokens, chunk_tokens = 152_064, 8, 192, 8
    torch.manual_seed(0)
    head = nn.Linear(width, vocabulary, bias=False, dtype=dtype)
    scorer = TokenScorer(head, chunk_elements=chunk_tokens * vocabulary)
    hidden = torch.randn(num_tokens, width, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, vocabulary, (num_tokens,))
    with LiveMemory() as memory:
        logprobs, _ = scorer(hidden, targets, 1.0, with_entropy)
        logprobs.sum().backward()
    chunk = chunk_tokens * vocabulary * 4
    weight = vocabulary * width
    assert memory.largest <= max(chunk, 4 * weight)
    # Logits, softmax and one temporary of a chunk, and the weight's gradient.
    assert memory.peak <= 3 * chunk + gradient * weight + 1e6
    assert memory.peak < num_tokens * vocabulary * 4 / 3
    with LiveMemory() as plain:  # the counter counts what the plain way needs
        torch.log_softmax((hidden[:64] @ head.weight[:10_000].T).float(), dim=-1)[:, 0].sum().backward()
    assert plain.peak > 2 * 64 * 10_000 * 4


def test_bf16_weight_gradient_of_many_chunks_is_summed_in_fp32() -> None:
    torch.manual_seed(0)
    head = nn.Linear(4, 11, bias=False).bfloat16()
    hidden = torch.randn(3000, 4).bfloat16()
    targets = torch.randint(0, 3, (3000,))

    exact = head.weight.detach().double().requires_grad_()
    torch.log_softmax(hidden.double() @ exact.T, dim=-1).gather(1, targets[:, None]).sum().backward()
    TokenScorer(head, chunk_elements=11)(hidden, targets, 1.0, False)[0].sum().backward()
    # One rounding of the result is 2⁻⁹; 3,000 roundings of a bf16 sum would be far more.
    assert relative_difference(head.weight.grad, exact.grad) < 0.005


def attention_by_sequence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    _: Tensor,
    longest: int,
    __: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """What torch documents of varlen_attn, one sequence at a time. Tokens first: [tokens, heads, size]."""
    parts, bounds = [], starts.tolist()
    assert bounds[0] == 0
    assert bounds[-1] == len(query)
    assert longest == max(end - start for start, end in pairwise(bounds))
    for start, end in pairwise(bounds):
        q, k, v = (tensor[start:end].transpose(0, 1) for tensor in (query, key, value))
        near = torch.ones(end - start, end - start, dtype=torch.bool).tril(window_size[1])
        if window_size[0] >= 0:
            near = near.triu(-window_size[0])
        attended = functional.scaled_dot_product_attention(q, k, v, near, scale=scale, enable_gqa=enable_gqa)
        parts.append(attended.transpose(0, 1))
    return torch.cat(parts)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", attention_by_sequence)
    AttentionInterface.register("varlen", varlen_attention)


def outcome(attention: str, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    model: Any = tiny_policy(dtype=torch.float64)
    model.set_attn_implementation(attention)
    return module_results(PolicyModule(model), 0.8, layout)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_rows_of_several_sequences_give_what_single_rows_give(layout: Layout) -> None:
    expected = outcome("sdpa", "padded")
    for value, reference in zip(outcome("varlen", layout), expected, strict=True):
        assert relative_difference(value, reference) < 1e-12


@pytest.mark.usefixtures("kernel")
def test_a_sliding_window_of_w_tokens_includes_the_token_itself() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 7, 8, dtype=torch.float64) for heads in (4, 2, 2))
    arguments = {"cu_seq_lens_q": torch.tensor([0, 7], dtype=torch.int32), "max_length_q": 7, "scaling": 0.3}
    output, _ = varlen_attention(None, query, key, value, None, sliding_window=3, **arguments)
    # By hand: token t attends to t − 2, t − 1 and t; a key head serves two query heads.
    for t in range(7):
        keys, values = (x[0, :, max(0, t - 2) : t + 1].repeat_interleave(2, 0) for x in (key, value))
        weights = (0.3 * torch.einsum("hd,htd->ht", query[0, :, t], keys)).softmax(-1)
        torch.testing.assert_close(output[0, t], torch.einsum("ht,htd->hd", weights, values))


def test_boundaries_are_where_positions_start_over() -> None:
    row = sequence_boundaries(torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3]]))
    assert row["cu_seq_lens_q"].tolist() == [0, 3, 5, 9]
    assert (row["cu_seq_lens_q"].dtype, row["max_length_q"]) == (torch.int32, 4)
    rows = sequence_boundaries(torch.arange(4).repeat(2, 1))
    assert rows["cu_seq_lens_k"].tolist() == [0, 4, 8]


@pytest.mark.parametrize("unsupported", [{"softcap": 30.0}, {"s_aux": torch.zeros(2)}, {"cu_seq_lens_q": None}])
def test_what_the_kernel_cannot_compute_is_refused(unsupported: dict[str, Any]) -> None:
    tensor = torch.zeros(1, 2, 3, 8)
    arguments: dict[str, Any] = {"cu_seq_lens_q": torch.tensor([0, 3]), "max_length_q": 3, **unsupported}
    with pytest.raises(ValueError, match=r'"varlen" does not support .* set model.attention = "sdpa"'):
        varlen_attention(None, tensor, tensor, tensor, None, **arguments)


# Families of models, on tiny random ones.

TRAINED = [family for family in FAMILIES if architectures.FAMILIES.get(family) == architectures.TRAINS]


@pytest.mark.parametrize("family", TRAINED)
def test_a_family_that_trains_has_transformers_own_log_probabilities(family: str, tmp_path: Path) -> None:
    windowed = family in ("mistral", "gemma3_text")
    settings = {"sliding_window": 4} if windowed else {}  # shorter than the sequences of the batch
    config = ModelConfig(path=str(save_family(tmp_path / family, family, **settings)))
    architectures.check_architecture(config_json(config), RunConfig(model=config))
    model = load_policy(config, precision="fp32").double()
    if family == architectures.WITH_EXPERTS:
        model.set_experts_implementation("eager")  # the default's matrix product has no float64
    policy = PolicyModule(model)
    # Prompts are shared by an explicit mask, which would replace a window.
    shares = can_share_prompts("sdpa", layer_types(model.config))
    assert shares is not windowed
    with torch.no_grad():
        batch = random_batch(seed=3)
        expected = torch.cat([plain_logprobs(model, sequence)[0] for sequence in batch.sequences])
        for layout in ("padded", "packed", "shared")[: 2 + shares]:
            micros = pack(batch, token_budget=70, layout=layout, aggregation="token_mean", pad_id=0)
            actual = by_sequence([(micro.sequence_index, policy(micro, 1.0, False).logprobs) for micro in micros])
            assert relative_difference(actual, expected) < 1e-12, layout
        if not shares:  # a teacher gets the rows of the policy
            (micro, *_) = pack(batch, token_budget=70, layout="shared", aggregation="token_mean", pad_id=0)
            with pytest.raises(ValueError, match="needs full attention"):
                policy(micro, 1.0, False)


@pytest.mark.parametrize("family", TRAINED)
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_policy_is_written_as_its_family_is_published(family: str, lora: bool, tmp_path: Path) -> None:
    """Tensors of transformers' own file: in memory the experts of a layer are one, in checkpoints they are not."""
    folder = save_family(tmp_path / family, family)
    learner = LearnerConfig(lora=LoraConfig(rank=2, target_modules=("o_proj",)) if lora else None)
    config = RunConfig(model=ModelConfig(path=str(folder)), learner=learner)
    model = load_policy(config.model, lora=learner.lora, precision="fp32")
    adapted = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
    assert bool(adapted) == lora
    for module in adapted.values():
        nn.init.normal_(module.lora_B["default"].weight)
    write_policy(model, config, tmp_path / "written", rank=0)
    written, published = (load_file(path / "model.safetensors") for path in (tmp_path / "written", folder))
    for name, module in adapted.items():  # base + alpha/rank · B A
        down, up = module.lora_A["default"].weight, module.lora_B["default"].weight
        published[f"{name.removeprefix('base_model.model.')}.weight"] += 32 / 2 * (up @ down).detach()
    assert written.keys() == published.keys()
    for name, tensor in published.items():
        assert torch.equal(written[name], tensor), name


def write_again(folder: Path) -> Path:
    """The policy of a model folder, as a checkpoint has it."""
    config = RunConfig(model=ModelConfig(path=str(folder), trust_remote_code=True))
    write_policy(load_policy(config.model, precision="fp32"), config, folder.with_name("written"), rank=0)
    return folder.with_name("written")


def test_generation_settings_that_contradict_each_other_are_written_as_they_are(tmp_path: Path) -> None:
    """As many published models have them: a temperature without do_sample, which transformers refuses to save."""
    folder = Path(shutil.copytree(STARTER_FOLDER, tmp_path / "policy"))
    settings = {"eos_token_id": 2, "temperature": 0.6, "top_p": 0.9}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    written = json.loads((write_again(folder) / "generation_config.json").read_text())
    assert settings.items() <= written.items()


def test_the_policy_of_a_model_with_code_of_its_own_comes_with_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = Path(shutil.copytree(STARTER_FOLDER, tmp_path / "policy"))
    (folder / "configuration_own.py").write_text(
        "from transformers import Qwen2Config\nclass OwnConfig(Qwen2Config):\n    model_type = 'own'\n"
    )
    (folder / "modeling_own.py").write_text(
        "from transformers import Qwen2ForCausalLM\nfrom .configuration_own import OwnConfig\n"
        "class OwnForCausalLM(Qwen2ForCausalLM):\n    config_class = OwnConfig\n"
    )
    auto_map = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    body = json.loads((folder / "config.json").read_text()) | {"model_type": "own", "auto_map": auto_map}
    (folder / "config.json").write_text(json.dumps(body))
    written = write_again(folder)
    shutil.rmtree(folder)
    model = load_policy(ModelConfig(path=str(written), trust_remote_code=True), precision="fp32")
    assert type(model).__module__.endswith("modeling_own")
    assert torch.equal(model.lm_head.weight, load_file(written / "model.safetensors")["model.embed_tokens.weight"])


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in TRAINED])
def test_a_family_that_does_not_train_is_refused_by_its_config_alone(family: str, tmp_path: Path) -> None:
    config = RunConfig(model=ModelConfig(path=str(save_family(tmp_path / family, family))))
    with pytest.raises(ConfigError, match=f"the architecture {family} .*; use a decoder-only model"):
        architectures.check_architecture(config_json(config.model), config)
