"""LoRA adapters in vLLM: each version is written as a PEFT adapter, loaded under a new id, and read back.

The adapter is sent instead of the merged weights: merged into bf16, most of a small adapter is rounded away.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from gxpo_trainer.cluster.disk import write_errors
from gxpo_trainer.config import LoraConfig
from gxpo_trainer.errors import WeightSyncMismatch
from gxpo_trainer.sync.buckets import WeightBucket, tensors_of
from gxpo_trainer.sync.checksums import checksum
from gxpo_trainer.sync.layout import BASE_LAYER, layout_of

PEFT_PREFIX = "base_model.model."
_WEIGHTS = "adapter_model.safetensors"


class AdapterFolder:
    """Collects the buckets of one version in a PEFT folder under `root`, one folder at a time."""

    def __init__(self, root: Path, settings: LoraConfig) -> None:
        self._root, self._settings = root, settings
        self._tensors: dict[str, torch.Tensor] = {}
        self.checksums: dict[str, int] = {}
        """Published checksum of each tensor of the version."""

    @property
    def scaling(self) -> float:
        """Factor of B·A in the adapted layer."""
        return self._settings.alpha / self._settings.rank

    def add(self, bucket: WeightBucket, buffer: torch.Tensor) -> Path | None:
        """Copy a bucket's tensors; after the last bucket of a version its folder. Raises OSError on a full disk."""
        if bucket.index == 0:
            self._tensors = {}
            self.checksums = {}
        for entry, tensor in tensors_of(bucket, buffer):
            assert entry.first_row == 0, "a LoRA matrix fits a bucket"
            self._tensors[entry.name] = tensor.cpu().clone()
            self.checksums[entry.name] = entry.checksum
        if not bucket.last:
            return None
        for earlier in self._root.glob("version-*"):
            shutil.rmtree(earlier)
        folder = self._root / f"version-{bucket.version}"
        folder.mkdir()
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "bias": "none",
            "r": self._settings.rank,
            "lora_alpha": self._settings.alpha,
            "target_modules": list(self._settings.target_modules),
        }
        (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        with write_errors():
            save_file(self._tensors, folder / _WEIGHTS, metadata={"format": "pt"})
        return folder


def verify_adapter(
    model: torch.nn.Module, manager: Any, adapter_id: int, folder: Path, checksums: dict[str, int], scaling: float
) -> int:
    """Compare the active adapter's matrices in one worker with the published ones, bit for bit.

    vLLM multiplies B by the scaling when it activates an adapter. Returns the number of comparisons. Raises
    WeightSyncMismatch, and ConfigError for an adapted layer that vLLM stores in another layout.
    """
    if adapter_id not in manager.lora_index_to_id:
        raise WeightSyncMismatch(f"LoRA adapter {adapter_id} is not active in the sampler; sync again")
    index = manager.lora_index_to_id.index(adapter_id)
    published = load_file(folder / _WEIGHTS)
    for name, tensor in published.items():
        if checksum(tensor) != checksums.get(name):
            raise WeightSyncMismatch(f"LoRA matrix {name}: the sampler received other values than were published")
    layout = layout_of(model)
    layers = {path: module for path, module in model.named_modules() if hasattr(module, "lora_a_stacked")}
    checked = 0
    adapted = {
        name: name.removeprefix(PEFT_PREFIX).removesuffix(".lora_A.weight")
        for name in sorted(published)
        if name.endswith(".lora_A.weight")
    }
    layout.require(f"{plain}.weight" for plain in adapted.values())
    for name, plain in adapted.items():
        slot = layout.slots[f"{plain}.weight"]
        module: Any = layers[slot.path.removesuffix(BASE_LAYER)]
        fused = [s.start for s in layout.slots.values() if (s.path, s.attribute) == (slot.path, slot.attribute)]
        position = sorted(fused).index(slot.start)
        a, b = module.lora_a_stacked[position][index, 0], module.lora_b_stacked[position][index, 0]
        down, up = published[name], published[name.replace("lora_A", "lora_B")]
        if slot.columns is not None:
            down = down[:, slot.columns[0] : slot.columns[1]]
        else:
            up = slot.part_of(up)[0]
        for what, held, wanted in (("A", a, down.to(a.dtype)), ("B", b, up.to(b.dtype) * scaling)):
            checked += 1
            held = held[: wanted.shape[0], : wanted.shape[1]].cpu()
            if not torch.equal(held, wanted):
                difference = float((held.double() - wanted.double()).abs().max())
                raise WeightSyncMismatch(
                    f"LoRA matrix {what} of {plain}: the sampler's differs from the learner's by up to {difference:.3g}"
                )
    return checked
