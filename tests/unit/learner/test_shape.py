"""Into how many devices an engine can split a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gxpo_trainer.errors import ConfigError
from gxpo_trainer.learner.models import attention_heads, check_tensor_parallel
from gxpo_trainer.planner.devices import uneven_split


def folder(path: Path, **config: Any) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_key_value_heads_may_be_replicated_but_not_split_unevenly(tmp_path: Path) -> None:
    # Qwen2.5-1.5B: 12 heads, 2 key/value heads.
    model = folder(tmp_path, num_attention_heads=12, num_key_value_heads=2)
    for devices in (1, 2, 4, 6, 12):
        check_tensor_parallel(model, devices)
    with pytest.raises(ConfigError, match="tensor_parallel = 3 does not divide the 12 attention heads and 2 key/value"):
        check_tensor_parallel(model, 3)
    with pytest.raises(ConfigError, match=r"tensor_parallel = 8 .*set it to one of 1, 2, 4, 6, 12$"):
        check_tensor_parallel(model, 8)


def test_a_config_with_a_vast_number_of_heads_is_answered_at_once() -> None:
    sentence = uneven_split(10**15, 10**15, 3, "m")
    assert sentence is not None
    assert sentence.endswith(" 800, 1000, 1024")


def test_the_language_model_of_several_inputs_counts(tmp_path: Path) -> None:
    model = folder(tmp_path, num_attention_heads=5, text_config={"num_attention_heads": 8, "num_key_value_heads": 4})
    assert attention_heads(model) == (8, 4)


def test_without_key_value_heads_all_heads_have_their_own(tmp_path: Path) -> None:
    assert attention_heads(folder(tmp_path, n_head=6)) == (6, 6)


def test_a_model_of_unknown_shape_is_refused_for_several_devices_alone(tmp_path: Path) -> None:
    check_tensor_parallel(folder(tmp_path, model_type="strange"), 1)
    with pytest.raises(ConfigError, match=r"has no num_attention_heads.*set it to 1"):
        check_tensor_parallel(tmp_path, 2)
