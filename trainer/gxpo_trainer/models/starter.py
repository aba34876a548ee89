"""The starter policy: a tiny chat model that can learn the embedded task within minutes on two cores.

    python -m gxpo_trainer.models.starter --out DIR [--seed 0]

builds it from nothing: a byte-level BPE tokenizer trained on the task's own text (every digit a token of its
own), a Qwen2 model of about one million parameters with random weights, and a supervised warm-up on generated
training problems. Each warm-up problem is answered in one of two ways: *carefully* (every step written down,
right) or *hastily* (straight to the box, mostly wrong). The policy learns to sample both, so that
reinforcement learning has something to find: that writing the steps down pays.

The result is shipped in `starter_policy/`; `starter_path()` says where. No held-out problem is used.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from gxpo_trainer.data.word_problems import MAX_NUMBER, WordProblem, generate

PAD, BOS, END = "<|pad|>", "<|bos|>", "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
VOCABULARY = 512
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role'] + '; use system, user or assistant') }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
BUCKETS = 4
MANIFEST = "manifest.json"
MANIFEST_KINDS = ("*.json", "*.safetensors", "*.jinja")


@dataclass(frozen=True, slots=True)
class Recipe:
    """Every choice of the warm-up. The defaults made the shipped policy."""

    seed: int = 0
    num_problems: int = 30_000
    steps: int = 1500
    """Batches in all."""
    mixed_steps: int = 200
    """The last so many batches mix both ways of answering; before them all answers are worked out."""
    batch: int = 64
    learning_rate: float = 3e-3
    rising_share: float = 0.05
    """Share of the steps in which the learning rate rises; after it, it falls along a cosine."""
    careful_share: float = 0.3
    """Share of the mixed answers that are worked out."""
    hasty_right_share: float = 0.1
    """Share of the hasty answers that are right."""
    threads: int = 2


def starter_path() -> Path:
    """The folder of the shipped policy, in transformers layout."""
    return Path(__file__).resolve().parent / "starter_policy"


def build_tokenizer(problems: list[WordProblem]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on the problems: no text is out of vocabulary, every digit is one token."""
    tokenizer = Tokenizer(models.BPE())
    # A space before a number goes with the word or comma before it: shorter prompts, one token a digit.
    pieces = Regex(r" ?\\boxed\{| ?\p{L}+(?: (?=\p{N}))?|\p{N}|, (?=\p{N})| ?[^\s\p{L}\p{N}]|\s")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pieces, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, BOS, END, *ROLES],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((f"{p.prompt.text}\n{p.solution}\n\\boxed{{" for p in problems), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=END,
        additional_special_tokens=list(ROLES),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
        padding_side="left",
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    """A Qwen2 model with random weights: 4 layers of width 128, tied embeddings, fp32."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        initializer_range=0.04,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        max_new_tokens=48,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return model


def warmup_answer(problem: WordProblem, rng: random.Random, careful_share: float, recipe: Recipe) -> str:
    """The worked answer, or a box alone with a number near the result."""
    if rng.random() < careful_share:
        return problem.solution
    result = int(problem.prompt.gold)
    if rng.random() >= recipe.hasty_right_share:
        near = range(max(2, result - 12), min(MAX_NUMBER, result + 12) + 1)
        result = rng.choice([number for number in near if number != result])
    return f"\\boxed{{{result}}}"


def warm_up(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> Iterator[tuple[int, float]]:
    """Supervised training in place, loss on the answers only; yields (step, loss in nats a token)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        max_lr=recipe.learning_rate,
        total_steps=recipe.steps,
        pct_start=recipe.rising_share,
        cycle_momentum=False,
    )
    model.train()
    for step, (input_ids, labels) in enumerate(_batches(tokenizer, recipe), start=1):
        # Right padding cannot reach earlier tokens under a causal mask, so no attention mask is needed.
        loss = model(input_ids=input_ids, labels=labels).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        yield step, loss.item()
    model.eval()


def build(out: Path, recipe: Recipe) -> None:
    """Build the policy and save it with its manifest (SHA-256 of each file, and the recipe)."""
    torch.set_num_threads(recipe.threads)
    tokenizer = build_tokenizer(generate("train", recipe.num_problems, recipe.seed))
    model = build_model(tokenizer, recipe.seed)
    started = time.perf_counter()
    for step, loss in warm_up(model, tokenizer, recipe):
        if step % 50 == 0 or step == recipe.steps:
            print(f"step {step}/{recipe.steps}  loss {loss:.3f}  {time.perf_counter() - started:.0f} s", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    write_manifest(out, recipe)


def write_manifest(folder: Path, recipe: Recipe) -> None:
    """Record how the policy was made and the SHA-256 of its files."""
    body = {"recipe": asdict(recipe), "sha256": file_hashes(folder)}
    (folder / MANIFEST).write_text(json.dumps(body, indent=2, sort_keys=True) + "\n")


def file_hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file that belongs to the policy, the manifest left out."""
    files = sorted(path for kind in MANIFEST_KINDS for path in folder.glob(kind) if path.name != MANIFEST)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _prompt_ids(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[list[int]]:
    turns = [[{"role": "user", "content": text}] for text in texts]
    prompts = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    ids: list[list[int]] = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    return ids


def _batches(tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """`recipe.steps` batches; four at a time are drawn together and split by length, which saves padding."""
    problems = generate("train", recipe.num_problems, recipe.seed)
    prompts = _prompt_ids(tokenizer, [problem.prompt.text for problem in problems])
    rng = random.Random(f"gxpo starter warm-up {recipe.seed}")
    for first in range(0, recipe.steps, BUCKETS):
        share = 1.0 if first < recipe.steps - recipe.mixed_steps else recipe.careful_share
        rows = [rng.randrange(len(problems)) for _ in range(recipe.batch * BUCKETS)]
        answers = [warmup_answer(problems[row], rng, share, recipe) + END for row in rows]
        answer_ids = tokenizer(answers, add_special_tokens=False)["input_ids"]
        pairs = sorted(((prompts[row], ids) for row, ids in zip(rows, answer_ids, strict=True)), key=_num_tokens)
        for bucket in rng.sample(range(BUCKETS), BUCKETS)[: recipe.steps - first]:
            part = pairs[bucket * recipe.batch : (bucket + 1) * recipe.batch]
            yield _batch(*zip(*part, strict=True), tokenizer.pad_token_id)


def _num_tokens(pair: tuple[list[int], list[int]]) -> int:
    return len(pair[0]) + len(pair[1])


def _batch(prompts: Sequence[list[int]], answers: Sequence[list[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded int64 [rows, width]; labels are -100 outside the answers."""
    width = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    input_ids = np.full((len(prompts), width), pad, dtype=np.int64)
    labels = np.full_like(input_ids, -100)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        input_ids[row, :end] = prompt + answer
        labels[row, len(prompt) : end] = answer
    return torch.from_numpy(input_ids), torch.from_numpy(labels)


def main(arguments: list[str] | None = None) -> int:
    defaults = Recipe()
    parser = argparse.ArgumentParser(prog="python -m gxpo_trainer.models.starter", description="Build the policy.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; must not exist or be empty")
    for name, value in asdict(defaults).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"default {value}")
    chosen = vars(parser.parse_args(arguments))
    out: Path = chosen.pop("out")
    if out.exists() and any(out.iterdir()):
        parser.error(f"--out {out} is not empty; name a new folder")
    build(out, Recipe(**chosen))
    return 0


if __name__ == "__main__":
    sys.exit(main())
