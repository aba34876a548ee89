"""A sampler actor whose sync can be broken on purpose, and the policies that the tests give it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from support.tiny_families import save_tokenizer
from support.tiny_policy import qwen2
from transformers import Qwen2ForCausalLM

from gxpo_trainer.rollout.sampler import SamplerActor
from gxpo_trainer.rollout.vllm_driver import Intake, SampleRequest, SamplingSettings
from gxpo_trainer.types import Group


class BreakableSamplerActor(SamplerActor):
    """`break_sync` replaces one step of the next syncs, in one worker where it is the workers'; `restore` undoes it."""

    def break_sync(self, fault: str, swap: tuple[str, str] = ("", ""), rank: int = 0) -> None:
        engine, weights = self._llm.llm_engine, self.weights

        def scaled_twice(request: Any) -> Any:
            result = type(engine).add_lora(engine, request)
            self._llm.collective_rpc(double_adapter)
            return result

        def swapped(lora: Any) -> Any:
            matrices = weights.matrices
            first, second = sorted(name for name in matrices if name.endswith("q_proj.lora_B.weight"))[:2]
            (one, own), (other, its) = matrices[first], matrices[second]
            matrices |= {first: (other, own), second: (one, its)}
            return type(weights).write_adapter(weights, lora)

        if fault == "same cache":
            earlier = f"sync-{weights.num_syncs - 1}"
            self._driver.weights = self._driver.current_weights._replace(cache_salt=earlier)
        elif fault == "stale adapter":
            engine.add_lora = lambda request: True
        elif fault == "wrong scaling":
            engine.add_lora = scaled_twice
        elif fault == "swapped matrices":
            weights.write_adapter = swapped
        else:
            self._llm.collective_rpc(break_worker, args=(fault, swap, rank))

    def restore(self) -> None:
        vars(self._llm.llm_engine).pop("add_lora", None)
        vars(self.weights).pop("write_adapter", None)
        self._llm.collective_rpc(restore_worker)

    def verify_checkpoint(self, folder: str) -> int:
        return sum(self.weights.call_workers("verify_checkpoint", folder))

    def names(self) -> tuple[str, ...]:
        return tuple(self._llm.collective_rpc(lambda worker: [*worker.gxpo_receiver.weights.slots])[0])

    def generate(
        self, requests: Sequence[SampleRequest], sampling: SamplingSettings, version: int
    ) -> Iterator[tuple[Group, ...]]:
        for finished in self.sample(Intake(list(enumerate(requests)), closed=True), sampling, version):
            yield tuple(group for _, group in finished.groups)

    def close_early(self, requests: Sequence[SampleRequest], sampling: SamplingSettings, version: int) -> int:
        """Take one yield, close the stream; the number of its groups."""
        stream = self.sample(Intake(list(enumerate(requests)), closed=True), sampling, version)
        first = next(stream)
        stream.close()
        return len(first.groups)


def double_adapter(worker: Any) -> None:
    for module in worker.model_runner.get_model().modules():
        for stacked in getattr(module, "lora_b_stacked", ()):
            stacked.mul_(2)


def break_worker(worker: Any, fault: str, swap: tuple[str, str], rank: int) -> None:
    if worker.rank != rank:
        return
    weights = worker.gxpo_receiver.weights
    real_load = weights.load

    def swapped(published: Any) -> None:
        by_name = {entry.name: (entry, tensor) for entry, tensor in published}
        first, second = (by_name[name] for name in swap)
        real_load([*published, (first[0], second[1]), (second[0], first[1])])

    if fault == "stale sampler":
        weights.load = lambda published: None
    elif fault == "stale head":
        weights.repack_heads = lambda: None
    elif fault == "swapped tensors":
        weights.load = swapped
    else:
        raise ValueError(fault)


def restore_worker(worker: Any) -> None:
    for name in ("load", "repack_heads"):
        vars(worker.gxpo_receiver.weights).pop(name, None)


def save_policy(folder: Path, *, tied: bool, seed: int = 0) -> Qwen2ForCausalLM:
    """A random Qwen2 (2 layers, width 128) with a letter-by-letter tokenizer, saved to `folder`."""
    tokens = save_tokenizer(folder)
    torch.manual_seed(seed)
    others = {"max_position_embeddings": 256, "initializer_range": 0.06, "tie_word_embeddings": tied}
    model = qwen2(tokens.pop("vocab_size"), 128, 192, 2, 4, 2, **tokens, **others).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.05)
    model.save_pretrained(folder)
    return model
