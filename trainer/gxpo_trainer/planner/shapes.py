"""The shape of a transformer: parameters, floating-point operations and bytes that follow from its config.json.

Decoder-only models with gated MLPs, dense or with experts. Biases and the norms of queries and keys are counted;
rotary embeddings have no parameters.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from gxpo_trainer.config.model import STARTER_POLICIES
from gxpo_trainer.errors import ConfigError

_REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_BIASED = ("qwen2", "qwen2_moe")
_NORMED_HEADS = ("qwen3", "qwen3_moe")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder-only transformer.

    experts: MLPs a layer, of which a token passes `active_experts`; 1 and 1 for a dense model. intermediate: width of
    one of them. shared_intermediate: width of an MLP that every token passes in addition to the experts.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    experts: int = 1
    active_experts: int = 1
    shared_intermediate: int = 0
    attention_bias: bool = False
    head_norms: bool = False

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def attention_parameters(self) -> int:
        """Of one layer: q, k, v, o."""
        matrices = self.hidden * (2 * self.query_width + 2 * self.kv_width)
        bias = self.query_width + 2 * self.kv_width if self.attention_bias else 0
        return matrices + bias + (2 * self.head_dim if self.head_norms else 0)

    def layer_parameters(self, *, active: bool = False) -> int:
        """Of one layer; active: those that one token passes."""
        experts = self.active_experts if active else self.experts
        mlp = 3 * self.hidden * (experts * self.intermediate + self.shared_intermediate)
        router = self.hidden * self.experts if self.experts > 1 else 0
        return self.attention_parameters + mlp + router + 2 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All of them; tied embeddings once."""
        embeddings = self.embedding_parameters * (1 if self.tied else 2)
        return embeddings + self.layers * self.layer_parameters() + self.hidden

    @property
    def backbone_flops(self) -> int:
        """Of a token's forward pass through the layers, without the products of attention scores."""
        return 2 * self.layers * self.layer_parameters(active=True)

    @property
    def head_flops(self) -> int:
        """Of a token's logits."""
        return 2 * self.embedding_parameters

    def attention_flops(self, context: float) -> float:
        """Of a token that attends to `context` tokens: scores and weighted values in every layer."""
        return 4.0 * self.layers * self.query_width * context

    def kv_bytes(self, item: int) -> int:
        """Of one token in the KV cache."""
        return 2 * self.layers * self.kv_width * item

    def adapter_parameters(self, rank: int, targets: tuple[str, ...]) -> int:
        """LoRA matrices: rank × (inputs + outputs) for each target of each layer. Unknown names count nothing."""
        mlp = self.experts * self.intermediate
        sides = {
            "q_proj": self.hidden + self.query_width,
            "k_proj": self.hidden + self.kv_width,
            "v_proj": self.hidden + self.kv_width,
            "o_proj": self.query_width + self.hidden,
            "gate_proj": self.hidden * self.experts + mlp,
            "up_proj": self.hidden * self.experts + mlp,
            "down_proj": mlp + self.hidden * self.experts,
        }
        return self.layers * rank * sum(sides.get(name, 0) for name in set(targets))


def shape_of(config: Mapping[str, Any], where: str) -> ModelShape:
    """The shape that a config.json describes. Raises ConfigError naming `where` for one that is not supported."""
    body = config.get("text_config") if isinstance(config.get("text_config"), Mapping) else config
    assert body is not None
    missing = [name for name in _REQUIRED if not isinstance(body.get(name), int) or body[name] < 1]
    if missing:
        raise ConfigError(
            f"{where} has no {missing[0]}; a plan needs the config of a decoder-only model with a gated MLP, such as "
            "Llama, Qwen or Mistral"
        )

    def number(name: str, default: int) -> int:
        value = body.get(name)
        return value if isinstance(value, int) and value > 0 else default

    kind = str(body.get("model_type", ""))
    heads = body["num_attention_heads"]
    experts = number("num_local_experts", number("num_experts", 1))
    dense = body["intermediate_size"]
    return ModelShape(
        hidden=body["hidden_size"],
        intermediate=number("moe_intermediate_size", dense) if experts > 1 else dense,
        layers=body["num_hidden_layers"],
        heads=heads,
        kv_heads=number("num_key_value_heads", heads),
        head_dim=number("head_dim", max(1, body["hidden_size"] // heads)),
        vocabulary=body["vocab_size"],
        tied=bool(body.get("tie_word_embeddings", False)),
        experts=experts,
        active_experts=number("num_experts_per_tok", 1),
        shared_intermediate=number("shared_expert_intermediate_size", 0) if experts > 1 else 0,
        attention_bias=bool(body.get("attention_bias", kind in _BIASED)),
        head_norms=kind in _NORMED_HEADS,
    )


def read_shape(model_path: str) -> ModelShape:
    """The shape of `model.path`: a starter policy, a folder, or a hub model that this package knows.

    Never contacts a hub. Raises ConfigError for a folder without a readable config.json and for another hub name.
    """
    # By path: the package `models` is above this one.
    embedded = STARTER_POLICIES.get(model_path)
    folder = Path(__file__).parents[1] / "models" / embedded if embedded else Path(model_path)
    known = _known_models().get(model_path)
    if known is not None and not folder.expanduser().is_dir():
        return shape_of(known, model_path)
    return read_folder(folder.expanduser(), model_path)


def read_folder(folder: Path, model_path: str) -> ModelShape:
    """The shape in a folder's config.json. Raises ConfigError naming `model_path`."""
    where = f"model.path = {model_path!r}"
    if not folder.is_dir():
        raise ConfigError(f"{where} is not a folder here, and its shape is not known; use a local copy of the model")
    try:
        body = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{where} has no config.json; use a folder written by save_pretrained") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: its config.json cannot be read ({error}); restore it") from error
    if not isinstance(body, dict):
        raise ConfigError(f"{where}: its config.json is not a JSON object; restore it")
    return shape_of(body, where)


def _known_models() -> dict[str, Any]:
    return tomllib.loads((resources.files(__package__) / "models.toml").read_text(encoding="utf-8"))
