"""Loads the policy and its tokenizer from an embedded starter, a local transformers folder or a hub name.

Only safetensors weights are loaded, because pickled checkpoints can execute code. Dropout is disabled: look-ahead rules
compare gradients of the same function over several passes. torch is imported where weights are loaded only.

Uses of transformers 5 that are not public: `fp32_modules` and `_supports_attention_backend` here, and
`logprobs.attention_of`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from gxpo_trainer import __version__
from gxpo_trainer.config import LoraConfig, ModelConfig
from gxpo_trainer.config.engines import RANDOM_STARTER, STARTER_POLICIES
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.jsonl import local_path
from gxpo_trainer.planner.architectures import FOLDER_FIX, WEIGHTS, checked_folder, local_model, read_config

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

STARTER_FOLDER, STARTER_TOOLS_FOLDER, STARTER_SKILL_FOLDER = (
    Path(__file__).with_name(STARTER_POLICIES[name]) for name in ("starter", "starter-tools", "starter-skill")
)
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
TOKENIZER_FIX = "save one to the model folder with tokenizer.save_pretrained"
HUB_FILES = (
    *("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json"),
    *("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*"),
)
"""What is loaded of a hub repository: weights as safetensors, configuration, tokenizer."""


def resolve_model(config: ModelConfig) -> str:
    """The folder of `model.path`; a hub name is downloaded or taken from the hub's cache. Raises ConfigError."""
    local = local_model(config)
    if config.path == RANDOM_STARTER and local is not None:
        return str(_random_starter(local))
    if local is not None:
        return str(local)
    from huggingface_hub import snapshot_download

    patterns = [*HUB_FILES, "*.py"] if config.trust_remote_code else list(HUB_FILES)
    with _hub_errors(config):
        folder = snapshot_download(config.path, revision=config.revision, allow_patterns=patterns)
    return str(checked_folder(Path(folder), config.path))


def _random_starter(starter: Path) -> Path:
    """A copy of the starter policy with random weights, the same on every machine; built once. Raises ConfigError."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gxpo"
    folder = cache / f"{RANDOM_STARTER}-{__version__}"
    if folder.is_dir():
        return folder
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as temporary, torch.random.fork_rng(devices=[]):
            partial = Path(temporary) / "policy"
            shutil.copytree(starter, partial, ignore=shutil.ignore_patterns(WEIGHTS[0], "manifest.json"))
            torch.manual_seed(0)
            config = AutoConfig.from_pretrained(starter)
            AutoModelForCausalLM.from_config(config).save_pretrained(partial)  # type: ignore[no-untyped-call]
            try:
                partial.rename(folder)
            except OSError:
                if not folder.is_dir():  # another process was not first
                    raise
    except OSError as error:
        raise ConfigError(
            f"model.path = {RANDOM_STARTER!r}: cannot write {folder}: {error}; set XDG_CACHE_HOME to a folder with room"
        ) from error
    return folder


def pin_revision(config: ModelConfig) -> ModelConfig:
    """For a hub name: with the commit that its revision stands for now, so that all processes load the same files."""
    folder = Path(resolve_model(config))
    if folder.parent.name != "snapshots" or local_path(config.path).is_dir():
        return config
    return config.model_copy(update={"revision": folder.name})


def config_json(config: ModelConfig) -> dict[str, Any]:
    """The config.json of `model.path`; of a hub name it alone is downloaded. Raises ConfigError."""
    folder = local_model(config)
    if folder is None:
        from huggingface_hub import hf_hub_download

        with _hub_errors(config):
            folder = Path(hf_hub_download(config.path, "config.json", revision=config.revision)).parent
    return read_config(folder, config.path)


@contextmanager
def _hub_errors(config: ModelConfig) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # The hub client has no common base for offline, unknown name and no access.
        raise ConfigError(
            f"model.path = {config.path!r} with model.revision = {config.revision!r} cannot be loaded from the hub "
            f"({type(error).__name__}: {_first_line(error)}); check both and the connection, or {FOLDER_FIX}"
        ) from error


def load_config(config: ModelConfig) -> Any:
    """The model's transformers config without dropout. Raises ConfigError."""
    from transformers import AutoConfig

    with _loading(config, "cannot be loaded", FOLDER_FIX):
        loaded = AutoConfig.from_pretrained(resolve_model(config), trust_remote_code=config.trust_remote_code)
    _without_dropout(loaded)
    return loaded


def fp32_modules(config: ModelConfig) -> tuple[str, ...]:
    """Name patterns of the modules that transformers keeps in fp32 when a model is loaded in bf16."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(load_config(config)), None)
    return tuple(getattr(kind, "_keep_in_fp32_modules_strict", None) or ())


def load_policy(
    config: ModelConfig,
    *,
    precision: Literal["fp32", "bf16"],
    lora: LoraConfig | None = None,
    device: torch.device | None = None,
) -> PreTrainedModel:
    """Load a causal LM with parameters in `precision`, in training mode without dropout, with PEFT if `lora` is set.

    Adapters are initialized from torch's global generator. device: None for the host, where the weights are pages of
    the model's files as far as their dtype allows. Raises ConfigError.
    """
    import torch
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.utils import logging

    from gxpo_trainer.learner import logprobs, sequence_parallel

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if config.attention == logprobs.NAME:
        AttentionInterface.register(logprobs.NAME, logprobs.varlen_attention)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    model_config = load_config(config)
    with _loading(config, "cannot be loaded", FOLDER_FIX):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            resolve_model(config),
            config=model_config,
            output_loading_info=True,
            dtype=dtype,
            device_map=None if device is None else {"": device},
            attn_implementation="sdpa" if config.attention == "auto" else config.attention,
            use_safetensors=True,
            trust_remote_code=config.trust_remote_code,
        )
    model, report = loaded
    fixes = {logprobs.NAME: 'model.attention = "sdpa"', sequence_parallel.NAME: "learner.sequence_parallel = 1"}
    if config.attention in fixes and not model._supports_attention_backend:
        raise ConfigError(
            f'"{config.attention}" attention is not possible: {type(model).__name__} has an attention of its own; '
            f"set {fixes[config.attention]}"
        )
    if report["missing_keys"]:
        # transformers initializes missing weights randomly.
        raise ConfigError(
            f"model.path = {config.path!r} lacks the weight {min(report['missing_keys'])} ("
            f"{len(report['missing_keys'])} missing in total); use a complete checkpoint of a causal language model"
        )
    if config.kernels == "liger":
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        # The head and its loss stay ours.
        _apply_liger_kernel_to_instance(model, cross_entropy=False, fused_linear_cross_entropy=False)
    if config.recomputes_activations(sum(logprobs.whole_shape(parameter).numel() for parameter in model.parameters())):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if lora is not None:
        model = _with_adapter(model, lora)
    # Gradient checkpointing is active in training mode only; dropout stays disabled.
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return cast("PreTrainedModel", model)


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The model's tokenizer, padding with the end-of-sequence token if it has no padding token. Raises ConfigError."""
    from transformers import AutoTokenizer

    source = resolve_model(config)
    # Without a vocabulary transformers creates an empty tokenizer.
    if Path(source).is_dir() and not any((Path(source) / name).is_file() for name in VOCABULARIES):
        raise ConfigError(
            f"model.path = {config.path!r} has no tokenizer (none of {', '.join(VOCABULARIES)}); {TOKENIZER_FIX}"
        )
    with _loading(config, "has no usable tokenizer", TOKENIZER_FIX):
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=config.trust_remote_code)
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"model.path = {config.path!r}: the tokenizer has no end-of-sequence token; set eos_token in "
            "tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


@contextmanager
def _loading(config: ModelConfig, problem: str, fix: str) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"model.path = {config.path!r} {problem}: {_first_line(error)}; {fix}") from error


def _without_dropout(config: Any) -> None:
    """Set every dropout probability of a transformers config, nested ones included, to 0."""
    for name, value in vars(config).items():
        if name.endswith(("dropout", "drop")) and isinstance(value, float):
            setattr(config, name, 0.0)
        elif hasattr(value, "model_type"):
            _without_dropout(value)


def _with_adapter(model: Any, lora: LoraConfig) -> Any:
    from peft import LoraConfig as PeftLoraConfig, TaskType, get_peft_model

    adapter = PeftLoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # PEFT divides by the rank: any number will do
        lora_dropout=0.0,
        target_modules=list(lora.target_modules),
        task_type=TaskType.CAUSAL_LM,
    )
    try:
        # One dtype for all parameters; the engine keeps fp32 master weights of the adapter.
        adapted = get_peft_model(model, adapter, autocast_adapter_dtype=False)
        if any(hasattr(layer, "lora_A") for layer in (model.get_input_embeddings(), model.get_output_embeddings())):
            raise ValueError("an adapter of the embeddings or of the head is not supported")
        return adapted
    except ValueError as error:
        raise ConfigError(
            f"learner.lora.target_modules = {list(lora.target_modules)} does not fit the model: {_first_line(error)}; "
            "name linear layers of the model, e.g. q_proj, k_proj, v_proj, o_proj"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
