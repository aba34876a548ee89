"""The starter policy: a tiny chat model that learns the embedded task within minutes on two cores.

    python -m tools.starter --out DIR [--seed 0]

builds it from scratch: a byte-level BPE tokenizer trained on the task's text (every digit is one token), a randomly
initialized Qwen2 model of about one million parameters, and a supervised warm-up on generated training problems. Each
warm-up answer is either *careful* (all steps, correct) or *hasty* (only the box, mostly wrong). The policy learns to
sample both, so that reinforcement learning can discover that careful answers earn more reward.

The result is shipped in `starter_policy/`. No held-out problem is used.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from gxpo_trainer.data.word_problems import SHORT, Difficulty, generate, guess
from gxpo_trainer.types import Prompt

PAD, BOS, END = "<|pad|>", "<|bos|>", "<|end|>"
ROLES = SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
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
MICRO_BATCH = 32
MANIFEST = "manifest.json"
MANIFEST_KINDS = ("*.json", "*.safetensors", "*.jinja")
IGNORED = -100
"""Label of a token that has no loss."""

Row = tuple[list[int], list[int]]
"""Token ids of a conversation and their labels."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Settings of the warm-up. The shipped policy was built with the defaults."""

    tags: ClassVar[tuple[str, ...]] = ()
    """Texts with a token of their own, which is no special token: it stays when sampled tokens are decoded."""
    start: ClassVar[Path | None] = None
    """The policy whose weights the warm-up starts from; none: random ones."""
    levels: ClassVar[tuple[Difficulty, ...]] = SHORT
    """The problems of the warm-up. The tokenizer is trained on short ones, so that all policies share it."""
    max_new_tokens: ClassVar[int] = 48

    seed: int = 0
    num_problems: int = 30_000
    first_steps: int = 1000
    """Batches of the first phase, which teaches both kinds of answers, mostly careful ones."""
    first_rate: float = 0.02
    """Peak learning rate of the first phase: Muon on hidden matrices, a fifth of it for AdamW on the rest."""
    first_careful_share: float = 0.75
    """Share of careful answers in the first phase."""
    last_steps: int = 100
    """Batches of the last phase, which makes careful answers the rarer kind."""
    last_rate: float = 0.002
    last_careful_share: float = 0.3
    batch: int = 64
    hasty_right_share: float = 0.1
    """Share of the hasty answers that are correct."""
    temperature: float = 1.0
    """Divides the logits of the trained policy: above 1 its mistakes are more often slips than firm beliefs."""
    threads: int = 2
    """torch threads; another number may round differently and give slightly different weights."""

    def initial_model(self, tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
        """The model that the warm-up trains."""
        if self.start is None:
            return build_model(tokenizer, self.seed)
        model: Qwen2ForCausalLM = Qwen2ForCausalLM.from_pretrained(self.start, dtype=torch.float32)
        return model

    def conversation(self, problem: Prompt, rng: random.Random, *, last_phase: bool) -> list[str]:
        """What follows the problem: texts of the policy and of the user in turn; the first and last by the policy."""
        return [warmup_answer(problem, rng, self.careful_share(last_phase), self)]

    def careful_share(self, last_phase: bool) -> float:
        return self.last_careful_share if last_phase else self.first_careful_share


def build_tokenizer(problems: list[Prompt], tags: tuple[str, ...] = ()) -> Qwen2Tokenizer:
    """Train a byte-level BPE tokenizer on the problems: no text is out of vocabulary, every digit is one token.

    It pre-tokenizes like Qwen2's tokenizer, because `AutoTokenizer` silently replaces any other rule in the
    tokenizer.json of a Qwen2 folder by that one.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = Sequence(
        [Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    trainer = BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, BOS, END, *ROLES],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((f"{p.text}\n{p.completion}\n\\boxed{{" for p in problems), trainer)
    learned = json.loads(tokenizer.to_str())["model"]
    built = Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=[tuple(merge) for merge in learned["merges"]],  # type: ignore[misc]  # pairs, not strings
        unk_token=None,  # type: ignore[arg-type]
        pad_token=PAD,
        bos_token=BOS,
        eos_token=END,
        additional_special_tokens=list(ROLES),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
        padding_side="left",
    )
    built.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    return built


def build_model(tokenizer: Qwen2Tokenizer, seed: int) -> Qwen2ForCausalLM:
    """A randomly initialized Qwen2 model: 4 layers of width 128, tied embeddings, fp32."""
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
    model = Qwen2ForCausalLM(config)  # type: ignore[no-untyped-call]
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=True,
        temperature=1.0,
        max_new_tokens=Recipe.max_new_tokens,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return model


def warmup_answer(problem: Prompt, rng: random.Random, careful_share: float, recipe: Recipe) -> str:
    """The worked answer, or only a box with the result or a number near it."""
    careful = rng.random() < careful_share
    return problem.completion or "" if careful else guess(problem, rng, recipe.hasty_right_share)


def warm_up(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, recipe: Recipe) -> Iterator[float]:
    """Train the model in place, with loss on the policy's turns only; yields each batch's loss in nats per token."""
    problems = generate("train", recipe.num_problems, recipe.seed, recipe.levels)
    prompts = prompt_ids(tokenizer, [problem.text for problem in problems])
    rng = random.Random(f"gxpo starter warm-up {recipe.seed}")

    def draw(last_phase: bool) -> Row:
        row = rng.randrange(len(problems))
        return conversation_row(tokenizer, prompts[row], recipe.conversation(problems[row], rng, last_phase=last_phase))

    phases = ((recipe.first_steps, recipe.first_rate, False), (recipe.last_steps, recipe.last_rate, True))
    for steps, rate, last_phase in phases:
        batches = ([draw(last_phase) for _ in range(recipe.batch)] for _ in range(steps))
        yield from train(model, batches, steps, rate, tokenizer.pad_token_id)


def conversation_row(tokenizer: Qwen2Tokenizer, prompt: list[int], turns: list[str]) -> Row:
    """Token ids and labels of a prompt, which opens the policy's turn, and the turns that follow it."""
    ids, labels = list(prompt), [IGNORED] * len(prompt)
    for position, turn in enumerate(turns):
        by_policy = position % 2 == 0
        text = turn + END if by_policy else f"{USER}{turn}{END}{ASSISTANT}"
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += tokens
        labels += tokens if by_policy else [IGNORED] * len(tokens)
    return ids, labels


def train(model: Qwen2ForCausalLM, batches: Iterator[list[Row]], steps: int, peak: float, pad: int) -> Iterator[float]:
    """One phase of supervised training: Muon on the hidden matrices, AdamW on embeddings, biases and norms."""
    hidden = {name for name, weight in model.named_parameters() if weight.ndim == 2 and "embed" not in name}
    matrices = [weight for name, weight in model.named_parameters() if name in hidden]
    rest = [weight for name, weight in model.named_parameters() if name not in hidden]
    muon = torch.optim.Muon(matrices, lr=peak, weight_decay=0.01)
    adamw = torch.optim.AdamW(rest, lr=peak / 5, betas=(0.9, 0.98), weight_decay=0.0)
    model.train()
    for step, batch in enumerate(batches, start=1):
        # Linear warm-up over 30 batches, constant, linear decay over the last 40%.
        rate = peak * min(1.0, step / 30, (steps - step + 1) / (0.4 * steps))
        muon.param_groups[0]["lr"], adamw.param_groups[0]["lr"] = rate, rate / 5
        model.zero_grad(set_to_none=True)
        loss = _backward(model, batch, pad)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.step()  # type: ignore[no-untyped-call]
        adamw.step()
        yield loss
    model.eval()  # type: ignore[no-untyped-call]


def build(out: Path, recipe: Recipe) -> None:
    """Build the policy and save it with its manifest (SHA-256 of each file, and the recipe)."""
    torch.set_num_threads(recipe.threads)
    tokenizer = build_tokenizer(generate("train", recipe.num_problems, recipe.seed), recipe.tags)
    model = recipe.initial_model(tokenizer)
    assert model.generation_config is not None
    model.generation_config.max_new_tokens = recipe.max_new_tokens
    started = time.perf_counter()
    total = recipe.first_steps + recipe.last_steps
    for step, loss in enumerate(warm_up(model, tokenizer, recipe), start=1):
        if step % 50 == 0 or step == total:
            print(f"step {step}/{total}  loss {loss:.3f}  {time.perf_counter() - started:.0f} s", flush=True)
    model.model.norm.weight.data.div_(recipe.temperature)
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    write_manifest(out, recipe)
    for path in out.iterdir():
        path.chmod(0o644)  # safetensors creates files with mode 0600


def write_manifest(folder: Path, recipe: Recipe) -> None:
    """Record the recipe and the SHA-256 of the policy's files."""
    body = {"recipe": asdict(recipe), "sha256": file_hashes(folder)}
    (folder / MANIFEST).write_text(json.dumps(body, indent=2, sort_keys=True) + "\n")


def file_hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of the policy, except the manifest."""
    files = sorted(path for kind in MANIFEST_KINDS for path in folder.glob(kind) if path.name != MANIFEST)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def prompt_ids(tokenizer: Qwen2Tokenizer, texts: list[str]) -> list[list[int]]:
    turns = [[{"role": "user", "content": text}] for text in texts]
    prompts = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    ids: list[list[int]] = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    return ids


def _backward(model: Qwen2ForCausalLM, batch: list[Row], pad: int) -> float:
    """Accumulate the gradient of the mean loss over the policy's tokens, in micro-batches of similar lengths."""
    num_targets = sum(label != IGNORED for _, labels in batch for label in labels)
    by_length = sorted(batch, key=_num_tokens)
    total = 0.0
    for first in range(0, len(batch), MICRO_BATCH):
        input_ids, labels = _pad(by_length[first : first + MICRO_BATCH], pad)
        # Under a causal mask right padding does not affect earlier tokens, so no attention mask is needed.
        logits = model(input_ids=input_ids).logits[:, :-1]
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        loss = losses / num_targets
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total


def _num_tokens(row: Row) -> int:
    return len(row[0])


def _pad(rows: list[Row], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, right-padded to int64 [rows, width]."""
    width = max(map(_num_tokens, rows))
    input_ids = np.full((len(rows), width), pad, dtype=np.int64)
    targets = np.full_like(input_ids, IGNORED)
    for number, (ids, labels) in enumerate(rows):
        input_ids[number, : len(ids)] = ids
        targets[number, : len(ids)] = labels
    return torch.from_numpy(input_ids), torch.from_numpy(targets)


def main(arguments: list[str] | None = None, recipe: type[Recipe] = Recipe, module: str = "starter") -> int:
    parser = argparse.ArgumentParser(prog=f"python -m tools.{module}", description="Build the policy.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; must not exist or be empty")
    for name, value in asdict(recipe()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"default {value}")
    chosen = vars(parser.parse_args(arguments))
    out: Path = chosen.pop("out")
    if out.exists() and any(out.iterdir()):
        parser.error(f"--out {out} is not empty; name a new folder")
    build(out, recipe(**chosen))
    return 0


if __name__ == "__main__":
    sys.exit(main())
