"""A sampler actor whose sync can be broken on purpose, and the policies that the tests give it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from gxpo_trainer.rollout.requests import SampleRequest, SamplingSettings
from gxpo_trainer.rollout.sampler import SamplerActor

END = 1
FIRST_LETTER = 3
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789+-*/=. "


class BreakableSamplerActor(SamplerActor):
    """`break_sync` replaces one step of the next syncs; `restore` undoes it."""

    def break_sync(self, fault: str, swap: tuple[str, str] = ("", "")) -> None:
        weights, receiver = self._sampler.weights, self._sampler.receiver
        real_load, real_receive = weights.load, receiver.receive

        def swapped(tensors: Any) -> None:
            first, second = swap
            real_load({**tensors, first: tensors[second], second: tensors[first]})

        def same_cache(manifest: Any) -> Any:
            report = real_receive(manifest)
            receiver.num_syncs -= 1
            return report

        if fault == "stale sampler":
            weights.load = lambda tensors: None
        elif fault == "stale head":
            weights.repack_heads = lambda: None
        elif fault == "swapped tensors":
            weights.load = swapped
        elif fault == "blind":
            receiver.verify = lambda published=None: (0, ())
        elif fault == "same cache":
            receiver.receive = same_cache
        else:
            raise ValueError(fault)

    def restore(self) -> None:
        weights, receiver = self._sampler.weights, self._sampler.receiver
        for owner, name in ((weights, "load"), (weights, "repack_heads"), (receiver, "verify"), (receiver, "receive")):
            vars(owner).pop(name, None)

    def verify_checkpoint(self, folder: str) -> int:
        return self._sampler.receiver.verify_checkpoint(Path(folder))

    def names(self) -> tuple[str, ...]:
        return self._sampler.weights.names

    def close_early(self, requests: Sequence[SampleRequest], sampling: SamplingSettings, version: int) -> int:
        """Take one yield, close the generator, and tell how many groups it had."""
        groups = self._sampler.generate(requests, sampling, version)
        first = next(groups)
        groups.close()
        return len(first)


def save_policy(folder: Path, *, tied: bool, seed: int = 0) -> Qwen2ForCausalLM:
    """A random Qwen2 (2 layers, width 128) with a letter-by-letter tokenizer, saved to `folder`."""
    vocabulary = {"<pad>": 0, "<end>": END, "<unk>": 2} | {c: i for i, c in enumerate(LETTERS, FIRST_LETTER)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", unk_token="<unk>"
    ).save_pretrained(folder)
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        eos_token_id=END,
        pad_token_id=0,
        bos_token_id=None,
        initializer_range=0.06,
    )
    model = Qwen2ForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.05)
    model.save_pretrained(folder)
    return model
