"""Policies made from saved ones without training: an adapter merged into its base, and a line through checkpoints.

Weights under RL from verifiable rewards move nearly along a line (published for several models), so the point further
along it, which costs no backward pass, is a challenger of every look-ahead. The extrapolated weights are a weighted sum
of policies: of the initial and the last one, θ_init + f(θ_T − θ_init), or by the least-squares line through all of them
at f·T.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gxpo_trainer.config import ModelConfig
from gxpo_trainer.errors import CheckpointError, ConfigError
from gxpo_trainer.learner.models import load_tokenizer, resolve_model

if TYPE_CHECKING:
    from torch import Tensor

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter, but not a full model."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


def base_of(folder: Path) -> str:
    """The adapter's base model: a folder or a hub name. Raises ConfigError."""
    try:
        base = json.loads((folder / CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{folder / CONFIG} cannot be read: {error}; save the adapter again") from None
    if not isinstance(base, str) or not base:
        raise ConfigError(f"{folder / CONFIG} names no base model; set base_model_name_or_path to its folder")
    if not (folder / WEIGHTS).is_file():
        raise ConfigError(f"{folder} has no {WEIGHTS}; save the adapter in safetensors form")
    try:
        return resolve_model(ModelConfig(path=base))
    except ConfigError as error:
        raise ConfigError(
            f"{folder}: its base model cannot be used ({error}); set base_model_name_or_path in {CONFIG} to a folder "
            "written by save_pretrained"
        ) from None


def merge_adapter(folder: Path, out: Path) -> None:
    """Write base and adapter as one model in fp32, with the base's tokenizer. Raises ConfigError.

    Merged into bf16, most of a small adapter would be rounded away.
    """
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    base = base_of(folder)
    try:
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, use_safetensors=True)
        merged = PeftModel.from_pretrained(model, str(folder)).merge_and_unload()
    except (OSError, ValueError, KeyError, RuntimeError, AttributeError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"{folder} cannot be merged into {base}: {first}; it must be a LoRA adapter of that model"
        ) from error
    merged.save_pretrained(out)
    load_tokenizer(ModelConfig(path=base)).save_pretrained(out)


_PATTERN = "*.safetensors"


def line_weights(steps: Sequence[int], at: float) -> list[float]:
    """Weights of the policies at `steps` in the value at `at` of the least-squares line through them; they sum to 1.

    Two steps give the line through both. Raises ValueError for fewer than two distinct steps.
    """
    times = np.asarray(steps, dtype=np.float64)
    offsets = times - times.mean()
    spread = float((offsets**2).sum())
    if spread == 0:
        raise ValueError(f"steps {list(steps)}: a line needs two different steps")
    return [float(weight) for weight in 1 / len(times) + (at - times.mean()) * offsets / spread]


def combine(folders: Sequence[Path], weights: Sequence[float], target: Path) -> None:
    """Write Σ wᵢθᵢ as a policy folder: tensors in the type of the last policy, all other files of it as they are.

    Sums are taken in float64, one tensor at a time. Raises CheckpointError when the target exists, or when the policies
    differ in a tensor's name or shape; nothing is left behind.
    """
    from safetensors.torch import load_file, save_file

    if target.exists():
        raise CheckpointError(f"{target} already exists; choose a new folder")
    sources = [_Weights(folder) for folder in folders]
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        shutil.copytree(folders[-1], partial, ignore=shutil.ignore_patterns(_PATTERN))
        for file in sorted(folders[-1].glob(_PATTERN)):
            summed = {name: _sum(sources, weights, name, like) for name, like in load_file(file).items()}
            save_file(summed, partial / file.name, metadata={"format": "pt"})
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    partial.rename(target)


class _Weights:
    """The tensors of a policy folder by name, whatever their files."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self.folder = folder
        self._files: dict[str, Any] = {}
        for path in folder.glob(_PATTERN):
            file: Any = safe_open(path, framework="pt")
            self._files |= dict.fromkeys(file.keys(), file)

    def read(self, name: str) -> Tensor:
        if name not in self._files:
            raise CheckpointError(f"{self.folder} has no tensor {name}; extrapolate policies of one model")
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor


def _sum(sources: Sequence[_Weights], weights: Sequence[float], name: str, like: Tensor) -> Tensor:
    total = None
    for source, weight in zip(sources, weights, strict=True):
        tensor = source.read(name)
        if tensor.shape != like.shape:
            raise CheckpointError(
                f"{source.folder}: {name} has shape {list(tensor.shape)} instead of {list(like.shape)}; extrapolate "
                "policies of one model"
            )
        part = tensor.double() * weight
        total = part if total is None else total + part
    assert total is not None
    return total.to(like.dtype)
