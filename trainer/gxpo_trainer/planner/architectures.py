"""What a model folder must hold, and which architectures train, as far as its config.json tells. Free of torch.

`FAMILIES` lists what was tried on tiny random models of each family (tests/unit/learner/test_logprobs.py, and with
engines tests/integration/test_training_loop.py).
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from gxpo_trainer.config import ModelConfig, RunConfig
from gxpo_trainer.config.engines import STARTER_POLICIES
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.jsonl import local_path

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
"""Of a model that somebody uploaded; one without an owner is a folder that does not exist, and no hub is asked."""
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
FOLDER_FIX = "set model.path to `starter`, to a folder written by save_pretrained, or to a hub name such as org/model"

TRAINS = "trains"
WITH_EXPERTS = "qwen3_moe"
"""The family whose experts can be compared with the engine's."""
_UNEQUAL = ", which cannot be compared with the engine's"
FAMILIES: dict[str, str] = {
    **dict.fromkeys(("qwen2", "qwen3", "llama", "mistral", "gemma3_text", "phi3", WITH_EXPERTS), TRAINS),
    "gemma2": "soft-caps its logits and attention scores",
    "gpt_neox": f"has interleaved projections{_UNEQUAL}",
    "gpt2": f"has transposed projections{_UNEQUAL}",
    **dict.fromkeys(("mamba", "mamba2"), "has state-space layers, which the learner cannot batch"),
    "t5": "is an encoder-decoder",
}
"""`model_type` → TRAINS, or why it does not. An adapter alone is compared where the policy is trained by LoRA."""
FUSED_KERNELS = frozenset({"qwen2", "qwen3", "llama", "mistral", "gemma3_text", "phi3"})
"""Families whose layers have Liger's kernels."""
HEAD_FACTORS = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier")
"""Settings of a model whose logits are no plain linear map of its hidden states, unless they are 1 or absent."""
_SUPPORTED = "use a decoder-only model, such as " + ", ".join(name for name, w in FAMILIES.items() if w == TRAINS)


def local_model(config: ModelConfig) -> Path | None:
    """The folder of `model.path`; None for a hub name.

    Raises ConfigError when a folder is missing or lacks its config, or its weights in safetensors form, and for a name
    that no hub can have.
    """
    folder = folder_of(config.path)
    if not folder.is_dir() and config.path not in STARTER_POLICIES:
        if folder.exists():
            raise ConfigError(f"model.path = {config.path!r} is a file, not a model folder; {FOLDER_FIX}")
        if not HUB_NAME.fullmatch(config.path):
            raise ConfigError(f"model.path = {config.path!r}: the folder does not exist; {FOLDER_FIX}")
        return None
    if config.revision is not None:
        raise ConfigError(
            f"model.revision = {config.revision!r} but model.path = {config.path!r} is a folder; leave it out, or "
            "set model.path to a hub name"
        )
    return checked_folder(folder, config.path)


def folder_of(path: str) -> Path:
    """Where `model.path` would be on this machine: an embedded policy's folder, else the path itself."""
    # By path: the package `learner` is above this one.
    embedded = STARTER_POLICIES.get(path)
    return Path(__file__).parents[1] / "learner" / embedded if embedded else local_path(path)


def known_config(path: str) -> Mapping[str, Any] | None:
    """The config.json of a hub model that this package knows; None for others, and for a folder of this name."""
    known: dict[str, Any] = tomllib.loads((resources.files(__package__) / "models.toml").read_text(encoding="utf-8"))
    return None if folder_of(path).is_dir() else known.get(path)


def checked_folder(folder: Path, setting: str) -> Path:
    """The folder, which has a config and complete weights in safetensors form. Raises ConfigError."""
    if not folder.is_dir():
        raise ConfigError(f"model.path = {setting!r}: the folder {folder.name} does not exist; {FOLDER_FIX}")
    read_config(folder, setting)
    weights = [folder / name for name in WEIGHTS if (folder / name).is_file()]
    if not weights:
        raise ConfigError(
            f"model.path = {setting!r} has neither {' nor '.join(WEIGHTS)}; "
            "write the weights as safetensors with model.save_pretrained"
        )
    if weights[0].suffix == ".json":
        shards = _read_object(weights[0], f"model.path = {setting!r}").get("weight_map")
        if not isinstance(shards, dict):
            raise ConfigError(f"model.path = {setting!r}: its {weights[0].name} has no weight_map; restore it")
        missing = sorted({str(name) for name in shards.values() if not (folder / str(name)).is_file()})
        if missing:
            raise ConfigError(f"model.path = {setting!r} lacks the weight file {missing[0]}; copy the whole folder")
    return folder


def read_config(folder: Path, path: str, setting: str = "model.path") -> dict[str, Any]:
    """A folder's config.json. Raises ConfigError naming the setting and its value, `path`."""
    return _read_object(folder / "config.json", f"{setting} = {path!r}")


def _read_object(file: Path, where: str) -> dict[str, Any]:
    try:
        body = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{where} has no {file.name}; {FOLDER_FIX}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: its {file.name} cannot be read ({error}); restore it") from error
    if not isinstance(body, dict):
        raise ConfigError(f"{where}: its {file.name} is not a JSON object; restore it")
    return body


def language_model(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the language model: of models with several inputs `text_config`."""
    inner = body.get("text_config")
    return inner if isinstance(inner, Mapping) else body


def experts_setting(text: Mapping[str, Any]) -> str | None:
    """The setting by which a layer has several experts; None for a dense model."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return next((name for name in names if text.get(name) not in (None, 0, 1)), None)


def check_architecture(body: Mapping[str, Any], config: RunConfig) -> None:
    """Raises ConfigError for a config.json whose model cannot be trained; what nobody tried is not refused."""
    text = language_model(body)
    kind = body.get("model_type")
    problem = FAMILIES.get(kind, TRAINS) if isinstance(kind, str) else TRAINS
    factor = next((name for name in HEAD_FACTORS if text.get(name) not in (None, 1)), None)
    experts = experts_setting(text)
    if problem == TRAINS:
        if body.get("is_encoder_decoder"):
            problem = FAMILIES["t5"]
        elif "quantization_config" in body:
            problem = "is quantized"
        elif factor is not None:  # before experts, which train with LoRA
            problem = f"scales its logits ({factor} = {text[factor]})"
        elif experts is not None and kind != WITH_EXPERTS:
            problem = f"has experts ({experts} = {text[experts]}){_UNEQUAL}"
    if problem == TRAINS and experts is not None and config.placement.tensor_parallel > 1:
        raise ConfigError("placement.tensor_parallel: the experts of a layer are synced as a whole; set it to 1")
    if problem != TRAINS and not (problem.endswith(_UNEQUAL) and config.learner.lora):
        raise ConfigError(f"model.path = {config.model.path!r}: the architecture {kind} {problem}; {_SUPPORTED}")


_MOST_DEVICES = 1024
"""Largest number that a message suggests; a config.json may state any number of heads."""


def uneven_split(
    heads: int, key_value_heads: int, number: int, model: str, setting: str = "placement.tensor_parallel"
) -> str | None:
    """Why `number` devices cannot have the same number of attention heads each, and what to set; None where they can.

    Key and value heads are split as well, or replicated where there are fewer. model: the model in words.
    """

    def divides(devices: int) -> bool:
        return heads % devices == 0 and (key_value_heads % devices == 0 or devices % key_value_heads == 0)

    if divides(number):
        return None
    possible = [str(devices) for devices in range(1, min(heads, _MOST_DEVICES) + 1) if divides(devices)]
    what = f"{heads} attention heads and {key_value_heads} key/value heads"
    return f"{setting} = {number} does not divide the {what} of {model}; set it to one of {', '.join(possible)}"


CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of attention heads that vLLM 0.32 computes on a CPU."""


def check_heads(body: Mapping[str, Any], config: RunConfig, device: str | None = None) -> None:
    """Raises ConfigError when vLLM cannot compute the attention heads, or not give each device the same number of them
    (`uneven_split`). device: of the engines, where `placement.device` leaves it open."""
    text, model = language_model(body), repr(config.model.path)
    heads, width = _heads(text), text.get("hidden_size")
    size = text.get("head_dim") or (width // heads if heads and isinstance(width, int) else None)
    on_cpu = (device or config.placement.device) == "cpu" and config.needs_engines
    if on_cpu and size is not None and size not in CPU_HEADS:
        raise ConfigError(
            f"model.path = {model}: vLLM cannot compute attention heads of {size} values on a CPU; choose a model with "
            f"heads of {', '.join(map(str, CPU_HEADS))}, or a machine with a GPU"
        )
    _check_split(text, config, "placement.tensor_parallel", config.placement.tensor_parallel)


def _heads(text: Mapping[str, Any]) -> int:
    """Query heads of a layer; 0 where that is not stated."""
    heads = text.get("num_attention_heads") or text.get("n_head")
    return heads if isinstance(heads, int) and heads > 0 else 0


def _check_split(text: Mapping[str, Any], config: RunConfig, setting: str, number: int) -> None:
    model, heads, shared = repr(config.model.path), _heads(text), text.get("num_key_value_heads")
    if number == 1:
        return
    if not heads:
        raise ConfigError(f"{setting}: config.json of {model} has no num_attention_heads; set it to 1")
    key_heads = shared if isinstance(shared, int) and shared > 0 else heads
    sentence = uneven_split(heads, key_heads, number, model, setting)
    if sentence is not None:
        raise ConfigError(sentence)


def check_sequence_parallel(body: Mapping[str, Any], config: RunConfig) -> None:
    """Raises ConfigError when ranks cannot share the columns of rows: the heads do not divide, or something besides
    attention is computed over whole rows."""
    text, size = language_model(body), config.learner.sequence_parallel
    layers, rotary = text.get("layer_types"), text.get("rope_scaling") or text.get("rope_parameters")
    others = {*map(str, layers if isinstance(layers, list) else ())} - {"full_attention", "sliding_attention"}
    rotary = rotary if isinstance(rotary, Mapping) else {}
    parts = [each for each in (rotary, *rotary.values()) if isinstance(each, Mapping)]
    kinds = {str(each.get("rope_type", each.get("type"))) for each in parts}
    problem = None
    if config.model.attention == "eager":
        problem = 'model.attention = "eager" cannot exchange columns for heads'
    elif others:
        problem = f"{config.model.path!r} has {min(others)} layers, which need whole rows"
    elif changing := kinds & {"dynamic", "longrope"}:
        problem = f"the frequencies of {config.model.path!r} ({min(changing)}) depend on the longest position of a row"
    if problem is not None and size > 1:
        raise ConfigError(f"learner.sequence_parallel = {size}: {problem}; set it to 1")
    _check_split(text, config, "learner.sequence_parallel", size)


def positions(body: Mapping[str, Any]) -> int | None:
    """Longest sequence of a model; None where its config.json does not say, or scales its positions."""
    text = language_model(body)
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    most = text.get("max_position_embeddings") or text.get("n_positions")
    scales = isinstance(rope, Mapping) and not rope.keys().isdisjoint(("factor", "long_factor"))
    return most if isinstance(most, int) and not scales else None


def check_positions(body: Mapping[str, Any], config: RunConfig) -> None:
    """Raises ConfigError when sequences may be longer than the positions of a model."""
    model, most = config.model, positions(body)
    if most is not None and model.max_length > most:
        what = f"the {most} positions of {model.path!r}"
        raise ConfigError(f"model.max_length = {model.max_length} exceeds {what}; set it to {most} or less")


def check_model(body: Mapping[str, Any], config: RunConfig, device: str | None = None) -> None:
    """All checks of a config.json for one run. Raises ConfigError."""
    check_architecture(body, config)
    check_sequence_parallel(body, config)
    check_heads(body, config, device)
    check_positions(body, config)
