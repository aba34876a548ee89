"""A run that cannot fit on the GPUs that Ray names is refused before its engines start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gxpo_trainer.cluster.placement import Placement
from gxpo_trainer.config.io import load_preset
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.training.planned import check_memory

CLUSTER = {"CPU": 64.0, "GPU": 4.0}
L4, H200 = {"accelerator_type:L4": 1.0}, {"accelerator_type:H200": 1.0}


def a_run(folder: Path, layers: int) -> Placement:
    """A model of 70 million parameters a layer on four shared GPUs."""
    body = {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "vocab_size": 32000,
    }
    (folder / "config.json").write_text(json.dumps(body))
    return Placement(load_preset("paper-1.5b"), "gpu", 1, 1, colocated=True)


def test_the_refusal_is_the_planners_sentence(tmp_path: Path) -> None:
    placement = a_run(tmp_path, layers=40)
    with pytest.raises(ConfigError, match=r"GiB per device and l4-24 has 22\.5 GiB; ") as caught:
        check_memory(placement, str(tmp_path), CLUSTER | L4)
    assert caught.value.reason == "no_resources"


def test_what_fits_or_is_not_known_is_not_refused(tmp_path: Path) -> None:
    placement = a_run(tmp_path, layers=28)
    check_memory(placement, str(tmp_path), CLUSTER | H200)
    check_memory(placement, str(tmp_path), CLUSTER)
    check_memory(placement, str(tmp_path / "nothing"), CLUSTER | L4)
    placement.device = "cpu"
    check_memory(placement, str(tmp_path), CLUSTER | L4)
