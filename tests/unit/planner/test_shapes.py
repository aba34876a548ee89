"""Shapes from config.json: parameter counts against published ones, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gxpo_trainer.errors import ConfigError
from gxpo_trainer.planner.devices import devices_of_cluster
from gxpo_trainer.planner.inputs import read_shape, shape_of


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # As the models' cards and weight files state them.
        ("Qwen/Qwen2.5-1.5B-Instruct", 1_543_714_304),
        ("Qwen/Qwen2.5-3B-Instruct", 3_085_938_688),
        ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512),
        ("meta-llama/Llama-3.2-3B-Instruct", 3_212_749_824),
    ],
)
def test_parameters_of_known_hub_models(name: str, parameters: int) -> None:
    assert read_shape(name).parameters == parameters


def test_parameters_of_the_starter_are_those_of_its_weights() -> None:
    from safetensors import safe_open

    folder = Path(__file__).parents[3] / "trainer" / "gxpo_trainer" / "learner" / "starter_policy"
    with safe_open(folder / "model.safetensors", "pt") as file:
        sizes = [file.get_tensor(name).numel() for name in file.keys()]  # noqa: SIM118 (it is no mapping)
    assert read_shape("starter").parameters == sum(sizes)


def test_experts_count_whole_and_a_token_passes_some() -> None:
    config = {
        "model_type": "qwen3_moe",
        "hidden_size": 8,
        "intermediate_size": 99,
        "moe_intermediate_size": 4,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 10,
    }
    shape = shape_of(config, "m")
    # Attention 4·64 and two norms of 4, router 8·6, experts 3·8·4 each, norms 2·8.
    assert shape.layer_parameters() == 256 + 8 + 48 + 6 * 96 + 16
    assert shape.layer_parameters(active=True) == 256 + 8 + 48 + 2 * 96 + 16
    assert shape.parameters == shape.layer_parameters() + 2 * 80 + 8


def test_a_model_inside_a_larger_one_is_read_from_its_text_config() -> None:
    text = json.loads(
        (Path(__file__).parents[3] / "trainer/gxpo_trainer/learner/starter_policy/config.json").read_text()
    )
    assert shape_of({"text_config": text}, "m") == shape_of(text, "m")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no config.json"),
        ("{", "config.json cannot be read"),
        ("[]", "is not a JSON object"),
        ('{"n_embd": 12}', "has no hidden_size; a plan needs the config of a decoder-only model"),
    ],
)
def test_a_folder_without_a_usable_config_is_named(content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_shape(str(tmp_path))
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_an_unknown_hub_name_is_not_asked_for() -> None:
    with pytest.raises(ConfigError, match="'org/unknown' is not a folder here, and its shape is not known"):
        read_shape("org/unknown")


def test_devices_are_found_by_the_names_of_ray() -> None:
    def names_of(*names: str) -> list[str]:
        cluster = ["CPU", "GPU", *(f"accelerator_type:{name}" for name in names)]
        return [device.name for device in devices_of_cluster(cluster)]

    assert names_of("H200") == ["h200-141"]
    assert names_of("H100") == ["h100-80", "h100-94"], "the name tells nothing of the memory"
    assert names_of("A100") == ["a100-40", "a100-80"]
    assert names_of("A100", "A100-80G") == ["a100-80"], "labelled by the operator"
    assert names_of() == []
    assert names_of("TPU-V4") == []
    assert names_of("H100", "L4") == names_of("H100", "TPU-V4") == [], "a cluster of two kinds has no one device"


@pytest.mark.parametrize(
    ("product", "names"),
    [
        ("NVIDIA A100-SXM4-80GB", ["a100-40", "a100-80"]),
        ("NVIDIA A100-PCIE-40GB", ["a100-40", "a100-80"]),
        ("NVIDIA H100 NVL", ["h100-80", "h100-94"]),
        ("NVIDIA H100 80GB HBM3", ["h100-80", "h100-94"]),
        ("NVIDIA L40S", ["l40s-48"]),
        ("NVIDIA GeForce RTX 4090", ["rtx4090-24"]),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", []),
        ("NVIDIA GeForce RTX 5090", ["rtx5090-32"]),
    ],
)
def test_the_driver_s_names_reach_the_table_through_ray(product: str, names: list[str]) -> None:
    from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager

    kind = NvidiaGPUAcceleratorManager._gpu_name_to_accelerator_type(product)
    assert [device.name for device in devices_of_cluster([f"accelerator_type:{kind}"])] == names
