"""LoRA adapters in the engine against PEFT, and every way in which their sync can go wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import sampler_actor
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from sampler_actor import FIRST_LETTER, LETTERS, BreakableSamplerActor, save_policy

from gxpo_trainer.config import LoraConfig
from gxpo_trainer.errors import WeightSyncMismatch
from gxpo_trainer.learner.checkpoint import adapter_weights
from gxpo_trainer.rollout.requests import SampleRequest, SamplerSettings, SamplingSettings
from gxpo_trainer.rollout.sampler import remote_sampler
from gxpo_trainer.types import Prompt
from gxpo_trainer.weights.buckets import BucketPacker
from gxpo_trainer.weights.transports import SharedMemoryPublisher

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("ray_on_loopback")]

TARGETS = ("q_proj", "k_proj", "o_proj", "down_proj")
LIMIT = 1e-4


class AdaptedActor(BreakableSamplerActor):
    """`break_adapter` replaces one step of the next syncs."""

    def break_adapter(self, fault: str) -> None:
        engine, folder = self._llm.llm_engine, self.weights.folder
        real_add, real_collect = engine.add_lora, folder.add

        def swapped(bucket: Any, buffer: Any) -> Any:
            tensors = folder._tensors
            path = real_collect(bucket, buffer)
            first, second = sorted(name for name in tensors if name.endswith("q_proj.lora_B.weight"))[:2]
            tensors[first], tensors[second] = tensors[second], tensors[first]
            from safetensors.torch import save_file

            save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
            return path

        def scaled_twice(request: Any) -> Any:
            answer = real_add(request)
            self._llm.collective_rpc(double_adapter)
            return answer

        if fault == "stale adapter":
            engine.add_lora = lambda request: True
        elif fault == "swapped tensors":
            folder.add = swapped
        elif fault == "wrong scaling":
            engine.add_lora = scaled_twice
        else:
            raise ValueError(fault)

    def restore(self) -> None:
        vars(self._llm.llm_engine).pop("add_lora", None)
        vars(self.weights.folder).pop("add", None)


def double_adapter(worker: Any) -> None:
    for module in worker.model_runner.get_model().modules():
        for stacked in getattr(module, "lora_b_stacked", ()):
            stacked.mul_(2)


class Adapted:
    """A PEFT model as the learner's side, and an engine."""

    def __init__(self, folder: Path) -> None:
        base = save_policy(folder, tied=True)
        self.model = get_peft_model(base, PeftConfig(r=4, lora_alpha=8.0, target_modules=list(TARGETS)))
        self.publisher = SharedMemoryPublisher()
        self.version = 0
        settings = SamplerSettings(
            model=str(folder),
            max_length=128,
            dtype="float32",
            max_num_seqs=64,
            adapter=LoraConfig(rank=4, alpha=8.0, target_modules=TARGETS),
        )
        options = {"num_cpus": 0.5, "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1"}}}
        self.actor = remote_sampler(AdaptedActor).options(**options).remote(settings)

    def change(self, size: float) -> None:
        torch.manual_seed(self.version)
        with torch.no_grad():
            for _, matrix in adapter_weights(self.model):
                matrix.add_(torch.randn_like(matrix) * size)

    def sync(self) -> Any:
        self.version += 1
        bucket = self.publisher.publish(BucketPacker(adapter_weights(self.model)), self.version, 0)
        return ray.get(self.actor.receive.remote(bucket))

    def largest_gap(self) -> float:
        """Between the engine's log-probabilities of its own samples and PEFT's."""
        rng = np.random.default_rng(self.version)
        requests = [
            SampleRequest(
                Prompt(str(i), "", ""), rng.integers(FIRST_LETTER, FIRST_LETTER + len(LETTERS), 20).astype(np.int32), 2
            )
            for i in range(5)
        ]
        stream = self.actor.generate.options(num_returns="streaming").remote(
            requests, SamplingSettings(max_new_tokens=16), self.version
        )
        gaps = []
        for group in [group for reference in stream for group in ray.get(reference)]:
            for sample in group.samples:
                ids = torch.from_numpy(np.concatenate([group.prompt_token_ids, sample.token_ids]).astype(np.int64))
                with torch.no_grad():
                    table = torch.log_softmax(self.model(ids[None]).logits[0, :-1], dim=-1)
                wanted = table.gather(1, ids[1:, None])[len(group.prompt_token_ids) - 1 :, 0].numpy()
                gaps.append(np.abs(wanted - sample.logprobs).max())
        return float(max(gaps))


@pytest.fixture(scope="module")
def adapted(ray_on_loopback: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    import sys

    for module in (sampler_actor, sys.modules[__name__]):
        ray.cloudpickle.register_pickle_by_value(module)
    torch.set_num_threads(1)
    found = Adapted(tmp_path_factory.mktemp("adapted"))
    yield found
    ray.kill(found.actor)
    found.publisher.close()


def test_the_engine_follows_each_version_of_the_adapter(adapted: Adapted) -> None:
    for _ in range(3):
        report = adapted.sync()
        assert adapted.largest_gap() <= LIMIT
        # Two matrices for each of four modules in two layers.
        assert report.num_checked == 2 * 4 * 2
        adapted.change(0.05)
    # Without the sync of the last change the engine is visibly behind.
    assert adapted.largest_gap() > LIMIT
    adapted.sync()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("stale adapter", "is not active in the sampler"),
        ("swapped tensors", "the sampler received other values than were published"),
        ("wrong scaling", r"LoRA matrix B of \S+: the sampler's differs from the learner's"),
    ],
)
def test_a_broken_adapter_sync_is_caught(adapted: Adapted, fault: str, message: str) -> None:
    adapted.change(0.05)
    adapted.sync()
    ray.get(adapted.actor.break_adapter.remote(fault))
    with pytest.raises(WeightSyncMismatch, match=message):
        adapted.sync()
    with pytest.raises(WeightSyncMismatch, match="holds no verified version"):
        adapted.largest_gap()
    ray.get(adapted.actor.restore.remote())
    adapted.sync()
    assert adapted.largest_gap() <= LIMIT
